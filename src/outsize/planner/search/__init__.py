"""The plan of a step: what is set aside, how the model is cut, and what the memory left over is spent on."""
