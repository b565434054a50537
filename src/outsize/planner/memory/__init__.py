"""What a step holds in each tier, and what crosses the links in one step: exact sums."""
