"""Build a model: sizes, split into units, forward as a coroutine, files."""
