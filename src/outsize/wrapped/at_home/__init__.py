"""Tensors at home as torch sees them: parameters in memory, and tensors that rest on disk or encoded."""
