"""Islands, each a JAX runtime of its own, joined by MPI: start with `rank_environment.py` (no jax)."""
