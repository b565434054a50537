"""What a run says of its steps: seconds by cause, bytes by lane, memory by tier."""
