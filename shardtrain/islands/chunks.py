"""Send an array in chunks where it has more elements than an MPI count, which is a C int, can hold.

Next: `bridge.py`, whose operations are called chunk by chunk.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

MOST_ELEMENTS = 2**31 - 1
"""The largest C int."""


def in_chunks(
    operation: Callable[[jax.Array], jax.Array], x: jax.Array, most_elements: int = MOST_ELEMENTS
) -> jax.Array:
    """Apply an operation that works on each element by itself, to at most so many elements at a time.

    Args:
      operation: array -> array of the same shape, or with more dims before those.
      x: of any shape.
      most_elements: the largest number of elements of one call, 1 or more.

    Returns:
      What the operation returns for the whole array.

    >>> calls = []
    >>> double = lambda x: calls.append(x.shape) or 2 * x
    >>> in_chunks(double, jnp.ones((2, 4)), 3).shape, calls
    ((2, 4), [(3,), (3,), (2,)])
    """
    if x.size <= most_elements:
        return operation(x)
    flat = x.reshape(-1)
    starts = range(0, x.size, most_elements)
    found = [operation(lax.slice_in_dim(flat, start, min(start + most_elements, x.size))) for start in starts]
    whole = jnp.concatenate(found, axis=-1)
    return whole.reshape(*whole.shape[:-1], *x.shape)
