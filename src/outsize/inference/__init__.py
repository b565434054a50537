"""Forwards that no backward follows: weights kept, streamed and looked up under a model's own code."""
