"""Measure the squared norms of the gradients that a step adds up, for the gradient noise scale.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", https://arxiv.org/abs/1812.06162,
appendix A.1. Next: `plan/advice/noise_scale.py`, which smooths them over steps.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.functional.sums import GradientSquares


def square_gradients(grads: Any, counts: jax.Array) -> GradientSquares:
    """Return the squared norm of each replica's gradient, for use inside jit.

    Args:
      grads: gradients of sums over examples, each array (R, ...), float32.
      counts: float32 (R,), numbers of examples or tokens.

    Returns:
      Squares with arrays (R,).
    """
    norms = [jnp.square(g).reshape(len(g), math.prod(g.shape[1:])).sum(1) for g in jax.tree.leaves(grads)]
    return GradientSquares(jnp.stack(norms).sum(0), jnp.square(counts))


def estimate_noise(squares: GradientSquares, norm: jax.Array, count: jax.Array) -> dict[str, Any]:
    """Estimate the true gradient and the noise of one example from one step, without bias.

    A gradient S_i of a sum over c_i examples has E|S_i|^2 = c_i^2 |G|^2 + c_i tr(Sigma), and so has the
    gradient of the sum over all C examples. Both unknowns follow from these two, however unequal the c_i are.
    A single estimate is mostly noise, and the estimate of |G|^2 may be negative: average over many steps.

    Args:
      squares: sums over all gradients S_i of the step.
      norm: float32 scalar, the norm of the gradient of the mean over all examples.
      count: float32 scalar, C.

    Returns:
      Name -> (value, weight): |G|^2, tr(Sigma) and C; the weight is 0 if one gradient has all examples.
    """
    whole = jnp.square(jnp.where(count > 0, count, 1))
    norms, counts = squares.norms / whole, squares.counts / whole
    # 1 / number of gradients, if these are of equally many examples
    known = (counts > 0) & (counts < 1 - 1e-5)
    square = (jnp.square(norm) - norms) / jnp.where(known, 1 - counts, 1)
    trace = count * (norms - counts * square)
    weight = jnp.float32(known)
    found = {"gradient_square": square, "gradient_trace": trace, "gradient_batch": count}
    return {name: (jnp.where(known, value, 0), weight) for name, value in found.items()}
