"""Flax models as a user would write them: dims named in Flax's own way, no trainer inside."""
