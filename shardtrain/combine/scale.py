"""A codec that multiplies by a factor before the ranks are combined, and by another after it."""

from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.combine.combiner import Codec, Combined, Combiner
from shardtrain.combine.group import Group

LEAST = 2e-38
"""The smallest factor: float32 can represent it and its inverse."""


def scale(factors: float | str = 1.0) -> Codec:
    """Multiply each rank's leaves by a factor, and the combined result by another.

    It sends the same bytes as the combiner after it, and has no state. "scale:0.5+mean" is half of the mean;
    "scale:0.001,1000+file.py:name" gives the result of that combiner, but its sums are 1000 times smaller, so
    that 16 bits do not overflow. `float16` needs no such factor: it finds one for each leaf in each step.

    Args:
      factors: the factor before combining, or both factors separated by a comma, such as "0.001,1000"; the
        factor after combining is 1 if it is left out.

    Raises:
      ValueError: a factor is not a number from 2e-38 to 5e37, or there are more than two.

    Source: Sergeev and Del Balso 2018, Horovod; its prescale_factor and postscale_factor.

    >>> from shardtrain.combine import MeshGroup, mean
    >>> half = scale(0.5)(mean())
    >>> combine = lambda x: half.combine(x, 1.0, (), MeshGroup("data", 2)).value
    >>> jax.vmap(combine, axis_name="data")(jnp.array([1.0, 5.0])).tolist()
    [1.5, 1.5]
    """
    before, after = _parse(factors)

    def codec(inner: Combiner) -> Combiner:
        def combine(tree: Any, count: Any, state: Any, group: Group) -> Combined:
            found = inner.combine(_scale_tree(tree, before), count, state, group)
            # what was rounded off is of the scaled tree
            residual = None if found.residual is None else _scale_tree(found.residual, 1 / before)
            return found._replace(value=_scale_tree(found.value, after), residual=residual)

        return Combiner(inner.init, combine, inner.linear, inner.across_leaves, inner.is_one_vector)

    return codec


def _parse(factors: Any) -> tuple[float, float]:
    try:
        before, after = (*(float(each) for each in str(factors).split(",")), 1.0)[:2]
        if str(factors).count(",") < 2 and all(LEAST <= each <= 1 / LEAST for each in (before, after)):
            return before, after
    except ValueError:
        pass
    raise ValueError(
        f"scale is {str(factors)!r}; use a number from {LEAST:g} to {1 / LEAST:g}, such as 0.5, or two with a"
        " comma between, such as '0.5,2', of which the second one comes after"
    )


def _scale_tree(tree: Any, factor: float) -> Any:
    """Multiply in float32; leaves keep their dtypes."""
    return jax.tree.map(lambda x: (x.astype(jnp.float32) * factor).astype(x.dtype), tree)
