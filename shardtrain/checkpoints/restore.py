"""Restore a checkpoint onto devices: each process reads only the slices that its devices hold.

What lies in a checkpoint is in `reader.py`. Next: `checkpointer.py`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from shardtrain.checkpoints.manifest import COMMON, ArrayOrigin, Leaf, matches, mismatches
from shardtrain.checkpoints.reader import CheckpointReader, Index, Reading
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error

OPTIMIZER = "opt_state/"

IN_FLIGHT_BYTES = 1 << 27
"""So many bytes are read ahead of what is on the devices already; a larger slice comes alone."""


@dataclass(frozen=True, kw_only=True)
class Allow:
    """In what a checkpoint may differ from the run that reads it.

    Args:
      missing: patterns of arrays (`params/head/*`) that it need not have, or not in the same shape; the run
        begins with its own. Where that is part of an optimizer's state, what else of it they name begins
        with it: its count of updates too.
      unused: patterns of arrays that it has and the run has not.
      changed: patterns of options of the run (`model.dropout`) that may differ from those saved in the
        checkpoint. Layout, batch, steps, optimizer, data and intervals may always differ.

    Raises:
      ValueError: lists every value of a wrong kind.
    """

    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if problems := wrong_types(self):
            raise problems_error("this cannot be allowed", problems)


def restore_arrays(
    reader: CheckpointReader,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    origins: Mapping[str, ArrayOrigin],
    allow: Allow = Allow(),
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, jax.Array]:
    """Read arrays straight into their shardings.

    Args:
      reader: a whole checkpoint.
      wanted: path -> shape, dtype and sharding.
      origins: path -> which piece of the whole it is; those that are not named are whole.
      allow: what the reader may lack, or have beside.
      report: told how much was read.

    Returns:
      Path -> array; without those that are allowed to be missing, and are, or `begun_anew` with them.

    Raises:
      ValueError: all arrays that differ; or a part that is needed cannot be seen.
    """
    leaves = {
        path: Leaf(shape=tuple(x.shape), dtype=x.dtype.name, origin=origins.get(path, COMMON))
        for path, x in wanted.items()
    }
    where = {path: leaf.origin for path, leaf in leaves.items()}
    saved = widened(
        {path: reader.leaf(path, where.get(path, COMMON)) for path in reader.stored_arrays}, leaves
    )
    check_state(reader, saved, leaves, allow)
    differing = [path for path in wanted if str(saved.get(path)) != str(leaves[path])]
    fresh = {*differing, *begun_anew(differing, wanted, allow.missing)}
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


def widened(saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Optimizer state of fewer bits as float32 where the run has float32: nothing is lost by it.

    So it was saved of bfloat16 parameters, by earlier versions.

    >>> leaf = Leaf(shape=(2,), dtype="bfloat16")
    >>> wanted = Leaf(shape=(2,), dtype="float32")
    >>> found = widened(dict.fromkeys(["opt_state/mu", "params/w"], leaf), {"opt_state/mu": wanted})
    >>> [x.dtype for x in found.values()]
    ['float32', 'bfloat16']
    """

    def is_widened(path: str) -> bool:
        asked = path in wanted and path.startswith(OPTIMIZER) and wanted[path].dtype == "float32"
        return asked and saved[path].dtype in ("bfloat16", "float16")

    return {path: replace(x, dtype="float32") if is_widened(path) else x for path, x in saved.items()}


def begun_anew(differing: Sequence[str], wanted: Iterable[str], missing: Sequence[str]) -> set[str]:
    """What begins anew since other arrays do: a count of updates would not be that of moments of 0.

    Args:
      differing: paths of arrays that begin anew.
      wanted: paths of all arrays.
      missing: patterns of arrays that need not be saved; no others begin anew.

    >>> state = ["opt_state/0/count", "opt_state/0/mu/a", "opt_state/0/mu/b", "opt_state/1/count"]
    >>> sorted(begun_anew(["opt_state/0/mu/a"], state, ["opt_state/*"]))
    ['opt_state/0/count', 'opt_state/0/mu/a', 'opt_state/0/mu/b']
    >>> sorted(begun_anew(["opt_state/0/mu/a"], state, ["opt_state/*/a"]))
    ['opt_state/0/mu/a']
    """
    listed = list(wanted)
    counts = [path for path in listed if path.startswith(OPTIMIZER) and path.endswith("/count")]
    # the longest first: a state may hold that of another
    states = sorted((path.removesuffix("count") for path in counts), key=len, reverse=True)

    def state_of(path: str) -> str | None:
        return next((state for state in states if path.startswith(state)), None)

    anew = {state_of(path) for path in differing} - {None}
    return {path for path in listed if state_of(path) in anew and matches(path, missing)}


def check_state(
    reader: CheckpointReader, saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf], allow: Allow
) -> None:
    """Compare what was saved with what is wanted.

    Args:
      reader: where it was saved.
      saved: path -> array.
      wanted: path -> array.
      allow: in what they may differ.

    Raises:
      ValueError: all arrays that differ.
    """
    if wrong := mismatches(saved, wanted, allow.missing, allow.unused):
        folder = next(iter(reader.folders.values()), Path(f"step {reader.step}"))
        raise ValueError(another_state_text(folder, wrong))


def another_state_text(folder: Path, wrong: Sequence[str]) -> str:
    """A checkpoint is not one of this model or optimizer."""
    listed = "\n  ".join([f"{folder} holds another state than this run has:", *wrong])
    return (
        f"{listed}\nUse the model and optimizer that it was saved with, or another run folder. What may"
        " differ is said by patterns: --allow.missing 'params/head/*' for what the run has and the checkpoint"
        " has not, or in another shape; --allow.unused for what only the checkpoint has."
    )


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
        for reading, devices in self.slices:
            found = reading.result()
            found = found.astype(self.like.dtype, copy=False)
            shards += [jax.device_put(found, device) for device in devices]
        array = jax.make_array_from_single_device_arrays(self.like.shape, self.like.sharding, shards)
        # else what was read would wait on the host for its turn on the device
        return jax.block_until_ready(array)


def _land(under_way: deque[_Coming], arrays: dict[str, jax.Array]) -> None:
    """The oldest onto its devices; what the host held of it is free again."""
    oldest = under_way.popleft()
    arrays[oldest.path] = oldest.land()


def _start(reader: CheckpointReader, path: str, like: jax.ShapeDtypeStruct, leaf: Leaf) -> _Coming:
    assert like.sharding is not None
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
