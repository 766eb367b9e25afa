"""Place host batches as arrays on the mesh, split into microbatches by `row_split.py`.

A process needs only the rows of its own devices: load them with `Batches(rows=process_rows(...))`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.data.row_split import RowSplit, full_weights
from shardtrain.errors.messages import problems_error, refuse


def place(
    batch: Any, mesh: Mesh, batch_axes: Sequence[str], microbatches: int = 1, num_rows: int | None = None
) -> Any:
    """Put a batch on the mesh. The call returns while the transfer to the devices still runs.

    Args:
      batch: a pytree of numpy arrays (B, ...), or of only this process's rows.
      mesh: a jax Mesh.
      batch_axes: the mesh axes that split the rows of a microbatch.
      microbatches: M, number of microbatches, which a step handles one after the other.
      num_rows: B, if `batch` holds only the rows of `process_rows`; by default it holds all rows.

    Returns:
      The same pytree of jax arrays (M, B / M, ...) with PartitionSpec(None, batch_axes). Weights of `Batches`
      without padding are one array for all batches, which no program may donate.

    Raises:
      ValueError: B does not divide, an axis is not in the mesh, arrays differ in their rows, a leaf is no
        array with rows, such as a list or a number, or has integers that 32 bits do not hold.
    """
    num_local = _num_rows(batch)
    _check_integers(batch)
    num_rows = num_local if num_rows is None else num_rows
    # (B, ...) -> (M, B / M, ...): a device gets its rows of every microbatch
    split, sharding = _split_over(num_rows, mesh, tuple(batch_axes), microbatches)
    if sharding.is_fully_addressable and num_local == num_rows:

        def placed(leaf: Any) -> jax.Array:
            if leaf is full_weights(num_rows):
                return _share_ones(split.shape((num_rows,)), sharding)
            return _put(leaf.reshape(split.shape(leaf.shape)), sharding)

        return jax.tree.map(placed, batch)
    local = jax.tree.map(lambda leaf: leaf.reshape(split.shape(leaf.shape)), batch)
    shapes = jax.tree.map(lambda leaf: split.shape((num_rows, *leaf.shape[1:])), batch)
    return jax.make_array_from_process_local_data(sharding, local, shapes)


def _num_rows(batch: Any) -> int:
    """Return the number of rows of all arrays of a batch.

    Raises:
      ValueError: lists every leaf that is no array with rows; or arrays have different numbers of rows.
    """
    shapes: list[tuple[int, ...]] = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(batch)]
    if not shapes or () in shapes:
        raise problems_error("this batch cannot be placed", leaf_problems(batch))
    num_rows = shapes[0][0]
    if any(shape[0] != num_rows for shape in shapes):
        rows = {jax.tree_util.keystr(path): len(leaf) for path, leaf in jax.tree.leaves_with_path(batch)}
        raise ValueError(f"arrays of one batch have different numbers of rows: {rows}; give each the same")
    return num_rows


def _check_integers(batch: Any) -> None:
    """Check that integers of 64 bits fit into the 32 bits of devices, where larger ones would wrap.

    Raises:
      ValueError: lists the arrays with larger integers.
    """
    problems = []
    leaves = [] if getattr(jax.config, "jax_enable_x64", False) else jax.tree.leaves_with_path(batch)
    for path, leaf in leaves:
        kind = leaf.dtype.kind
        if kind not in "iu" or leaf.dtype.itemsize < 8 or not leaf.size:
            continue
        limits = np.iinfo(f"{kind}4")
        wrong = [x for x in (leaf.max(), leaf.min()) if not limits.min <= x <= limits.max]
        if wrong:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            problems.append(
                f"{name!r} is {leaf.dtype} and has {wrong[0]}; devices have {limits.dtype}, from"
                f" {limits.min} to {limits.max}, in which it would wrap: give smaller numbers (a difference"
                " from the first, two arrays of 32 bits), .astype('float32') where rounding does no harm, or"
                " leave it out"
            )
    refuse("this batch has integers that devices do not have", problems)


def leaf_problems(batch: Any) -> list[str]:
    """List the leaves of a batch that are not arrays with rows, one line each.

    >>> leaf_problems({"x": np.zeros((4, 2)), "label": [1, 2, 3, 4], "rate": 0.5})[0]
    "'label' is of type list; use np.asarray, with a row for each example"
    """
    problems = []
    for path, leaf in jax.tree.leaves_with_path(batch, is_leaf=_is_list_of_numbers):
        if not getattr(leaf, "shape", ()):
            kind = f"of type {type(leaf).__name__}"
            if isinstance(leaf, np.ndarray):
                kind = "an array of shape ()"
            change = "use np.asarray" if isinstance(leaf, list | tuple) else "repeat it by np.full"
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            problems.append(f"{name!r} is {kind}; {change}, with a row for each example")
    return problems or ["it has no arrays; give at least one"]


def _is_list_of_numbers(tree: Any) -> bool:
    """Return whether this is a list of numbers, rather than a tree of arrays."""
    return isinstance(tree, list | tuple) and not any(hasattr(x, "shape") for x in jax.tree.leaves(tree))


def _put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put an array on the devices as `device_put` does, in a third of its time."""
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def _share_ones(shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Return `_put_ones`, put again if a program has overwritten them."""
    if _put_ones(shape, sharding).is_deleted():
        _put_ones.cache_clear()
    return _put_ones(shape, sharding)


@lru_cache(maxsize=64)
def _put_ones(shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Put ones on the devices once, for all batches without padding; no step donates a batch."""
    return _put(np.ones(shape, np.float32), sharding)


def process_rows(num_rows: int, mesh: Mesh, batch_axes: Sequence[str], microbatches: int = 1) -> np.ndarray:
    """Return the rows of a batch that the devices of this process hold, for `Batches(rows=...)`.

    Args:
      num_rows: B, rows of the whole batch.
      mesh: as for `place`.
      batch_axes: as for `place`.
      microbatches: as for `place`.

    Returns:
      Row numbers, int (rows,), rising; all rows if there is one process.

    Raises:
      ValueError: as for `place`.
    """
    split, sharding = _split_over(num_rows, mesh, tuple(batch_axes), microbatches)
    shape = split.shape((num_rows,))
    # the sharding slices an array of row numbers, so that no second formula is needed
    number = np.arange(num_rows).reshape(shape)
    slices = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([number[index].ravel() for index in slices if index is not None]))


@lru_cache(maxsize=64)  # one object a split: jax keeps with it what each batch needs
def _split_over(
    num_rows: int, mesh: Mesh, batch_axes: tuple[str, ...], microbatches: int
) -> tuple[RowSplit, NamedSharding]:
    split = RowSplit.of(mesh.shape, batch_axes, microbatches)
    split.check(num_rows)
    return split, NamedSharding(mesh, PartitionSpec(None, tuple(split.axis_sizes)))
