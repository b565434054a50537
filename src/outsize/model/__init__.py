"""What the model is: its numbers, its units, its own forward as a coroutine, its files."""
