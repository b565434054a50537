"""What a step would take on a machine: a question, its candidates, and their predictions."""
