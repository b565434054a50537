"""Policy, in pure Python: makes, checks and prices the program of a step."""
