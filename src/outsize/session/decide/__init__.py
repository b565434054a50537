"""What is decided of a run: the rates it is decided on, codecs, and what becomes of activations."""
