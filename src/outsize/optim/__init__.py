"""How a parameter steps: state layouts, AdamW on flat planes, clipping, learning rates."""
