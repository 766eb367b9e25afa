"""Flatten a state to its arrays by path, and refuse leaves that cannot be saved."""

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.checkpoints.manifest_entries import COMMON, ArrayOrigin, Leaf
from shardtrain.errors.messages import refuse


def flatten(state: Any) -> dict[str, jax.Array]:
    """Return the arrays of a state by path; flat paths cannot collide in Orbax.

    Args:
        state: pytree of jax arrays.

    Raises:
        ValueError: all leaves that cannot be saved, each with the reason.
    """
    by_path = _group_by_path(state)
    wrong = [f"{path}: {reason}" for path, leaf in by_path.items() if (reason := _find_leaf_problem(leaf))]
    refuse("these leaves of the state cannot be saved; change them where the state is made", wrong)
    return by_path


def _find_leaf_problem(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array):
        return f"{type(leaf).__name__}; use jnp.asarray"
    if kind := _find_kind_problem(leaf):
        return kind
    # A save would lose the weak type, which changes the dtype of results after resuming.
    return f"weakly typed; use .astype({leaf.dtype.name!r})" if leaf.weak_type else ""


def _find_kind_problem(leaf: Any) -> str:
    """Return why an array of this shape and dtype cannot be saved; "" if it can."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "typed key; use jax.random.key_data"
    return f"no elements, shape {leaf.shape}; leave it out" if leaf.size == 0 else ""


def describe_restorable(abstract_state: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes, dtypes and shardings to restore, by path.

    Args:
        abstract_state: pytree of shapes, or of arrays, with shardings.

    Raises:
        ValueError: lists all leaves that cannot be saved, or have no sharding.
    """
    by_path = _group_by_path(abstract_state)
    never = [f"{path}: {reason}" for path, leaf in by_path.items() if (reason := _find_kind_problem(leaf))]
    refuse("these leaves of the state cannot be saved; change them where the state is made", never)
    wrong = [path for path, leaf in by_path.items() if getattr(leaf, "sharding", None) is None]
    refuse("these leaves have no sharding; use jax.ShapeDtypeStruct(..., sharding=...)", wrong)
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for path, leaf in by_path.items()
    }


def _group_by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(tree)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    twice = [path for path, count in Counter(paths).items() if count > 1]
    refuse("these paths belong to several leaves; rename the keys of one", twice)
    if not paths:
        raise ValueError("the state has no arrays: nothing can be saved or restored.")
    return dict(zip(paths, (leaf for _, leaf in leaves), strict=True))


def describe(arrays: Mapping[str, Any], origins: Mapping[str, ArrayOrigin]) -> dict[str, Leaf]:
    """Describe arrays for a manifest: path -> shape, dtype and origin."""
    return {
        path: Leaf(shape=tuple(leaf.shape), dtype=leaf.dtype.name, origin=origins.get(path, COMMON))
        for path, leaf in arrays.items()
    }


def find_extra_problems(extra: object, path: str = "extra") -> list[str]:
    """List everything in `extra` that JSON would change: other types, keys that are not text.

    Tuples are allowed, and become lists.

    Examples:
        >>> find_extra_problems({"seed": 1, "position": {3: 4}, "when": {5}})
        ['extra/position: key 3 is int, not str', 'extra/when: set']
    """
    if extra is None or isinstance(extra, bool | int | float | str):
        return []
    if isinstance(extra, dict):
        keys = [
            f"{path}: key {key!r} is {_type_name(key)}, not str" for key in extra if not isinstance(key, str)
        ]
        inner = (find_extra_problems(value, f"{path}/{key}") for key, value in extra.items())
        return [*keys, *chain.from_iterable(inner)]
    if isinstance(extra, list | tuple):
        inner = (find_extra_problems(value, f"{path}/{index}") for index, value in enumerate(extra))
        return list(chain.from_iterable(inner))
    return [f"{path}: {_type_name(extra)}"]


def _type_name(value: object) -> str:
    return type(value).__name__
