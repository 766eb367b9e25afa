"""Scale arrays exactly, by powers of two that are given as int32 exponents.

XLA on CPU flushes subnormal numbers to zero, so all powers here are normal.
"""

import jax
import jax.numpy as jnp
from jax import lax

LEAST, MOST = -126, 126
"""Exponents of float32 whose powers, and the inverse powers, are normal."""


def exponent(x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """Return the e with 2^e <= max |x| < 2^(e+1), between -126 and 126.

    It is -126 where x is empty, zero or subnormal.

    Args:
      x: any float dtype.
      axis: the dims over which the max is taken; None is all.

    >>> exponent(jnp.array([0.3, -5.0])).item(), exponent(jnp.zeros(3)).item()
    (2, -126)
    """
    greatest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis, initial=0)
    bits = lax.bitcast_convert_type(greatest, jnp.int32)
    return jnp.clip((bits >> 23) - 127, LEAST, MOST)


def power(e: jax.Array) -> jax.Array:
    """Return 2^e in float32, 0 where that is below the normal numbers.

    >>> power(jnp.array([3, -1, -200])).tolist()
    [8.0, 0.5, 0.0]
    """
    bits = (jnp.clip(e, LEAST, 127) + 127) << 23
    return jnp.where(e < LEAST, 0, lax.bitcast_convert_type(bits, jnp.float32))
