"""Codecs that round leaves to 16-bit floats for the combiner after them.

Each rank adds its rounding errors in its next round, including those of the slice that it summed in `mean`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.combine.codec import Feedback, add_residual, all_finite, make_zero_residual, select
from shardtrain.combine.combiner import Codec, Combined, Combiner, flatten
from shardtrain.combine.exponents import exponent, power
from shardtrain.combine.group import Group

FLOAT16_EXPONENT = 14
"""A float16 of this exponent is below 2^15, half of what float16 can hold."""


def bfloat16() -> Codec:
    """Send leaves as bfloat16, half of float32's bytes: 8 bits of precision, float32's range.

    Before `mean`, `sum` or `adasum`: 2 n' (P - 1) / P bytes per rank for n' = 2 bytes per element. Rounding
    errors of `adasum` after each level are not added in the next round.

    Source: Seide et al. 2014, 1-bit stochastic gradient descent, section 2 (error feedback).
    """
    return _make_narrow_codec(jnp.bfloat16, scaled=False)


def float16() -> Codec:
    """Send leaves as float16, half of float32's bytes: 11 bits of precision, small range.

    Each leaf is scaled by a power of two, the same on all ranks, that brings the greatest element of any
    rank to 2^14 / P, so that their sum does not overflow; elements 2^28 / P times smaller lose precision.
    Costs `bfloat16`'s bytes, and one all-gather of 4 L bytes for L leaves.

    Source: Micikevicius et al. 2018, Mixed precision training, section 3.2 (scaling).
    """
    return _make_narrow_codec(jnp.float16, scaled=True)


def _make_narrow_codec(dtype: Any, scaled: bool) -> Codec:
    def codec(inner: Combiner) -> Combiner:
        def init(tree: Any) -> Feedback:
            narrow = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tree)
            return Feedback(make_zero_residual(jax.tree.leaves(tree)), (), inner.init(narrow))

        def combine(tree: Any, count: Any, state: Feedback, group: Group) -> Combined:
            leaves, structure = flatten(tree)
            count = jnp.asarray(count, jnp.float32)
            target = add_residual(leaves, state.residual, count)

            # scaled by a power of two, which is exact, then rounded to 16 bits
            exponents = (
                _find_common_exponents(target, count, group) if scaled else [jnp.int32(0)] * len(leaves)
            )
            narrow = [(x * power(-e)).astype(dtype) for x, e in zip(target, exponents, strict=True)]
            found = inner.combine(jax.tree.unflatten(structure, narrow), count, state.inner, group)

            def unscale(x: Any) -> list[jax.Array]:
                scales = zip(jax.tree.leaves(x), exponents, strict=True)
                return [leaf.astype(jnp.float32) * power(e) for leaf, e in scales]

            # two roundings: of what this rank sends, and of what the combiner computes from it
            rounded = [0.0] * len(leaves) if found.residual is None else unscale(found.residual)
            residual = [t - s + r for t, s, r in zip(target, unscale(narrow), rounded, strict=True)]
            values = [x.astype(leaf.dtype) for x, leaf in zip(unscale(found.value), leaves, strict=True)]
            value = jax.tree.unflatten(structure, values)
            is_valid = (count != 0) & all_finite(value, group)
            next_state = select(is_valid, Feedback(residual, (), found.state), state)
            return Combined(value, next_state, found.metrics)

        return Combiner(init, combine, across_leaves=inner.across_leaves, is_one_vector=inner.is_one_vector)

    return codec


def _find_common_exponents(leaves: list[jax.Array], count: jax.Array, group: Group) -> list[jax.Array]:
    """Return the exponents that bring each leaf's greatest element of any rank to 2^14 / P."""
    if not leaves:
        return []
    # shards of one leaf may have different exponents: powers of two are exact
    greatest = (
        group.all_gather(jnp.stack([exponent(leaf) for leaf in leaves])).max(0)
        - FLOAT16_EXPONENT
        + (group.size - 1).bit_length()
    )
    return list(jnp.clip(greatest, -126, 126))
