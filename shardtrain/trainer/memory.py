"""The peak memory of each rank: of its devices where they tell it, else of its process. Next: `spent.py`."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from shardtrain.report.quantities import bytes_text
from shardtrain.system.host import peak_resident_bytes
from shardtrain.train_step.seats import Seats

MOST_RANKS = 16
"""Of more ranks only the one with most is named."""


class Peak(NamedTuple):
    """The most memory that was in use at once.

    Args:
      num_bytes: of the device that had most, or of the process.
      of_device: whether it is that of a device.
    """

    num_bytes: int
    of_device: bool


def peak_memory(devices: Sequence[Any] | None = None) -> Peak:
    """Return the peak memory of this process so far.

    Args:
      devices: by default those of this process.
    """
    devices = jax.local_devices() if devices is None else devices
    of_devices = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [peak for peak in of_devices if peak is not None]
    return Peak(max(known), True) if known else Peak(peak_resident_bytes(), False)


def memory_text(peaks: Iterable[Sequence[int]], seats: Seats | None = None) -> str:
    """Return the line about the peak memory of ranks, in their order.

    Args:
      peaks: a `Peak` of each rank.
      seats: the stage of each, where ranks are stages.

    >>> memory_text([Peak(3 << 20, False)])
    'peak memory of the process: 3.0 MiB'
    >>> memory_text([Peak(3 << 20, True), Peak(5 << 20, True)], Seats(num_islands=2, num_stages=2, island=0))
    'peak memory of a device: stage 0 3.0 MiB, stage 1 5.0 MiB'
    """
    peaks = [Peak(num_bytes, bool(of_device)) for num_bytes, of_device in peaks]
    of = "a device" if all(peak.of_device for peak in peaks) else "the process"
    texts = [bytes_text(peak.num_bytes) for peak in peaks]
    names = [_name(rank, seats) for rank in range(len(peaks))]
    if len(peaks) == 1:
        return f"peak memory of {of}: {texts[0]}"
    if len(peaks) > MOST_RANKS:
        rank = max(range(len(peaks)), key=lambda rank: peaks[rank].num_bytes)
        return f"peak memory of {of}: {names[rank]} {texts[rank]}, the most of {len(peaks)} ranks"
    return f"peak memory of {of}: {', '.join(map(' '.join, zip(names, texts, strict=True)))}"


def _name(rank: int, seats: Seats | None) -> str:
    if seats is None:
        return f"rank {rank}"
    stage, replica = rank % seats.num_stages, rank // seats.num_stages
    return f"stage {stage}" if seats.num_replicas == 1 else f"stage {stage} of pipeline {replica}"
