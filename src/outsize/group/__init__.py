"""Processes that train one model together: who they are, sums and gathers over them, and who of them is lost."""
