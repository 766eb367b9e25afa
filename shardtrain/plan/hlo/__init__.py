"""The text of a compiled XLA program, read: collectives, their axes, counts and bytes. No jax."""
