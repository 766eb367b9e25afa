"""Transfer arrays between an island's mesh and other islands in buckets.

The arrays of a bucket are sent whole from one local device (the bucket device) by one compiled program: pack,
MPI, unpack. One thread makes all MPI calls, so that their order is the same on every rank.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.islands.buckets import CAP_BYTES, BucketSizes
from shardtrain.islands.watchdog.activity import ActivityRecord


class BucketTimes:
    """The buckets of a run, in the order of sending, and the seconds that each took.

    Attributes:
      sizes_bytes: bytes of each bucket's arrays, before a codec.

    >>> times = BucketTimes()
    >>> times.add([100, 200]), times.add([300])
    (0, 2)
    >>> times.record(1, 0.5), times.record(1, 1.5), times.record(2, 0.25)
    (None, None, None)
    >>> times.take(), times.take()
    ({1: 1.0, 2: 0.25}, {})
    """

    def __init__(self) -> None:
        self.sizes_bytes: list[int] = []
        self._seconds: dict[int, list[float]] = {}
        self._lock = Lock()

    def add(self, sizes_bytes: Sequence[int]) -> int:
        """Add the buckets of a combiner; return the number of the first one."""
        self.sizes_bytes += sizes_bytes
        return len(self.sizes_bytes) - len(sizes_bytes)

    def record(self, number: int, seconds: float) -> None:
        """Record that a bucket was packed, sent and unpacked; called by the thread that calls MPI."""
        with self._lock:
            self._seconds.setdefault(number, []).append(seconds)

    def take(self) -> dict[int, float]:
        """Return number -> mean seconds of the buckets that were recorded since the last call."""
        with self._lock:
            found, self._seconds = self._seconds, {}
        return {number: sum(each) / len(each) for number, each in sorted(found.items())}


if TYPE_CHECKING:
    from shardtrain.islands.bridge import MpiGroup  # importing it starts MPI

BucketProgram = Callable[[Any, Any], Any]
"""(arrays, group) -> outputs: the computation of a bucket, in a jit over its bucket device."""


class _BucketDevice(NamedTuple):
    """A device that sends every n-th bucket.

    Args:
      device: a device of the mesh.
      mpi_device: the device on which MPI is called: the same one, or a CPU device if MPI needs host memory.
      group: the group of the islands; None if the device belongs to another process.
    """

    device: Any
    mpi_device: Any
    group: "MpiGroup | None"


class Transfer:
    """The transfer of arrays between one island's mesh and the others.

    All processes of all islands must make the same calls in the same order.

    Args:
      mesh: the mesh of this island.
      groups: bucket device -> its group of islands; None if it belongs to another process. Bucket device i is
        the i-th device of the mesh in the order of processes.
      cap_bytes, first_bytes, copies_first: see `BucketSizes`.
      on_device: whether MPI gets device memory; otherwise arrays are copied to host memory first.
      activity: the activity record of this process, which records every bucket.

    Attributes:
      buckets: assigns arrays to buckets, in the order of their transfer, see `BucketSizes.assign`.
      num_bytes: bytes of the arrays, after a codec, that this process has passed to MPI so far.
      bucket_times: the buckets of combiners, and the seconds of those that this process sends.
    """

    def __init__(
        self,
        mesh: Mesh,
        groups: "Sequence[MpiGroup | None]",
        cap_bytes: int = CAP_BYTES,
        first_bytes: int | None = None,
        on_device: bool = False,
        activity: ActivityRecord | None = None,
        *,
        copies_first: bool = False,
    ) -> None:
        self._activity = activity or ActivityRecord()
        self.mesh = mesh
        sizes = BucketSizes(cap_bytes=cap_bytes, first_bytes=first_bytes, copies_first=copies_first)
        self.buckets = sizes.assign
        devices = sorted(mesh.devices.flat, key=lambda d: (d.process_index, d.id))
        # MPI that takes no device memory is called with arrays on the host's CPU device
        through_host = not on_device and devices[0].platform != "cpu"
        host = jax.local_devices(backend="cpu")[0] if through_host else None
        pairs = zip(devices, groups, strict=False)
        self._bucket_devices = [_BucketDevice(device, host or device, group) for device, group in pairs]
        self._is_one_process = len({d.process_index for d in devices}) == 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bridge")
        self._programs: dict[Any, Any] = {}
        self.num_bytes = 0
        self.bucket_times = BucketTimes()

    def start(self, number: int, program: BucketProgram, arrays: Any, *, timed: bool = False) -> Future[Any]:
        """Start the transfer of a bucket and return at once.

        Args:
          number: the number of the bucket; buckets take turns on the bucket devices.
          program: the computation; pass the same function object in all calls: it is compiled once per shape.
          arrays: a tree of arrays on the mesh, sharded in any way.
          timed: whether the seconds of the bucket are recorded in `bucket_times`.

        Returns:
          The future of the program's outputs on the bucket device; of None if another process has it.
        """
        # 1. gather sharded arrays: a collective of the mesh, in which every process takes part
        arrays = self._replicate(arrays)
        # 2. only the process that has the bucket device continues; the others return here
        bucket_device = self._bucket_device(number)
        if bucket_device.group is None:
            other: Future[Any] = Future()
            other.set_result(None)
            return other
        mine = jax.tree.map(lambda x: _shard_on(x, bucket_device.device), arrays)
        if bucket_device.mpi_device is not bucket_device.device:
            mine = jax.device_put(mine, bucket_device.mpi_device)
        # 3. the thread runs pack, MPI and unpack, one bucket after the other, while the caller continues
        compiled = self._compile(program, bucket_device.group)
        what = f"bucket {number} ({getattr(program, '__name__', 'program').strip('_').replace('_', ' ')})"
        timed_number = number if timed else None
        return self._thread.submit(lambda: self._run_program(what, compiled, mine, timed_number))

    def result(self, number: int, started: Future[Any]) -> Any:
        """Wait for a bucket that was started, and return its outputs."""
        with self._activity.at(f"bucket {number}", waits=True, kind="islands"):
            return started.result()

    def _run_program(self, what: str, compiled: "_Program", arrays: Any, timed_number: int | None) -> Any:
        is_compiled, start_seconds = compiled.knows(arrays), time.monotonic()
        with self._activity.record_on_bridge(what):
            found, num_bytes = compiled(arrays)
        self.num_bytes += num_bytes
        # the first call compiles, which would be most of its time
        if timed_number is not None and is_compiled:
            self.bucket_times.record(timed_number, time.monotonic() - start_seconds)
        return found

    def land(self, number: int, arrays: Any, like: Any) -> Any:
        """Place the outputs of a bucket device on the mesh.

        Args:
          number: the number of the bucket.
          arrays: a tree of arrays on the bucket device; None if another process has it.
          like: the same tree with shapes, dtypes and shardings.
        """
        shardings = jax.tree.map(lambda x: x.sharding, like)
        if not self._is_one_process:
            return self._broadcast(self._bucket_device(number), arrays, like, shardings)
        if jax.tree.all(jax.tree.map(lambda x, sharding: x.sharding == sharding, arrays, shardings)):
            return arrays  # as on a mesh of one device, whose bucket device is all of it
        return jax.device_put(arrays, shardings)

    def map(self, program: BucketProgram, tree: Any) -> Any:
        """Apply a program to the arrays of a tree bucket by bucket; shapes and shardings stay the same.

        Args:
          program: (list of arrays, group) -> list of arrays.
          tree: arrays on the mesh.
        """
        leaves, structure = jax.tree.flatten(tree)
        buckets = self.buckets(leaves)
        # start all buckets before waiting for the first, so that packing and MPI overlap
        started = [self.start(n, program, [leaves[i] for i in b]) for n, b in enumerate(buckets)]
        for number, (bucket, future) in enumerate(zip(buckets, started, strict=True)):
            landed = self.land(number, self.result(number, future), [leaves[i] for i in bucket])
            for i, leaf in zip(bucket, landed, strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves)

    def close(self, failed: bool = False) -> None:
        """End the thread once all started buckets are sent, because other islands wait for them.

        Args:
          failed: whether to end at once, because after an error the thread may be blocked in MPI.
        """
        self._thread.shutdown(wait=not failed, cancel_futures=failed)

    def _bucket_device(self, number: int) -> _BucketDevice:
        return self._bucket_devices[number % len(self._bucket_devices)]

    def _compile(self, program: BucketProgram, group: "MpiGroup") -> "_Program":
        key = (program, id(group))
        if key not in self._programs:
            self._programs[key] = _Program(program, group)
        return self._programs[key]

    def _replicate(self, arrays: Any) -> Any:
        """Replicate each array on all devices of the mesh."""
        if all(x.is_fully_replicated for x in jax.tree.leaves(arrays)):
            return arrays
        if "whole" not in self._programs:
            whole = NamedSharding(self.mesh, PartitionSpec())
            self._programs["whole"] = jax.jit(lambda tree: tree, out_shardings=whole)
        return self._programs["whole"](arrays)

    def _broadcast(self, source: _BucketDevice, arrays: Any, like: Any, shardings: Any) -> Any:
        """Broadcast from one device to those of other processes: a sum in which all others add zeros."""
        # stack one array per device of the mesh: the bucket device's own, and zeros on all others
        mine = [d for d in self.mesh.devices.flat if d.process_index == jax.process_index()]
        stacked = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

        def stack(like: Any, array: Any = None) -> jax.Array:
            # as bits: the sum is exact, and -0.0 stays what it is
            bits = np.dtype(f"uint{8 * like.dtype.itemsize}")
            zeros = np.zeros((1, *like.shape), bits)
            found = None if array is None else _to_bits(array, bits)[None]
            parts = [
                jax.device_put(found if d == source.device and array is not None else zeros, d) for d in mine
            ]
            shape = (self.mesh.devices.size, *like.shape)
            return jax.make_array_from_single_device_arrays(shape, stacked, parts)

        # sum over the stack, each result directly in its sharding
        stacks = jax.tree.map(stack, like) if arrays is None else jax.tree.map(stack, like, arrays)
        dtypes = jax.tree.map(lambda x: x.dtype, like)
        key = ("broadcast", *jax.tree.leaves(dtypes), jax.tree.structure(like), *jax.tree.leaves(shardings))
        if key not in self._programs:

            def add(stacks: Any) -> Any:
                return jax.tree.map(
                    lambda x, dtype: _from_bits(x.sum(0, dtype=x.dtype), dtype), stacks, dtypes
                )

            self._programs[key] = jax.jit(add, out_shardings=shardings)
        return self._programs[key](stacks)


class _Program:
    """A bucket program for one group, compiled once per shape; it counts the bytes passed to MPI."""

    def __init__(self, program: BucketProgram, group: "MpiGroup") -> None:
        self._program, self._group = program, group
        self._num_bytes: dict[Any, int] = {}
        self._compile = jax.jit(self._trace)

    def knows(self, arrays: Any) -> bool:
        """Return whether the program is compiled for arrays of these shapes."""
        return _shapes(arrays) in self._num_bytes

    def __call__(self, arrays: Any) -> tuple[Any, int]:
        """Compute and wait for the outputs; return them and the bytes that were passed to MPI."""
        found = jax.block_until_ready(self._compile(arrays))
        return found, self._num_bytes[_shapes(arrays)]

    def _trace(self, arrays: Any) -> Any:
        before = self._group.traced_bytes
        found = self._program(arrays, self._group)
        self._num_bytes[_shapes(arrays)] = self._group.traced_bytes - before
        return found


def _shapes(arrays: Any) -> Hashable:
    leaves, structure = jax.tree.flatten(arrays)
    return structure, *((leaf.shape, leaf.dtype) for leaf in leaves)


def _to_bits(x: jax.Array, bits: Any) -> jax.Array:
    return x.astype(bits) if x.dtype == bool else jax.lax.bitcast_convert_type(x, bits)


def _from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(bool) if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, dtype)


def _shard_on(x: jax.Array, device: Any) -> jax.Array:
    return next(shard.data for shard in x.addressable_shards if shard.device == device)
