"""Looking ahead: what a compiled step moves, needs and costs, before it runs. Only `compile.py` has jax."""
