"""``outsize plan``: what is asked, of which model and machine, and how the answer reads."""
