"""Restore a checkpoint onto devices: each process reads only the slices that its devices hold.

`reader.py` reads the files. Next: `checkpointer.py`.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from shardtrain.checkpoints.array_files import PendingRead
from shardtrain.checkpoints.differences import (
    Allow,
    check_state,
    find_arrays_to_initialize,
    widen_optimizer_state,
)
from shardtrain.checkpoints.manifest_entries import COMMON, ArrayOrigin, Leaf
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.checkpoints.slices import Index

IN_FLIGHT_BYTES = 1 << 27
"""Largest number of bytes that are read ahead of the transfer to devices; a larger slice is read alone."""


def restore_arrays(
    reader: CheckpointReader,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    origins: Mapping[str, ArrayOrigin],
    allow: Allow = Allow(),
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, jax.Array]:
    """Read arrays straight into their shardings.

    Args:
      reader: the reader of a complete checkpoint.
      wanted: path -> shape, dtype and sharding.
      origins: path -> origin of an array in the whole model; other arrays are whole.
      allow: the allowed differences.
      report: receives a line about the bytes that were read.

    Returns:
      Path -> array; without missing arrays, see `find_arrays_to_initialize`.

    Raises:
      ValueError: lists all arrays that differ; or a necessary part cannot be seen.
    """
    # describe wanted and stored arrays as arrays of the whole model
    leaves = {
        path: Leaf(shape=tuple(x.shape), dtype=x.dtype.name, origin=origins.get(path, COMMON))
        for path, x in wanted.items()
    }
    where = {path: leaf.origin for path, leaf in leaves.items()}
    saved = widen_optimizer_state(
        {path: reader.leaf(path, where.get(path, COMMON)) for path in reader.stored_arrays}, leaves
    )
    # report all differences in one error, before reading
    check_state(reader, saved, leaves, allow)
    differing = [path for path in wanted if str(saved.get(path)) != str(leaves[path])]
    fresh = {*differing, *find_arrays_to_initialize(differing, wanted, allow.missing)}
    # read ahead of the devices, in order, up to the limit of bytes on the host
    began, num_bytes, largest = time.monotonic(), 0, 0
    arrays: dict[str, jax.Array] = {}
    under_way: deque[_ArrayRead] = deque()

    def transfer(most_bytes: int) -> None:
        while under_way and sum(each.num_bytes for each in under_way) > most_bytes:
            oldest = under_way.popleft()
            arrays[oldest.path] = oldest.transfer()

    for path, like in wanted.items():
        if path in fresh:
            continue
        under_way.append(_start(reader, path, like, leaves[path]))
        num_bytes += under_way[-1].num_bytes
        largest = max(largest, under_way[-1].num_bytes)
        transfer(IN_FLIGHT_BYTES)
    transfer(-1)
    seconds = time.monotonic() - began
    report(
        f"read {num_bytes / 1e6:,.1f} of {reader.num_bytes / 1e6:,.1f} MB in {seconds:.1f} s, at most"
        f" {max(IN_FLIGHT_BYTES, largest) / 1e6:,.0f} MB at once on the host"
    )
    return arrays


@dataclass(frozen=True)
class _ArrayRead:
    """An array whose slices are being read, each with the devices that hold it."""

    path: str
    like: jax.ShapeDtypeStruct
    slices: list[tuple[PendingRead, list[Any]]]

    @property
    def num_bytes(self) -> int:
        return sum(reading.array.nbytes for reading, _ in self.slices)

    def transfer(self) -> jax.Array:
        """Wait for the slices, and transfer them to the devices."""
        shards: list[Any] = []
        memory = self.like.sharding.memory_kind  # the state may have arrays in the memory of the host
        for reading, devices in self.slices:
            found = reading.result().astype(self.like.dtype, copy=False)
            placed = [SingleDeviceSharding(device, memory_kind=memory) for device in devices]
            shards += [jax.device_put(found, each) for each in placed]
        array = jax.make_array_from_single_device_arrays(self.like.shape, self.like.sharding, shards)
        # wait, so that the memory on the host is free
        return jax.block_until_ready(array)


def _start(reader: CheckpointReader, path: str, like: jax.ShapeDtypeStruct, leaf: Leaf) -> _ArrayRead:
    assert like.sharding is not None
    # replicas share one read
    devices: dict[Any, list[Any]] = {}
    for device, index in like.sharding.addressable_devices_indices_map(tuple(like.shape)).items():
        devices.setdefault(_plain(index, like.shape), []).append(device)
    slices = [
        (reader.start(path, leaf, tuple(slice(*each) for each in index)), holders)
        for index, holders in devices.items()
    ]
    return _ArrayRead(path, like, slices)


def _plain(index: Index | None, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(each.indices(n)[:2] for each, n in zip(index or (), shape, strict=True))
