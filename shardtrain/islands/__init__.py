"""Join islands, each with its own JAX runtime, by MPI. Start with `rank_environment.py` (no jax)."""
