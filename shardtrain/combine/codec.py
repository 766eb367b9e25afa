"""Error feedback and all-gathers, which codecs share.

A codec sends less than the leaves, and adds the difference, its residual, in the next round.
Next: `narrow.py` (16 bits), `int8.py`, `top_k.py`, `power_sgd.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.combine.combiner import Codec, Combined, Combiner, flatten, mask_without_examples
from shardtrain.combine.group import Group, MeshGroup

Leaves = list[jax.Array]


class Feedback(NamedTuple):
    """The state of a codec.

    Attributes:
      residual: float32, like each leaf: what this rank has not sent yet.
      codec: the codec's own state, such as PowerSGD's factors.
      inner: the state of the combiner after it.
    """

    residual: Leaves
    codec: Any
    inner: Any


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Functions that encode a rank's leaves as a payload and decode it, inside jit.

    Args:
      init: leaves or their shapes -> the codec's state on each rank.
      encode: (float32 leaves, state, group) -> (payload, next state). The payload is a tree of arrays of 8,
        16 or 32 bits.
      decode: (payload, shapes of the leaves) -> float32 leaves.
    """

    init: Callable[[Sequence[Any]], Any]
    encode: Callable[[Leaves, Any, Group], tuple[Any, Any]]
    decode: Callable[[Any, Sequence[jax.ShapeDtypeStruct]], Leaves]


def make_zero_residual(leaves: Sequence[Any]) -> Leaves:
    """Return the residual before the first round, float32 zeros."""
    return [jnp.zeros(leaf.shape, jnp.float32) for leaf in leaves]


def add_residual(leaves: Leaves, residual: Leaves, count: jax.Array) -> Leaves:
    """Return what a rank would send without a codec: float32 leaves plus the residual."""
    return [
        mask_without_examples(x.astype(jnp.float32), count) + r for x, r in zip(leaves, residual, strict=True)
    ]


def all_finite(value: Any, group: Group) -> jax.Array:
    """Return whether a combined value is finite on all shards.

    If it is not, the step is skipped, and the states of codecs must not change.
    """
    leaves = jax.tree.leaves(value)
    if not leaves:
        return jnp.bool_(True)
    wrong = jnp.stack([jnp.any(~jnp.isfinite(leaf)) for leaf in leaves]).astype(jnp.int32)
    return group.whole(wrong, "max").max() == 0


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """Return the tree `new` where a scalar condition holds, else `old`."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def gathered(encoding: Encoding) -> Codec:
    """Make a codec that all-gathers payloads; each rank decodes and combines all of them.

    It sends the payload to P - 1 ranks, while an all-reduce of n bytes sends 2 n (P - 1) / P: it saves bytes
    if the payload is smaller than 2 n / P. Decoding and combining takes P times the memory and the
    time on each rank. States of the combiner after it are gathered too; most have none.
    """

    def codec(inner: Combiner) -> Combiner:
        def init(tree: Any) -> Feedback:
            leaves = jax.tree.leaves(tree)
            return Feedback(make_zero_residual(leaves), encoding.init(leaves), inner.init(tree))

        def combine(tree: Any, count: Any, state: Feedback, group: Group) -> Combined:
            leaves, structure = flatten(tree)
            count = jnp.asarray(count, jnp.float32)
            shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in leaves]
            # encode the gradient plus what earlier rounds could not send
            target = add_residual(leaves, state.residual, count)
            payload, codec_state = encoding.encode(target, state.codec, group)
            sent = encoding.decode(payload, shapes)

            def combine_rank(payload: Any, count: jax.Array, state: Any) -> Combined:
                tree = jax.tree.unflatten(structure, encoding.decode(payload, shapes))
                return inner.combine(tree, count, state, stack)

            # the gathered payloads are a leading dim; vmap over it lets the combiner run as on P ranks
            stack = MeshGroup(f"{getattr(group, 'axis', 'ranks')}_gathered", group.size, outer=group)
            gathered_inputs = gather((payload, count, state.inner), group)
            found = jax.vmap(combine_rank, axis_name=stack.axis)(*gathered_inputs)

            # the value is the same on every rank of the stack; this rank keeps only its own state
            value = jax.tree.map(lambda x, leaf: x[0].astype(leaf.dtype), found.value, tree)
            inner_state = jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, group.index, keepdims=False), found.state
            )
            # the next round adds what this one did not send; an invalid round changes no state
            residual = [t - s for t, s in zip(target, sent, strict=True)]
            is_valid = (count != 0) & all_finite(value, group)
            next_state = select(is_valid, Feedback(residual, codec_state, inner_state), state)
            return Combined(value, next_state, jax.tree.map(lambda x: x[0], found.metrics))

        return Combiner(init, combine, across_leaves=inner.across_leaves, is_one_vector=inner.is_one_vector)

    return codec


def gather(tree: Any, group: Group) -> Any:
    """All-gather each array to (size, ...), in one message for each width of dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    found: list[Any] = [None] * len(leaves)
    for width, bits in ((1, jnp.uint8), (2, jnp.uint16), (4, jnp.uint32)):
        which = [i for i, leaf in enumerate(leaves) if leaf.dtype.itemsize == width]
        if not which:
            continue
        flat = [lax.bitcast_convert_type(leaves[i], bits).reshape(-1) for i in which]
        message = group.all_gather(jnp.concatenate(flat))
        ends = [0]
        for i, x in zip(which, flat, strict=True):
            ends.append(ends[-1] + x.size)
            part = message[:, ends[-2] : ends[-1]].reshape(group.size, *leaves[i].shape)
            found[i] = lax.bitcast_convert_type(part, leaves[i].dtype)
    assert all(x is not None for x in found), [leaf.dtype for leaf in leaves]
    return jax.tree.unflatten(structure, found)
