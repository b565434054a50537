"""What the machine is: its figures, where each comes from, and presets of common parts."""
