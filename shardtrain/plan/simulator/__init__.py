"""Simulation of the tasks of a training step with a queue for each device and link. No jax."""
