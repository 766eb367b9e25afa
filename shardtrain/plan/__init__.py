"""Looking ahead: what a compiled step moves, needs and costs, before it runs. jax is in `compile.py` alone."""
