"""A model cut into stages that microbatches pass through: start with `table.py` (tasks as data, no jax)."""
