"""Host batches -> arrays on the mesh, cut into microbatches.

Row r of a batch stands in microbatch r // (B / M). A process needs only the rows of its own
devices: load them with `Batches(rows=process_rows(...))`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.errors.messages import near


def place(
    batch: Any, mesh: Mesh, batch_axes: Sequence[str], microbatches: int = 1, num_rows: int | None = None
) -> Any:
    """Put a batch on the mesh. It only starts the transfer.

    Args:
      batch: a pytree of numpy arrays (B, ...), or of this process's rows of them.
      mesh: a jax Mesh.
      batch_axes: the mesh axes that share the rows of a microbatch.
      microbatches: M, parts of the batch that a step handles one after the other.
      num_rows: B, where `batch` holds only the rows of `process_rows`; by default it holds all.

    Returns:
      The same pytree of jax arrays (M, B / M, ...) with PartitionSpec(None, batch_axes).

    Raises:
      ValueError: B does not divide, an axis is not in the mesh, or arrays differ in their rows.
    """
    leaves = jax.tree.leaves(batch)
    num_local = len(leaves[0])
    if any(len(leaf) != num_local for leaf in leaves):
        rows = {jax.tree_util.keystr(path): len(leaf) for path, leaf in jax.tree.leaves_with_path(batch)}
        raise ValueError(f"arrays of one batch have different numbers of rows: {rows}; give each the same")
    num_rows = num_local if num_rows is None else num_rows
    sharding = _sharding(num_rows, mesh, batch_axes, microbatches)

    def cut(leaf: Any, num: int) -> tuple[int, ...]:
        return (microbatches, num // microbatches, *leaf.shape[1:])

    local = jax.tree.map(lambda leaf: leaf.reshape(cut(leaf, num_local)), batch)
    if sharding.is_fully_addressable and num_local == num_rows:
        return jax.device_put(local, sharding)  # what follows does the same here, slower
    shapes = jax.tree.map(lambda leaf: cut(leaf, num_rows), batch)
    return jax.make_array_from_process_local_data(sharding, local, shapes)


def process_rows(num_rows: int, mesh: Mesh, batch_axes: Sequence[str], microbatches: int = 1) -> np.ndarray:
    """The rows of a batch that the devices of this process hold, for `Batches(rows=...)`.

    Args:
      num_rows: B, rows of the whole batch.
      mesh: as for `place`.
      batch_axes: likewise.
      microbatches: likewise.

    Returns:
      Row numbers, int (rows,), rising. Alone, a process holds all.

    Raises:
      ValueError: as for `place`.
    """
    sharding = _sharding(num_rows, mesh, batch_axes, microbatches)
    shape = (microbatches, num_rows // microbatches)
    number = np.arange(num_rows).reshape(shape)
    slices = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([number[index].ravel() for index in slices if index is not None]))


def _sharding(num_rows: int, mesh: Mesh, batch_axes: Sequence[str], microbatches: int) -> NamedSharding:
    unknown = [near(axis, mesh.axis_names) for axis in batch_axes if axis not in mesh.shape]
    if unknown:
        raise ValueError(
            f"the batch is to be split over an axis that the mesh does not have: {'; '.join(unknown)}"
        )
    problem = batch_problem(num_rows, {axis: mesh.shape[axis] for axis in batch_axes}, microbatches)
    if problem:
        raise ValueError(problem)
    return NamedSharding(mesh, PartitionSpec(None, tuple(batch_axes)))


def batch_problem(batch: int, axis_sizes: Mapping[str, int], microbatches: int) -> str | None:
    """Why a batch of this size cannot be split, with the sizes that can; None where it can.

    Args:
      batch: B, rows of the whole batch.
      axis_sizes: mesh axis -> size, of the axes that share the rows.
      microbatches: M.

    >>> batch_problem(6, {"data": 4}, 1)
    "batch 6 cannot be split over axes ('data') of total size 4 and 1 microbatch: 6 % 4 = 2. Use 4 or 8."
    """
    if microbatches < 1:
        return f"batch {batch} cannot be split into {microbatches} microbatches. Use 1 or more."
    total = math.prod(axis_sizes.values())
    unit = total * microbatches
    rest = batch % unit
    if rest == 0 and batch > 0:
        return None
    names = ",".join(repr(axis) for axis in axis_sizes)
    parts = f"{microbatches} microbatch{'es' if microbatches > 1 else ''}"
    below = batch - rest
    use = f"{below} or {below + unit}" if below > 0 else f"{unit}"
    return (
        f"batch {batch} cannot be split over axes ({names}) of total size {total} and {parts}:"
        f" {batch} % {unit} = {rest}. Use {use}."
    )
