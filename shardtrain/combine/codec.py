"""What codecs share: error feedback, and combining what all ranks have gathered.

A codec sends less than the leaves, and keeps what it did not send for the next round.
Next: `narrow.py` (16 bits), `int8.py`, `top_k.py`, `power_sgd.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.combine.combiner import Codec, Combined, Combiner, contribution, flatten
from shardtrain.combine.group import Group, StackGroup

Leaves = list[jax.Array]


class Feedback(NamedTuple):
    """The state of a codec.

    Attributes:
      residual: float32, like each leaf: what this rank has not sent yet.
      codec: what else the codec keeps.
      inner: the state of the combiner behind it.
    """

    residual: Leaves
    codec: Any
    inner: Any


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A rank's leaves as a payload and back, both functions run inside jit.

    Args:
      init: leaves or their shapes -> what the codec keeps on each rank.
      encode: (float32 leaves, what is kept, group) -> (payload: a tree of arrays of 8, 16 or 32 bits, what
        is kept next).
      decode: (payload, shapes of the leaves) -> float32 leaves.
    """

    init: Callable[[Sequence[Any]], Any]
    encode: Callable[[Leaves, Any, Group], tuple[Any, Any]]
    decode: Callable[[Any, Sequence[jax.ShapeDtypeStruct]], Leaves]


def zeros_like(leaves: Sequence[Any]) -> Leaves:
    """The residual before the first round."""
    return [jnp.zeros(leaf.shape, jnp.float32) for leaf in leaves]


def targets(leaves: Leaves, residual: Leaves, count: jax.Array) -> Leaves:
    """What a rank would send if it could send all: float32, with what it still owes."""
    return [contribution(x.astype(jnp.float32), count) + r for x, r in zip(leaves, residual, strict=True)]


def arrived(value: Any, group: Group) -> jax.Array:
    """Whether a round counts: the step skips one whose result is not finite, so states must not move on."""
    leaves = jax.tree.leaves(value)
    if not leaves:
        return jnp.bool_(True)
    wrong = jnp.stack([jnp.any(~jnp.isfinite(leaf)) for leaf in leaves]).astype(jnp.int32)
    return group.whole(wrong, "max").max() == 0


def settled(move_on: jax.Array, new: Any, old: Any) -> Any:
    """The new state or the old one."""
    return jax.tree.map(lambda n, o: jnp.where(move_on, n, o), new, old)


def gathered(encoding: Encoding) -> Codec:
    """A codec whose payloads all ranks gather; each then decodes them all and combines them by itself.

    Sends the payload to P - 1 ranks, where an all-reduce of n bytes sends 2 n (P - 1) / P: it saves bytes
    while the payload is smaller than 2 n / P. Decoding and combining takes the memory and the time of
    P ranks on each. States of the combiner behind it are gathered too; the usual ones have none.
    """

    def codec(inner: Combiner) -> Combiner:
        def init(tree: Any) -> Feedback:
            leaves = jax.tree.leaves(tree)
            return Feedback(zeros_like(leaves), encoding.init(leaves), inner.init(tree))

        def combine(tree: Any, count: Any, state: Feedback, group: Group) -> Combined:
            leaves, structure = flatten(tree)
            count = jnp.asarray(count, jnp.float32)
            shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in leaves]
            target = targets(leaves, state.residual, count)
            payload, kept = encoding.encode(target, state.codec, group)
            sent = encoding.decode(payload, shapes)

            def combine_rank(payload: Any, count: jax.Array, state: Any) -> Combined:
                tree = jax.tree.unflatten(structure, encoding.decode(payload, shapes))
                return inner.combine(tree, count, state, stack)

            stack = StackGroup(f"{getattr(group, 'axis', 'ranks')}_gathered", group)
            everything = gather((payload, count, state.inner), group)
            found = jax.vmap(combine_rank, axis_name=stack.axis)(*everything)
            value = jax.tree.map(lambda x, leaf: x[0].astype(leaf.dtype), found.value, tree)
            mine = jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, group.index, keepdims=False), found.state
            )
            residual = [t - s for t, s in zip(target, sent, strict=True)]
            after = settled((count != 0) & arrived(value, group), Feedback(residual, kept, mine), state)
            return Combined(value, after, jax.tree.map(lambda x: x[0], found.metrics))

        return Combiner(init, combine, across_leaves=inner.across_leaves)

    return codec


def gather(tree: Any, group: Group) -> Any:
    """Each array of all ranks, (size, ...): one message for each width of their dtypes."""
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
            mine = message[:, ends[-2] : ends[-1]].reshape(group.size, *leaves[i].shape)
            found[i] = lax.bitcast_convert_type(mine, leaves[i].dtype)
    assert all(x is not None for x in found), [leaf.dtype for leaf in leaves]
    return jax.tree.unflatten(structure, found)
