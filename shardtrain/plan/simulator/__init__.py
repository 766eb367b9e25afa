"""Task graphs of a training step, and their simulation with a queue for each device and link. No jax."""
