"""The control plane of a run: what it is, resolved once, for whoever opens it."""
