"""Measure the resources of a run: wall time by kind of work, bytes sent, memory, and model flops.

Next: `metric_log.py`, which writes these.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from shardtrain.functional.activation_rules import noting
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.plan.devices import TERA, Device, find_device
from shardtrain.plan.subject import Subject
from shardtrain.report.quantities import bytes_text, count_text, duration_text
from shardtrain.system.host import peak_resident_bytes
from shardtrain.train_step.stage_links import PipelineGrid
from shardtrain.trainer.config import Run, make_model

MOST_RANKS = 16
"""Largest number of ranks that have their own metrics and are named."""

MOST_BUCKETS = 16
"""Largest number of buckets whose seconds are logged."""


class UsageLog:
    """The seconds and bytes of this rank since the last line of metrics, and the seconds of all lines.

    Args:
      activity: the activity record of this process.
      sent: link -> function that returns the bytes that this process has sent over it so far.
      own_seconds: function that returns rank -> median seconds of its own work in a step, or {}.
      bucket_seconds: function that returns bucket -> mean seconds since the last call.

    >>> now, sent = [0.0], [0]
    >>> activity = ActivityRecord(clock=lambda: now[0])
    >>> spent = UsageLog(activity, {"islands": lambda: sent[0]})
    >>> with activity.at("the step", kind="step"):
    ...     now[0] += 3.0
    >>> now[0], sent[0] = 4.0, 100
    >>> {name: x for name, x in spent().items() if x}
    {'seconds/step': 3.0, 'seconds/other': 1.0, 'bytes/islands': 100}
    >>> spent.summary()
    'time of this start: step 75%, other 25%'
    """

    def __init__(
        self,
        activity: ActivityRecord,
        sent: Mapping[str, Callable[[], int]] = {},
        own_seconds: Callable[[], Mapping[str, float]] = dict,
        bucket_seconds: Callable[[], Mapping[int, float]] = dict,
    ) -> None:
        self._activity, self._sent = activity, sent
        self._own_seconds, self._bucket_seconds = own_seconds, bucket_seconds
        self._before: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Start a segment of the run: forget everything before it."""
        self._activity.take_seconds()
        self._bucket_seconds()
        self._before = {link: count() for link, count in self._sent.items()}

    def __call__(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        # every line has the same names
        kinds = ("input", "step", *self._sent, "save", "evaluation", "other")
        seconds = {**dict.fromkeys(kinds, 0.0), **self._activity.take_seconds()}
        for kind, each in seconds.items():
            self._seconds[kind] = self._seconds.get(kind, 0.0) + each
        sent = {link: count() for link, count in self._sent.items()}
        num_bytes = {f"bytes/{link}": count - self._before.get(link, 0) for link, count in sent.items()}
        self._before = sent
        own = self._own_seconds()
        each = {f"own_seconds/{rank}": x for rank, x in own.items()} if len(own) <= MOST_RANKS else {}
        buckets = {
            f"bucket_seconds/{number}": x
            for number, x in self._bucket_seconds().items()
            if number < MOST_BUCKETS
        }
        return {**{f"seconds/{kind}": x for kind, x in seconds.items()}, **num_bytes, **each, **buckets}

    def summary(self) -> str:
        """Format the fractions of the time of all lines, the largest first."""
        whole = sum(self._seconds.values()) or 1.0
        parts = sorted(self._seconds.items(), key=lambda item: -item[1])
        shown = [f"{kind} {x / whole:.0%}" for kind, x in parts if x / whole >= 0.005]
        return f"time of this start: {', '.join(shown) or 'nothing was measured'}"


class RunTotals:
    """Counts updates, and the seconds since the run began.

    A checkpoint has the seconds until its save, to which a start that resumes from it adds its own. The time
    between two starts, and of steps that were lost, does not count.

    Args:
      clock: monotonic, in seconds; this start begins now.

    >>> now = [100.0]
    >>> totals = RunTotals(lambda: now[0])
    >>> totals.record_resume(60.0)
    >>> now[0] += 15.0
    >>> totals.wall_seconds()
    75.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start_seconds = clock, clock()
        self._before_seconds: float | None = None
        self._num_updates = 0
        self._num_judged = self._num_clipped = 0

    def record_resume(self, wall_seconds: float) -> None:
        """Add the seconds of earlier starts; a rollback of this start resumes too, and changes nothing."""
        if self._before_seconds is None:
            self._before_seconds = wall_seconds

    def wall_seconds(self) -> float:
        """Return the seconds since the run began."""
        return (self._before_seconds or 0.0) + self._clock() - self._start_seconds

    def updated(self, clipped: bool | None) -> None:
        """Count an update, and whether its gradient was clipped; None if not known."""
        self._num_updates += 1
        if clipped is not None:
            self._num_judged += 1
            self._num_clipped += clipped

    def summary(self, step: int) -> str:
        """Return the line at the end of a run.

        Args:
          step: steps done since the run began.

        >>> now = [0.0]
        >>> totals = RunTotals(lambda: now[0])
        >>> totals.updated(clipped=True), totals.updated(clipped=False)
        (None, None)
        >>> now[0] = 80.0
        >>> totals.summary(2)
        '2 steps in 1m20s; this start: 2 updates, 0.03 updates/s, 50% clipped'
        """
        seconds = self._clock() - self._start_seconds
        parts = [f"{self._num_updates} updates"]
        if self._num_updates and seconds > 0:
            parts.append(f"{count_text(self._num_updates / seconds)} updates/s")
        if self._num_judged:
            parts.append(f"{self._num_clipped / self._num_judged:.0%} clipped")
        return f"{step} steps in {duration_text(self.wall_seconds())}; this start: {', '.join(parts)}"


def read_wall_seconds(value: Any) -> float:
    """Return the wall time in a checkpoint; 0 if it has no valid one.

    >>> [read_wall_seconds(value) for value in (2, None, "x", -1.0)]
    [2.0, 0.0, 0.0, 0.0]
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < math.inf else 0.0


class PeakMemory(NamedTuple):
    """The peak memory of a rank.

    Args:
      num_bytes: memory of its device with the highest peak, or of the process.
      of_device: whether it is the memory of a device.
    """

    num_bytes: int
    of_device: bool


def measure_peak_memory(devices: Sequence[Any] | None = None) -> PeakMemory:
    """Return the peak memory of this process so far.

    Args:
      devices: by default those of this process.
    """
    devices = jax.local_devices() if devices is None else devices
    of_devices = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [peak for peak in of_devices if peak is not None]
    return PeakMemory(max(known), True) if known else PeakMemory(peak_resident_bytes(), False)


def memory_text(peaks: Iterable[Sequence[int]], grid: PipelineGrid | None = None) -> str:
    """Format the peak memory of ranks, in their order.

    Args:
      peaks: the `PeakMemory` of each rank.
      grid: the stage of each rank, if ranks are stages.

    >>> memory_text([PeakMemory(3 << 20, False)])
    'peak memory of the process: 3.0 MiB'
    >>> grid = PipelineGrid(num_islands=2, num_stages=2, island=0)
    >>> memory_text([PeakMemory(3 << 20, True), PeakMemory(5 << 20, True)], grid)
    'peak memory of a device: stage 0 3.0 MiB, stage 1 5.0 MiB'
    """
    peaks = [PeakMemory(num_bytes, bool(of_device)) for num_bytes, of_device in peaks]
    of = "a device" if all(peak.of_device for peak in peaks) else "the process"
    texts = [bytes_text(peak.num_bytes) for peak in peaks]
    names = [f"rank {rank}" for rank in range(len(peaks))]
    if grid is not None:
        places = [divmod(rank, grid.num_stages) for rank in range(len(peaks))]
        names = [
            f"stage {stage}" + (f" of pipeline {replica}" if grid.num_replicas > 1 else "")
            for replica, stage in places
        ]
    if len(peaks) == 1:
        return f"peak memory of {of}: {texts[0]}"
    if len(peaks) > MOST_RANKS:
        rank = max(range(len(peaks)), key=lambda rank: peaks[rank].num_bytes)
        return f"peak memory of {of}: {names[rank]} {texts[rank]}, the most of {len(peaks)} ranks"
    return f"peak memory of {of}: {', '.join(map(' '.join, zip(names, texts, strict=True)))}"


def compute_row_seconds_at_peak(
    run: Run,
    batch: Mapping[str, Any],
    devices: Sequence[tuple[str, int]],
    note: Callable[[str], None],
) -> float:
    """Return the seconds that all devices of a run need at their peak for the model flops of a row.

    Args:
      run: the run.
      batch: name -> array (rows, ...), any rows of a batch.
      devices: kind and number of the devices of each island.
      note: receives the peak that MFU is relative to, or why MFU is not known.

    Returns:
      0 if MFU is not known: for devices without a known peak in bfloat16, batches counted in tokens, and
      models that cannot be traced for an unknown device.
    """
    numbers: Counter[Device] = Counter()
    peak_flops_per_second = 0.0
    for kind, number in devices:
        device = find_device(kind)
        if device is None or device.matrix_flops_per_second is None or run.batch_unit == "tokens":
            return 0.0
        numbers[device] += number
        peak_flops_per_second += number * device.matrix_flops_per_second
    try:
        flops = count_row_flops(run, batch)
    except Exception as error:  # of any code of the model; a missing metric does not end a run
        note(f"no MFU: the flops of the model cannot be counted: {type(error).__name__}: {error}")
        return 0.0
    note(peak_text(numbers, flops))
    return flops / peak_flops_per_second


def count_row_flops(run: Run, batch: Mapping[str, Any]) -> float:
    """Count the flops of a row, forward and backward, without recomputation.

    Args:
      run: the run.
      batch: name -> array (rows, ...), any rows of a batch.
    """
    # cuDNN's attention is one call, whose flops no trace shows
    config: Any = run.model
    is_fused = getattr(config, "attention", None) == "cudnn"
    config = replace(config, attention="xla") if is_fused else config

    model = partial(make_model, replace(run, model=config))
    shapes = {name: jax.ShapeDtypeStruct((run.batch, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    # silent: the step may use another attention than this trace
    with noting(lambda text: None):
        return Subject(model=model, loss=run.loss, optimizer=optax.identity(), batch=shapes).row_flops


def peak_text(devices: Mapping[Device, int], row_flops: float) -> str:
    """Format the peak that MFU is relative to.

    Args:
      devices: device with a peak in bfloat16 -> number.
      row_flops: model flops of a row.

    >>> print(peak_text({find_device("NVIDIA L4"): 2}, 2.5e9).replace(" over ", "\\n"))
    MFU: 2.50G flops a row
    the peak in dense bfloat16 of 2 x NVIDIA L4, 121 teraflops/s each (NVIDIA L4 Tensor Core GPU datasheet)
    """
    kinds = [
        f"{number} x {device.kind}, {(device.matrix_flops_per_second or 0) / TERA:g} teraflops/s each"
        f" ({device.source})"
        for device, number in devices.items()
    ]
    return (
        f"MFU: {count_text(row_flops)} flops a row over the peak in dense bfloat16 of {' and '.join(kinds)}"
    )
