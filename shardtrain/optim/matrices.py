"""Find the parameters that are matrices, by their dim names: for weight decay and for Muon."""

from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from shardtrain import axes
from shardtrain.functional.model import Tree
from shardtrain.sharding.array_dims import is_dims


def _features(names: tuple[str | None, ...]) -> list[int]:
    """Return the dims that make an array a matrix: not stacked ones, and heads and head_dim as one."""
    has_heads = {axes.HEADS, axes.KV_HEADS} & set(names)
    skipped = {axes.LAYERS, axes.EXPERTS, *([axes.HEAD_DIM] if has_heads else [])}
    return [i for i, name in enumerate(names) if name not in skipped]


def decayed(dims: Tree, params: Any) -> Any:
    """Return which parameters are weight-decayed: arrays of two or more dims, not biases, gains or scalars.

    Args:
      dims: the dim names of the model; an array without names counts all of its dims.
      params: arrays or shapes.

    >>> import numpy as np
    >>> dims = {"up": ("layers", "embed", "mlp"), "gain": ("layers", "embed"), "other": None}
    >>> decayed(dims, {"up": np.ones((2, 4, 8)), "gain": np.ones((2, 4)), "other": np.ones((4, 4))})
    {'gain': False, 'other': True, 'up': True}
    """

    def is_decayed(names: tuple[str | None, ...] | None, param: Any) -> bool:
        return (param.ndim if names is None else len(_features(names))) >= 2

    return jax.tree.map(is_decayed, dims, params, is_leaf=is_dims)


def muon_dims(dims: Tree) -> Any:
    """Return the dims of the two sides of each matrix for Muon; None for parameters that AdamW updates.

    If the first dim is `embed`, it is one side and all other dims are the other side; otherwise the last
    dim is one side. `layers` and `experts` are batch dims. AdamW updates embeddings and output heads
    (`vocab`), position tables (`seq`) and vectors.
    """

    def numbers(names: tuple[str | None, ...] | None) -> MuonDimensionNumbers | None:
        if names is None or len(_features(names)) < 2 or {axes.VOCAB, axes.SEQ} & set(names):
            return None
        kept = [i for i, name in enumerate(names) if name not in (axes.LAYERS, axes.EXPERTS)]
        split = 1 if names[kept[0]] == axes.EMBED else -1
        return MuonDimensionNumbers(tuple(kept[:split]), tuple(kept[split:]))

    return jax.tree.map(numbers, dims, is_leaf=is_dims)
