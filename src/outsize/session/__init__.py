"""From a configuration to a model that streams: the tiers of a run, opened and filled, and an engine over them."""
