"""What a run says of itself while it runs: the form of its heartbeat, what the driver counts, and who else is told."""
