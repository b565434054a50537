"""GPUs by name, hosts that are usual for them, and what published runs reach of their peaks."""
