"""`shardtrain train RUN`: train a run, or resume it."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardtrain.cli.compilation import CompileOptions, set_xla_flags
from shardtrain.cli.run_options import parse_run
from shardtrain.errors.exit_codes import DONE, FAILED, TEMPORARY_FAILURE
from shardtrain.islands.binding import bind_cpus, device_environment
from shardtrain.islands.rank_environment import find_rank_environment
from shardtrain.islands.rank_placement import PROCESSES
from shardtrain.islands.watchdog.activity import ActivityRecord, activity_record
from shardtrain.launch.duration import parse_time
from shardtrain.system import terminal
from shardtrain.system.program_cache import keep_programs
from shardtrain.system.standard_streams import steady_output
from shardtrain.system.stop_signals import StopSignals

if TYPE_CHECKING:
    from shardtrain.islands.membership import Islands


@dataclass(frozen=True, kw_only=True)
class TrainOptions(CompileOptions):
    """Options of train.

    Args:
      time_limit: longest time of this process, such as 01:30:00. Shortly before it, the run saves and exits
        with code 75. None disables the limit.
      time_margin: seconds before --time-limit at which training stops, to finish the step and save.
      profile: first and last step to trace, such as 10-12. Rank 0 writes the trace into the run folder, and
        prints the longest operations and the share of time of each kind. None disables it.

    Raises:
      ValueError: the time limit is not longer than the margin.
    """

    time_limit: str | None = None
    time_margin: int = 120
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.time_margin < 0:
            raise ValueError(f"time margin is {self.time_margin} s; use 0 or more")
        if self.time_limit is not None and (limit := parse_time(self.time_limit)) <= self.time_margin:
            raise ValueError(
                f"the time limit of {limit} s leaves nothing before the margin of {self.time_margin} s; use"
                f" --time-limit {self.time_margin // 60 + 1} (minutes) or more, or --time-margin {limit // 2}"
            )

    def compute_deadline(self) -> float | None:
        """Return the value of `time.monotonic` at which to stop; None if there is no time limit."""
        if self.time_limit is None:
            return None
        return time.monotonic() - compute_process_seconds() + parse_time(self.time_limit) - self.time_margin


def compute_process_seconds() -> float:
    """Return the seconds since this process started; 0 if the system does not report them."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str], stop: StopSignals, given_arguments: Sequence[str]) -> int:
    """Train the run that the arguments describe.

    Args:
      arguments: the command line after `train`, without --cpu-devices.
      given_arguments: the whole command line after `train`.
      stop: the signal handlers, already installed.

    Returns:
      The exit code: 0 if the run is done; 128 + the number of the signal that stopped it; 75 if the time
      limit stopped it, another rank timed out, or other islands went on without this one; 1 if a step was
      not finite with `nonfinite="stop"`, the last checkpoint could not be written, or the machine failed
      during the run. The watchdog ends all ranks with 75.
    """
    # before jax starts: the ranks of a host share its devices and cores
    given = dict(os.environ)
    environment = find_rank_environment(given)
    os.environ.update(device_environment(environment, given))
    if cores := bind_cpus(environment):
        os.sched_setaffinity(0, cores)
    flags_text = set_xla_flags(arguments)
    run, options = parse_run("train", arguments, TrainOptions)
    stop.compute_deadline = options.compute_deadline()
    from shardtrain.checkpoints.save import SaveFailed  # jax starts here, after the options were read
    from shardtrain.islands.membership import make_watchdog
    from shardtrain.islands.rank_timeout import RankTimeout
    from shardtrain.islands.watchdog.diagnosis import allow_waits
    from shardtrain.islands.watchdog.watchdog import STACKS
    from shardtrain.trainer.elastic_run import ENDED_EARLY, IslandEnded
    from shardtrain.trainer.session import parse_steps
    from shardtrain.trainer.train import train

    # Orbax logs a traceback for each array that it could not write; our own message is printed once
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    profile = None if options.profile is None else parse_steps(options.profile)
    activity = activity_record()
    if run.elastic.islands and run.strategy.across.axis == "pipeline":
        # the processes of an elastic island are its stages, each with a mesh of its own
        given[PROCESSES] = "1"
    islands = _join_islands(given, activity)
    # the flags themselves are in environment.jsonl of the run
    texts = [flags_text if flags_text.startswith("WARNING") else "", keep_programs(given)]
    stacks = (run.run_dir or Path("runs/run")) / STACKS
    # a step of an elastic run may wait until there are enough islands
    watch = allow_waits(run.watch, 60 * run.elastic.wait_minutes if run.elastic.islands else 0.0)
    try:
        with steady_output(), make_watchdog(watch, activity, stacks, islands) as watchdog:
            if environment.rank == 0:
                terminal.out("".join(f"{text}\n" for text in texts if text))
            try:
                trained = train(run, None, islands, activity, stop, profile=profile, command=given_arguments)
                if islands is not None:
                    # a launcher that sees one rank end may end the others: none may still be saving
                    islands.control.all_gather("the end", timeout_seconds=run.watch.limit(long=True))
            except RankTimeout as timeout:
                watchdog.end(str(timeout))
    except IslandEnded as ended:
        _write_stderr(str(ended))
        return TEMPORARY_FAILURE
    except (FloatingPointError, SaveFailed) as failure:
        _write_stderr(str(failure))
        return FAILED
    except OSError as error:
        # before the first step it is a usage error: exit code 2
        if not activity.step:
            raise
        _write_stderr(format_failure(activity, error))
        return FAILED
    if trained.time_over or trained.outcome in ENDED_EARLY:
        return TEMPORARY_FAILURE
    return DONE if trained.stopped_by is None else 128 + trained.stopped_by


def _join_islands(environ: Mapping[str, str], activity: ActivityRecord) -> "Islands | None":
    from shardtrain.islands.membership import join
    from shardtrain.islands.rank_timeout import RankTimeout

    try:
        return join(environ, report=_write_stderr, activity=activity)
    except RankTimeout as timeout:
        # one rank did not start in time, and there is no watchdog yet
        from shardtrain.islands.bridge import end_all

        _write_stderr(str(timeout))
        end_all(TEMPORARY_FAILURE)


def format_failure(activity: ActivityRecord, error: OSError) -> str:
    """Format an error of the machine with the step and the activity in which it occurred.

    >>> activity = ActivityRecord()
    >>> activity.begin_step(7)
    >>> try:
    ...     with activity.at("the training loop"), activity.at("reading a batch"):
    ...         raise OSError(5, "Input/output error")
    ... except OSError as error:
    ...     print(format_failure(activity, error))
    at step 7, in 'reading a batch': [Errno 5] Input/output error
    the same command resumes from the last checkpoint
    """
    where = f"at step {activity.step}, in {activity.failed_at!r}"
    return f"{where}: {error}\nthe same command resumes from the last checkpoint"


def _write_stderr(text: str) -> None:
    terminal.err(f"shardtrain train: {text}\n")
