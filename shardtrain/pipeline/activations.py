"""What goes from block to block, as lists of arrays; and the slots in which it waits.

Next: `stage_compute.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Parted(NamedTuple):
    """The arrays of a stream.

    Args:
      floats: those that have an error.
      others: those that have none: masks, numbers.
    """

    floats: list[Any]
    others: list[Any]


class Form:
    """How the arrays of a stream stand in its tree."""

    def __init__(self, stream: Any) -> None:
        leaves, self._structure = jax.tree.flatten(stream)
        self._is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        self.shapes = self.parted(stream)

    def parted(self, stream: Any) -> Parted:
        """The arrays of a stream of this form."""
        leaves = list(zip(self._is_float, jax.tree.leaves(stream), strict=True))
        return Parted(
            [x for is_float, x in leaves if is_float], [x for is_float, x in leaves if not is_float]
        )

    def joined(self, parted: Parted) -> Any:
        """The reverse of `parted`."""
        floats, others = iter(parted.floats), iter(parted.others)
        return jax.tree.unflatten(
            self._structure, [next(floats if yes else others) for yes in self._is_float]
        )


def make_slots(number: int, shapes: Any) -> Any:
    """Slots for so many values, and a last one that takes what nobody needs: (number + 1, ...)."""
    return jax.tree.map(lambda x: jnp.zeros((number + 1, *x.shape), x.dtype), shapes)


def get(slots: Any, slot: jax.Array) -> Any:
    """What is in a slot."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, 0, keepdims=False), slots)


def put(slots: Any, values: Any, slot: jax.Array) -> Any:
    """The slots with values in one; in the last where the slot is below 0."""

    def changed(x: jax.Array, value: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(x, value, jnp.where(slot < 0, x.shape[0] - 1, slot), 0)

    return jax.tree.map(changed, slots, values)


def stream_changes(before: Any, after: Any) -> str:
    """What is wrong where blocks do not return a stream like the one that they were given; "" if nothing."""
    old, new = (
        {jax.tree_util.keystr(path) or "the stream": f"{x.dtype}{list(x.shape)}" for path, x in leaves}
        for leaves in (jax.tree.leaves_with_path(before), jax.tree.leaves_with_path(after))
    )
    changed = [
        f"{name}: {old.get(name, 'nothing')} becomes {new.get(name, 'nothing')}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    if not changed:
        return ""
    return (
        f"blocks change the stream ({'; '.join(changed)}), and a pipeline inside a mesh needs one shape"
        " between all of them; use --across pipeline, where every island has a program of its own"
    )
