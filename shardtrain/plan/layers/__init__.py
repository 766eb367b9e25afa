"""Exact searches over the layers of a model: how each is partitioned, and where a pipeline is cut.

No jax but in `trace_layers.py`."""
