"""Flatten the activations between blocks into lists of arrays, and store them in numbered slots.

Next: `mesh_stage.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec


class Activations(NamedTuple):
    """The arrays of a pytree of activations.

    Args:
      floats: arrays that have a cotangent.
      others: arrays without a cotangent: masks and integers.
    """

    floats: list[Any]
    others: list[Any]


class ActivationTree:
    """The structure, shapes, dtypes and specs of activations, to flatten and unflatten them.

    Args:
      example: activations, as arrays or shapes.
      specs: the PartitionSpec of each array.
    """

    def __init__(self, example: Any, specs: Sequence[PartitionSpec]) -> None:
        leaves, self._structure = jax.tree.flatten(example)
        self._is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        self.shapes = self.split(example)
        self._specs = self.split(jax.tree.unflatten(self._structure, specs))

    def split(self, tree: Any) -> Activations:
        """Return the arrays of a pytree of this structure."""
        leaves = list(zip(self._is_float, self._structure.flatten_up_to(tree), strict=True))
        return Activations(
            [x for is_float, x in leaves if is_float], [x for is_float, x in leaves if not is_float]
        )

    def join(self, activations: Activations) -> Any:
        """Return the pytree of these arrays, the reverse of `split`."""
        floats, others = iter(activations.floats), iter(activations.others)
        return jax.tree.unflatten(
            self._structure, [next(floats if is_float else others) for is_float in self._is_float]
        )

    def constrain(self, activations: Activations) -> Activations:
        """Constrain activations to their specs."""
        floats, others = (
            list(map(lax.with_sharding_constraint, arrays, specs))
            for arrays, specs in zip(activations, self._specs, strict=True)
        )
        return Activations(floats, others)

    def constrain_floats(self, cotangents: list[Any]) -> list[Any]:
        """Constrain cotangents to the specs of `floats`."""
        return list(map(lax.with_sharding_constraint, cotangents, self._specs.floats))


def make_slots(number: int, shapes: Any) -> Any:
    """Return zeros (number + 1, ...): a slot for each value, and a last slot for values that are dropped."""
    return jax.tree.map(lambda x: jnp.zeros((number + 1, *x.shape), x.dtype), shapes)


def get(slots: Any, slot: jax.Array) -> Any:
    """Return the value in a slot."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, 0, keepdims=False), slots)


def put(slots: Any, values: Any, slot: jax.Array) -> Any:
    """Return the slots after storing a value in one of them; a slot below 0 drops the value."""

    def changed(x: jax.Array, value: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(x, value, jnp.where(slot < 0, x.shape[0] - 1, slot), 0)

    return jax.tree.map(changed, slots, values)


def describe_activation_changes(before: Any, after: Any) -> str:
    """Describe how blocks change the shapes and dtypes of their activations; "" if they do not."""
    old, new = (
        {jax.tree_util.keystr(path) or "the activations": f"{x.dtype}{list(x.shape)}" for path, x in leaves}
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
        f"blocks change the shapes of their activations ({'; '.join(changed)}), and a pipeline inside a mesh"
        " needs the same between all blocks; use --across pipeline, where every island has its own program"
    )
