"""Exact searches over the layers of a model, for the split of each layer and the cut of a pipeline.

Only `trace_layers.py` imports jax."""
