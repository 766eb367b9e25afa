"""Restore a checkpoint onto devices: each process reads only the slices that its devices hold.

The files of a checkpoint are read by `reader.py`. Next: `checkpointer.py`.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from shardtrain.checkpoints.array_files import Reading
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
"""Bytes that are read ahead of the transfer to the devices; a larger slice is read alone."""


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
      origins: path -> which piece of the whole it is; those that are not named are whole.
      allow: what the reader may lack, or have beside.
      report: receives a line about how much was read.

    Returns:
      Path -> array; without those that are allowed to be missing, and are, or `reinitialized` with them.

    Raises:
      ValueError: all arrays that differ; or a part that is needed cannot be seen.
    """
    # describe what is wanted and what is stored alike: as arrays of the whole model, whatever part is here
    leaves = {
        path: Leaf(shape=tuple(x.shape), dtype=x.dtype.name, origin=origins.get(path, COMMON))
        for path, x in wanted.items()
    }
    where = {path: leaf.origin for path, leaf in leaves.items()}
    saved = widen_optimizer_state(
        {path: reader.leaf(path, where.get(path, COMMON)) for path in reader.stored_arrays}, leaves
    )
    # compare first: all differences in one error, before anything is read
    check_state(reader, saved, leaves, allow)
    differing = [path for path in wanted if str(saved.get(path)) != str(leaves[path])]
    fresh = {*differing, *find_arrays_to_initialize(differing, wanted, allow.missing)}
    # read ahead of the devices, in order, as many bytes as the host may have in flight
    began, num_bytes, largest = time.monotonic(), 0, 0
    arrays: dict[str, jax.Array] = {}
    under_way: deque[_Coming] = deque()
    for path, like in wanted.items():
        if path in fresh:
            continue
        under_way.append(_start(reader, path, like, leaves[path]))
        num_bytes += under_way[-1].num_bytes
        largest = max(largest, under_way[-1].num_bytes)
        while sum(each.num_bytes for each in under_way) > IN_FLIGHT_BYTES:
            _land(under_way, arrays)
    while under_way:
        _land(under_way, arrays)
    seconds = time.monotonic() - began
    report(
        f"read {num_bytes / 1e6:,.1f} of {reader.num_bytes / 1e6:,.1f} MB in {seconds:.1f} s, at most"
        f" {max(IN_FLIGHT_BYTES, largest) / 1e6:,.0f} MB at once on the host"
    )
    return arrays


@dataclass(frozen=True)
class _Coming:
    """An array whose slices are being read."""

    path: str
    like: jax.ShapeDtypeStruct
    slices: list[tuple[Reading, list[Any]]]  # what is read, and the devices that hold it

    @property
    def num_bytes(self) -> int:
        return sum(reading.array.nbytes for reading, _ in self.slices)

    def land(self) -> jax.Array:
        shards: list[Any] = []
        memory = self.like.sharding.memory_kind  # the state may have arrays in the memory of the host
        for reading, devices in self.slices:
            found = reading.result()
            found = found.astype(self.like.dtype, copy=False)
            placed = [SingleDeviceSharding(device, memory_kind=memory) for device in devices]
            shards += [jax.device_put(found, each) for each in placed]
        array = jax.make_array_from_single_device_arrays(self.like.shape, self.like.sharding, shards)
        # else what was read would wait on the host for its turn on the device
        return jax.block_until_ready(array)


def _land(under_way: deque[_Coming], arrays: dict[str, jax.Array]) -> None:
    """Move the oldest array to its devices, which frees its memory on the host."""
    oldest = under_way.popleft()
    arrays[oldest.path] = oldest.land()


def _start(reader: CheckpointReader, path: str, like: jax.ShapeDtypeStruct, leaf: Leaf) -> _Coming:
    assert like.sharding is not None
    # devices with the same slice (replicas) get it from one read
    devices: dict[Any, list[Any]] = {}
    for device, index in like.sharding.addressable_devices_indices_map(tuple(like.shape)).items():
        devices.setdefault(_plain(index, like.shape), []).append(device)
    slices = [
        (reader.start(path, leaf, tuple(slice(*each) for each in index)), holders)
        for index, holders in devices.items()
    ]
    return _Coming(path, like, slices)


def _plain(index: Index | None, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(each.indices(n)[:2] for each, n in zip(index or (), shape, strict=True))
