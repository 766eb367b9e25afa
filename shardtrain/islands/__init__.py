"""Islands, each a JAX runtime of its own, joined by MPI: start with `place.py` (who am I, no jax, no MPI)."""
