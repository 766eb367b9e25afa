"""Which parameters are matrices, judged by their dim names: for weight decay and for Muon."""

from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from shardtrain import axes
from shardtrain.functional.model import Tree
from shardtrain.sharding.array_dims import is_dims


def _features(names: tuple[str | None, ...]) -> list[int]:
    """The dims of an array that make it a matrix: not its stacks, and heads with head_dim as one."""
    has_heads = {axes.HEADS, axes.KV_HEADS} & set(names)
    skipped = {axes.LAYERS, axes.EXPERTS, *([axes.HEAD_DIM] if has_heads else [])}
    return [i for i, name in enumerate(names) if name not in skipped]


def decayed(dims: Tree, params: Any) -> Any:
    """Which parameters weight decay falls on: matrices and above, not biases, gains or scalars.

    Args:
      dims: the model's dims; an array without names is judged by how many dims it has.
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
    """Which parameters Muon takes, and which of their dims are the two sides of the matrix.

    Where `embed` comes first it is one side and all other dims together are the other, else the last
    dim is; `layers` and `experts` are batch dims. Embeddings and heads (`vocab`), tables of positions
    (`seq`) and vectors are left to AdamW.
    """

    def numbers(names: tuple[str | None, ...] | None) -> MuonDimensionNumbers | None:
        if names is None or len(_features(names)) < 2 or {axes.VOCAB, axes.SEQ} & set(names):
            return None
        kept = [i for i, name in enumerate(names) if name not in (axes.LAYERS, axes.EXPERTS)]
        split = 1 if names[kept[0]] == axes.EMBED else -1
        return MuonDimensionNumbers(tuple(kept[:split]), tuple(kept[split:]))

    return jax.tree.map(numbers, dims, is_leaf=is_dims)
