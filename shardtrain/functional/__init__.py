"""Models, losses and randomness as pure functions."""
