"""How a parameter steps: state layouts, optimizers on flat planes and whole units, clipping, learning rates."""
