"""`shardtrain train RUN`: train a run, or go on with it."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardtrain.cli.run_options import parse_run
from shardtrain.errors.exit_codes import COME_AGAIN, DONE, FAILED
from shardtrain.islands.binding import bind_cpus, device_environment
from shardtrain.islands.rank_environment import find_rank_environment
from shardtrain.islands.watchdog.activity import ActivityRecord, activity_record
from shardtrain.launch.duration import parse_time
from shardtrain.system import terminal
from shardtrain.system.standard_streams import steady_output
from shardtrain.system.stop_signals import StopSignals


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of this command.

    Args:
      time_limit: the most it may take, from the start of this process, as in 01:30:00.
      time_margin: seconds before that, for the step under way and for saving.

    Raises:
      ValueError: nothing is left before the margin.
    """

    time_limit: str | None = None
    time_margin: int = 120

    def __post_init__(self) -> None:
        if self.time_margin < 0:
            raise ValueError(f"time margin is {self.time_margin} s; use 0 or more")
        if self.time_limit is not None and (limit := parse_time(self.time_limit)) <= self.time_margin:
            raise ValueError(
                f"the time limit of {limit} s leaves nothing before the margin of {self.time_margin} s; use"
                f" --time-limit {self.time_margin // 60 + 1} (minutes) or more, or --time-margin {limit // 2}"
            )

    def until_seconds(self) -> float | None:
        """When to stop, by `time.monotonic`; None: never."""
        if self.time_limit is None:
            return None
        return time.monotonic() - process_seconds() + parse_time(self.time_limit) - self.time_margin


def process_seconds() -> float:
    """How long this process has been there; 0 where the system does not tell."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str], stop: StopSignals) -> int:
    """Train.

    Args:
      arguments: the words behind `train`.
      stop: entered already.

    Returns:
      0; 128 + the number of the signal that stopped it; 75 where the time limit did, or another rank did
      not come to a meeting; 1 where a step was not finite and the run says to stop then, the last checkpoint
      could not be written, or the machine failed in the midst of the run. The watchdog ends all ranks with
      75.
    """
    # before jax starts: the ranks of a host share its devices and cores
    place = find_rank_environment(os.environ)
    os.environ.update(device_environment(place, os.environ))
    if cores := bind_cpus(place):
        os.sched_setaffinity(0, cores)
    run, options = parse_run("train", arguments, TrainOptions)
    stop.until_seconds = options.until_seconds()
    from shardtrain.checkpoints.save import SaveFailed  # jax starts here, after the options were read
    from shardtrain.islands.membership import join, make_watchdog
    from shardtrain.islands.rank_timeout import RankTimeout
    from shardtrain.islands.watchdog.watchdog import STACKS
    from shardtrain.trainer.train import train

    # Orbax logs a traceback for each array that it could not write; our own line says it once
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    marks = activity_record()
    try:
        islands = join(report=_to_stderr, activity=marks)
    except RankTimeout as missing:
        _end_missing(missing)
    stacks = (run.run_dir or Path("runs/run")) / STACKS
    try:
        with steady_output(), make_watchdog(run.watch, marks, stacks, islands) as watchdog:
            try:
                trained = train(run, None, islands, marks, stop)
                if islands is not None:
                    # a launcher that sees one rank end may end the others: none may still be saving
                    islands.control.all_gather("the end", timeout_seconds=run.watch.limit(long=True))
            except RankTimeout as missing:
                watchdog.end(str(missing))
    except (FloatingPointError, SaveFailed) as failure:
        terminal.err(f"shardtrain train: {failure}\n")
        return FAILED
    except OSError as error:
        # before the first step it is a mistake in what was asked
        if not marks.step:
            raise
        terminal.err(f"shardtrain train: {failed_text(marks, error)}\n")
        return FAILED
    if trained.time_over:
        return COME_AGAIN
    return DONE if trained.stopped_by is None else 128 + trained.stopped_by


def failed_text(marks: ActivityRecord, error: OSError) -> str:
    """What was being done when the machine failed.

    >>> marks = ActivityRecord()
    >>> marks.begin_step(7)
    >>> try:
    ...     with marks.at("the training loop"), marks.at("reading a batch"):
    ...         raise OSError(5, "Input/output error")
    ... except OSError as error:
    ...     print(failed_text(marks, error))
    at step 7, in 'reading a batch': [Errno 5] Input/output error
    the same command resumes from the last checkpoint
    """
    where = f"at step {marks.step}, in {marks.failed_at!r}"
    return f"{where}: {error}\nthe same command resumes from the last checkpoint"


def _end_missing(missing: Exception) -> NoReturn:
    """A rank did not come to the start, where there is no watchdog yet."""
    from shardtrain.islands.bridge import end_all

    terminal.err(f"shardtrain train: {missing}\n")
    end_all(COME_AGAIN)


def _to_stderr(text: str) -> None:
    terminal.err(f"shardtrain train: {text}\n")
