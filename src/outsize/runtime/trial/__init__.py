"""What a microbatch needs on a device, measured on one unit of each kind."""
