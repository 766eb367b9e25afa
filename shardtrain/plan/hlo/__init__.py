"""Read collectives and flops from the text of a compiled XLA program. No jax."""
