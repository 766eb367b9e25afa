"""Models, losses and random keys as pure functions; the boundary to Flax."""
