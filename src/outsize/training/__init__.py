"""Wiring: a run from its configuration to its result."""
