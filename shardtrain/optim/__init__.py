"""Optimizers and learning-rate schedules of optax, and scaling of a run to more replicas."""
