"""A search of a sharding for each operator of a step. No jax but to trace it."""
