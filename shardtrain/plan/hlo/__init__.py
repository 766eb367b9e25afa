"""Read the text of a compiled XLA program: collectives, their axes, counts and bytes. No jax."""
