"""Groups of processes that train one model: ranks, sums, gathers, and the loss of a rank."""
