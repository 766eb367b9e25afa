"""Codecs that send leaves as 16-bit floats; the combiner behind them works on these.

What a rank rounds off goes into its next round, also what `mean` rounds off the slice that it added up.
"""

from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.combine.codec import Feedback, arrived, settled, targets, zeros_like
from shardtrain.combine.combiner import Codec, Combined, Combiner, flatten
from shardtrain.combine.exponents import exponent, power
from shardtrain.combine.group import Group

FLOAT16_EXPONENT = 14
"""A float16 of this exponent is below 2^15, half of what float16 can hold."""


def bfloat16() -> Codec:
    """Leaves cross as bfloat16, half of float32's bytes: 8 bits of precision, float32's range.

    Before `mean`, `sum` or `adasum`: 2 n' (P - 1) / P bytes per rank for n' = 2 bytes per element. What
    `adasum` rounds after each level is not made good in the next round.

    Source: Seide et al. 2014, 1-bit stochastic gradient descent, section 2 (error feedback).
    """
    return _narrow(jnp.bfloat16, scaled=False)


def float16() -> Codec:
    """Leaves cross as float16, half of float32's bytes: 11 bits of precision, small range.

    Each leaf is scaled by a power of two, the same on all ranks: the greatest element of any rank comes
    to 2^14 / P, so that not even their sum overflows; what is 2^28 / P below it loses precision. Costs
    `bfloat16`'s bytes, and one all-gather of 4 L bytes for L leaves.

    Source: Micikevicius et al. 2018, Mixed precision training, section 3.2 (scaling).
    """
    return _narrow(jnp.float16, scaled=True)


def _narrow(dtype: Any, scaled: bool) -> Codec:
    def codec(inner: Combiner) -> Combiner:
        def init(tree: Any) -> Feedback:
            narrow = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tree)
            return Feedback(zeros_like(jax.tree.leaves(tree)), (), inner.init(narrow))

        def combine(tree: Any, count: Any, state: Feedback, group: Group) -> Combined:
            leaves, structure = flatten(tree)
            count = jnp.asarray(count, jnp.float32)
            target = targets(leaves, state.residual, count)
            exponents = _common_exponents(target, count, group) if scaled else [jnp.int32(0)] * len(leaves)
            narrow = [(x * power(-e)).astype(dtype) for x, e in zip(target, exponents, strict=True)]
            found = inner.combine(jax.tree.unflatten(structure, narrow), count, state.inner, group)

            def wide(x: Any) -> list[jax.Array]:
                scales = zip(jax.tree.leaves(x), exponents, strict=True)
                return [leaf.astype(jnp.float32) * power(e) for leaf, e in scales]

            lost = [0.0] * len(leaves) if found.lost is None else wide(found.lost)
            residual = [t - s + m for t, s, m in zip(target, wide(narrow), lost, strict=True)]
            values = [x.astype(leaf.dtype) for x, leaf in zip(wide(found.value), leaves, strict=True)]
            value = jax.tree.unflatten(structure, values)
            after = settled((count != 0) & arrived(value, group), Feedback(residual, (), found.state), state)
            return Combined(value, after, found.metrics)

        return Combiner(init, combine, across_leaves=inner.across_leaves)

    return codec


def _common_exponents(leaves: list[jax.Array], count: jax.Array, group: Group) -> list[jax.Array]:
    """What brings each leaf's greatest element of any rank to 2^14 / P."""
    if not leaves:
        return []
    # shards of a leaf may differ: a power of two costs no digits
    greatest = (
        group.all_gather(jnp.stack([exponent(leaf) for leaf in leaves])).max(0)
        - FLOAT16_EXPONENT
        + (group.size - 1).bit_length()
    )
    return list(jnp.clip(greatest, -126, 126))
