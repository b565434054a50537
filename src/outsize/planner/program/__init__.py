"""The program of a step: its ops, its text, and the rules that every program obeys."""
