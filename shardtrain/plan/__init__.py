"""Memory and communication of a step, compiled and by theory, before it runs.

Only `compile.py` imports jax."""
