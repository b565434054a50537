"""Passes: each takes a program and returns the program with what follows from it inserted."""
