"""What a person reads of a run: the progress bar, tables, the loss curve.

Each file stands alone and is imported by itself; none imports jax.
"""
