"""How a unit runs: the cut autograd graph, what is saved for a backward, and what is computed again."""
