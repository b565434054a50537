"""A call of a wrapped model: its batch, what it may ask for, what it is computed in."""
