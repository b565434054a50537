"""Text out of a model: prompts in, text piece by piece, and what its files say of how it is written."""
