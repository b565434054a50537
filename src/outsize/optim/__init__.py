"""How a parameter steps: state layouts, AdamW, SGD and Lion on flat planes, clipping, learning rates."""
