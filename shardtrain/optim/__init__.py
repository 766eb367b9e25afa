"""Optimizers and schedules of optax, and a run scaled to more replicas."""
