"""Checkpoints of a run: written beside training, found again, gone on from, exported."""
