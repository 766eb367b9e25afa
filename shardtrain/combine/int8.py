"""A codec that sends each element in 8 bits, with one scale for each leaf."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.combine.codec import Encoding, Leaves, gathered
from shardtrain.combine.combiner import Codec
from shardtrain.combine.group import Group

LEVELS = 127
TINY = float(jnp.finfo(jnp.float32).tiny)


def int8() -> Codec:
    """Send each leaf as integers from -127 to 127, where 127 is its greatest magnitude; rounds to nearest.

    A payload has n' + 4 L + 4 bytes for n' elements in L leaves. All ranks gather all payloads, so each
    sends its own to P - 1 ranks: less than a float32 all-reduce below P = 8. The combiner after it works
    on float32. A NaN or an infinity makes the whole leaf NaN.

    Source: Dettmers 2016, 8-bit approximations for parallelism in deep learning, section 2 (linear, with
    the error feedback of Seide et al. 2014).
    """
    return gathered(Encoding(init=lambda leaves: (), encode=_encode, decode=_decode))


def _encode(leaves: Leaves, state: Any, group: Group) -> tuple[Any, Any]:
    if not leaves:
        return ([], jnp.zeros(0)), state
    # a NaN counts as an infinity: a max over shards may drop a NaN, never an infinity
    greatest = [jnp.max(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)), initial=0) for x in leaves]
    scales = group.whole(jnp.stack(greatest), "max") / LEVELS
    divisors = jnp.where(scales < TINY, 1, scales)
    steps = [
        jnp.clip(jnp.round(x / d), -LEVELS, LEVELS).astype(jnp.int8)
        for x, d in zip(leaves, divisors, strict=True)
    ]
    return (steps, scales), state


def _decode(payload: Any, shapes: Sequence[jax.ShapeDtypeStruct]) -> Leaves:
    steps, scales = payload
    return [x.astype(jnp.float32) * scale for x, scale in zip(steps, scales, strict=True)]
