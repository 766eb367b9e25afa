"""Read, cut and rebuild traced programs of jax. Start with `equations.py`."""
