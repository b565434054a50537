"""Times what the machine does: host memory, optimizer, disks, compute, links. What it *is* stands in `hardware`."""
