"""What is known of a run before it is decided: the split model, its demand, the machine and the budgets."""
