"""Record the events and skipped data of waves in `waves/`, replay them, and make the wave merge of a run.

Next: `train_step/sync/waves.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain.data import Position
from shardtrain.imported import select_kept_tokens
from shardtrain.islands.parameter_shard import Event, Kind, ParameterShard
from shardtrain.pipeline.in_flight import count_waves_before_barrier
from shardtrain.report.sinks.json_lines import JsonLines, read_jsonl
from shardtrain.system.untrusted_files import check_whole_number
from shardtrain.train_step.island_compute import IslandCompute
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import State
from shardtrain.train_step.sync.waves import BarrierSchedule, UnflushedWaves, Waves, WaveWorker
from shardtrain.trainer.config import Run
from shardtrain.trainer.coordination import LONG_SECONDS
from shardtrain.trainer.evaluation import round_evaluation_interval
from shardtrain.trainer.resume import MOST_INDEX, StartPoint

if TYPE_CHECKING:
    from shardtrain.trainer.prepared_run import PreparedRun  # which imports this module

WAVES = "waves"
"""Folder inside a run's folder; each island writes a file there."""

KINDS: tuple[Kind, ...] = ("push", "pull", "barrier")

MOST_ISLANDS = 1 << 20
"""Upper limit of an island's number in a file of events."""


def wave_file(folder: Path, island: int) -> Path:
    """Return the file of the shard that an island serves."""
    return folder / WAVES / f"shard-{island}.jsonl"


class WaveLog:
    """Writes the events of a shard, one on a line, as in `{"step": 8, "push": 1.0}`.

    Args:
      folder: the folder of the run.
      island: the island that serves the shard.
      report: receives a warning if the file cannot be written.
    """

    def __init__(self, folder: Path, island: int, report: Callable[[str], None]) -> None:
        self._path, self.report = wave_file(folder, island), report
        self._file: JsonLines | None = None

    def begin(self, step: int) -> None:
        """Drop the events after a step, from which the run resumes."""
        self.close()
        self._file = JsonLines(self._path, resume_after=step or None, report=self.report)

    def write(self, event: Event) -> None:
        """Append an event."""
        assert self._file is not None
        self._file.write(event.step, {event.kind: event.island})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_wave_log(folder: Path, island: int, num_workers: int) -> list[Event]:
    """Return the events of the shard that an island served in an earlier run.

    Raises:
      ValueError: the folder has no such file, or the file has other lines or more virtual workers.
    """
    path = wave_file(folder, island)
    if not path.is_file():
        raise ValueError(
            f"replay is {folder}, and {path} is not there; give the folder of a run in waves"
            " (--clock-distance) of as many islands as this one"
        )
    found = []
    for record in read_jsonl(path):
        if "meeting" in record:  # as earlier logs call a barrier
            record["barrier"] = record.pop("meeting")
        kinds: list[Kind] = [each for each in KINDS if each in record]
        kind = (kinds or KINDS)[0]
        number = record.get(kind, -1.0)
        if not (0 <= number < MOST_ISLANDS and number.is_integer() and record["step"] > 0):
            raise ValueError(
                f"{path} has the line {record}, which is no event of a wave, such as"
                ' {"step": 8, "push": 1}; give an unchanged folder of a run'
            )
        found.append(Event(kind, int(number), int(record["step"])))
    if (most := max((event.island for event in found), default=0)) >= num_workers:
        raise ValueError(
            f"replay is {folder}, a run of {most + 1} virtual workers (islands, or pipelines of islands) or"
            f" more, and this one has {num_workers}; launch as many islands, in pipelines as long"
        )
    return found


def skips_file(folder: Path, island: int) -> Path:
    """Return the file of an island's skipped data; it exists only after a rollback."""
    return folder / WAVES / f"skipped-{island}.jsonl"


class SkippedData:
    """Records the data that rollbacks of this run skip, and reads the record of a run to replay.

    Args:
      folder: the folder of the run.
      island: this island.
      replay: the folder of the run to replay, or None.
      report: receives a warning if the file cannot be written.

    Raises:
      ValueError: a line in the file of the run to replay is no step with a position.

    >>> from tempfile import mkdtemp
    >>> first, folder = (Path(mkdtemp()) for _ in range(2))
    >>> skipped = SkippedData(first, 0, None, print)
    >>> skipped.begin(0); skipped.add(8, Position(epoch=0, index=96))
    >>> again = SkippedData(folder, 0, first, print)
    >>> again.next(4), again.next(9)
    ((8, {'epoch': 0, 'index': 96}), None)
    """

    def __init__(self, folder: Path, island: int, replay: Path | None, report: Callable[[str], None]) -> None:
        self._path, self._report = skips_file(folder, island), report
        self._repeat: list[tuple[int, Position]] = []
        path = None if replay is None else skips_file(replay, island)
        for record in read_jsonl(path) if path is not None and path.is_file() else []:
            numbers = []
            for name in ("epoch", "index"):
                # JSON lines are read as floats
                value: Any = record.get(name)
                value = int(value) if isinstance(value, float) and value.is_integer() else value
                numbers.append(check_whole_number(value, f"{path}: {name}", MOST_INDEX))
            position = Position(epoch=numbers[0], index=numbers[1])
            self._repeat.append((int(record["step"]), position))

    def begin(self, step: int) -> None:
        """Drop the lines of a step and later ones: the run resumes from its checkpoint."""
        if self._path.is_file():
            JsonLines(self._path, resume_after=step - 1 if step else None, report=self._report).close()

    def add(self, step: int, position: Position) -> None:
        """Write the position where the data continues after a step, and drop later lines."""
        lines = JsonLines(self._path, resume_after=step - 1 if step else None, report=self._report)
        lines.write(step, {"epoch": position["epoch"], "index": position["index"]})
        lines.close()

    def next(self, step: int) -> tuple[int, Position] | None:
        """Return the first (step, position) to replay at a step or later, or None."""
        return next((each for each in self._repeat if each[0] >= step), None)

    def drop(self, step: int) -> None:
        """Drop the replayed positions up to a step."""
        self._repeat = [each for each in self._repeat if each[0] > step]

    def end(self) -> None:
        """Stop the replay: the order of this run differs from now on."""
        self._repeat = []


def train_as_repeated(
    train: Callable[[StartPoint, int], tuple[State, int]],
    start: StartPoint,
    last_step: int,
    skipped: SkippedData | None,
) -> tuple[State, int]:
    """Train to the last step, and skip the data that the run to replay has skipped.

    Args:
      train: (start, step) -> (state, steps done): trains up to a step, or until it is stopped.
      start: the start point.
      last_step: the last step of the run.
      skipped: the record of skipped data; None for a run without waves.
    """
    while skipped is not None and (found := skipped.next(start.step)) is not None:
        step, position = found
        if step >= last_step:
            break
        if step > start.step:
            state, done = train(start, step)
            if done < step:
                return state, done
            start = replace(start, state=state, step=done, extra=select_kept_tokens(start.extra))
        start = replace(start, position=position)
        skipped.drop(step)
        skipped.add(step, position)
    return train(start, last_step)


def make_barrier_schedule(run: Run) -> BarrierSchedule:
    """Make the schedule of barriers of a run."""
    synchronisation = run.strategy.synchronisation
    others = [
        each for each in (round_evaluation_interval(run), run.recovery.fingerprint_every) if each is not None
    ]
    if run.strategy.across.shares == "auto" and synchronisation.distance is not None:
        # speeds are exchanged at barriers, once in the number of waves that an island may be ahead
        others.append(synchronisation.every * (synchronisation.distance + 1))
    return BarrierSchedule(synchronisation, run.steps, run.checkpoints.every_steps, others)


def make_waves(prepared: "PreparedRun", wave_log: WaveLog, compute: IslandCompute | StageCompute) -> Waves:
    """Make the step of an island whose changes are merged at the end of each wave; all ranks call it.

    Args:
      prepared: the run.
      wave_log: records the events.
      compute: what this island computes.

    Raises:
      ValueError: an island has several processes; or the run to replay does not exist.
    """
    run, coordination, barriers = prepared.run, prepared.coordination, prepared.barriers
    islands = coordination.islands
    assert islands is not None
    placement, control = islands.placement, islands.control
    if placement.num_islands < control.size:
        raise ValueError(
            f"waves (--clock-distance) need islands of one process each, and these"
            f" {placement.num_islands} have {control.size}: start one process for all devices of an island"
            " (--processes-per-island 1), or use --synchronisation local-sgd"
        )
    from shardtrain.islands.parameter_server import ParameterServer  # importing it starts MPI

    # islands that are stages push to those of the same stage
    grid = coordination.grid
    comm = islands.comm.Split(*((0, placement.island) if grid is None else (grid.stage, grid.replica)))
    ranks = comm.allgather(control.rank)
    order = [] if run.replay is None else read_wave_log(run.replay, placement.island, len(ranks))
    barriers.replayed = frozenset(event.step for event in order if event.kind == "barrier")
    synchronisation = run.strategy.synchronisation
    ahead = count_waves_before_barrier(run.strategy.pipeline.in_flight, synchronisation.every)
    shard = ParameterShard(len(ranks), wave_log, order, wave_log.report, waves_ahead=ahead)
    names = [control.names[rank] for rank in ranks]
    server = ParameterServer(comm, shard, names, ranks, control.activity, patience_seconds=LONG_SECONDS)
    sums = compute.sums if isinstance(compute, StageCompute) else None
    worker = WaveWorker(server, barriers, prepared.shares.own_share, coordination.timer.end, sums)
    in_flight = run.strategy.pipeline.in_flight
    if isinstance(compute, StageCompute) and in_flight > 1:
        return UnflushedWaves(compute, in_flight, synchronisation, worker, run.steps)
    return Waves(compute, synchronisation, worker, run.steps)
