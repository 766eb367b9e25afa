"""Train a `Run` from its start point to its end: prepare, restore, train, roll back, summarise.

Each part can be used separately, see the README.
"""

import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from shardtrain.data import Position
from shardtrain.islands.membership import Islands
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.report.progress import progress
from shardtrain.report.sinks import open_sinks
from shardtrain.report.sinks.json_lines import METRICS, read_jsonl
from shardtrain.report.sinks.sink import RUN_FILE, Sinks
from shardtrain.report.speed import speed_text
from shardtrain.system import terminal
from shardtrain.system.program_cache import ProgramCounts, find_program_folder
from shardtrain.system.stop_signals import StopSignals
from shardtrain.train_step.state import State
from shardtrain.trainer.config import Run, run_text
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.elastic_run import ElasticRun, mark_plain
from shardtrain.trainer.hooks import calling_end
from shardtrain.trainer.loop import finish_evaluation, run_loop
from shardtrain.trainer.prepared_run import PreparedRun
from shardtrain.trainer.recovery import RollBack, Rollbacks
from shardtrain.trainer.resume import StartPoint, find_start_point
from shardtrain.trainer.run_checkpoints import WALL_SECONDS, RunCheckpoints
from shardtrain.trainer.run_folder import (
    check_folder,
    check_place,
    draw_curve,
    lock_folder,
    record_environment,
    remove_mark,
    take_mark,
    write_run_files,
)
from shardtrain.trainer.session import ProfiledSteps, Session
from shardtrain.trainer.strategy import STRATEGY_FILE, strategy_text
from shardtrain.trainer.trained_model import sample_text
from shardtrain.trainer.usage import RunTotals, measure_peak_memory, memory_text, read_wall_seconds
from shardtrain.trainer.waves import SkippedData, train_as_repeated


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of a training run.

    Args:
      state: the last state, on the mesh.
      step: steps done.
      stopped_by: the number of the signal that ended the run early, or None.
      run_dir: the run's folder.
      sample: the text of `Run.sample`, or None.
      time_over: whether the time limit ended the run early.
      outcome: why this island is no member of a run whose islands come and go any more, see
        `elastic.engine.Over`; "" in other runs.
    """

    state: State
    step: int
    stopped_by: int | None
    run_dir: Path
    sample: str | None
    time_over: bool = False
    outcome: str = ""


def train(
    run: Run,
    console: Console | None = None,
    islands: Islands | None = None,
    activity: ActivityRecord | None = None,
    stop: StopSignals | None = None,
    *,
    profile: ProfiledSteps | None = None,
    command: Sequence[str] = (),
) -> Trained:
    """Train a run from its newest checkpoint, or from the start, to its last step.

    Args:
      run: the run; its folder is made if it does not exist.
      console: where to print; by default the terminal. Only the first process of all prints.
      islands: the result of `islands.membership.join` if several islands were launched, else None.
      activity: what this process is doing, for its watchdog.
      stop: the stop signals, already entered; by default signals are recorded while this runs.
      profile: steps of which rank 0 records a trace; None disables it.
      command: the words after `shardtrain train`, with which `launch --join` starts further islands.

    Raises:
      ValueError: something in the run does not fit, before anything is computed.
      FloatingPointError: see `loop.run_loop`.
    """
    folder = run.run_dir or Path("runs/run")
    check_folder(folder)
    # only this rank writes to it; another host may have no such disk
    if Coordination(islands).is_first:
        check_place(folder)
    totals = RunTotals()
    activity = activity or (ActivityRecord() if islands is None else islands.control.activity)
    with ExitStack() as stack:
        is_elastic = bool(run.elastic.islands)
        output = stack.enter_context(RunConsole(console, islands, holds=is_elastic))
        programs = stack.enter_context(ProgramCounts())
        # Set up the run, and check that it is the same on all islands.
        if Coordination(islands).is_first and not is_elastic:
            # at once: notes wait for a display, and the same program may end this process first
            if text := take_mark(folder):
                output.say(text)
            if stop is not None:
                # the mark goes if the user ends this start
                stop.before_end = partial(remove_mark, folder)
        prepared = PreparedRun(run, folder, islands, output, stack)
        if prepared.elastic is not None:
            prepared.elastic.command = command
        # Lock the folder: from now on this run writes to it.
        if prepared.coordination.is_first:
            stack.enter_context(lock_folder(folder, shared=is_elastic))
        record_environment(folder, prepared.coordination, output)
        checkpoints = stack.enter_context(RunCheckpoints(prepared, output.note))
        stop = stop or stack.enter_context(StopSignals())
        session = Session(prepared, checkpoints, output, activity, totals, profile, stack)
        with calling_end(session.hooks, stop):
            # Restore and train; after a rollback restore an earlier checkpoint and train again.
            state, step = _train_segments(session, stop)
            if prepared.elastic is not None and step < prepared.run.steps:
                _record_leaving(prepared.elastic, stop)
            with activity.at("the end", long=True):
                _summarise(session, step, programs.text(find_program_folder()))
                # Draw the curve, and show a sample.
                outcome = "" if prepared.elastic is None else prepared.elastic.outcome
                sample = _end(prepared, state, step, output, stop)
    return Trained(
        state=state,
        step=step,
        stopped_by=stop.received,
        run_dir=folder,
        sample=sample,
        time_over=stop.time_over,
        outcome=outcome,
    )


def _record_leaving(elastic: ElasticRun, stop: StopSignals) -> None:
    """Record what asked this island to leave before the last step; `shardtrain leave` counts as SIGTERM."""
    if asked := elastic.find_asked() or (signal.SIGTERM if elastic.outcome in ("left", "stopped") else 0):
        stop.record_agreement(asked)


def _summarise(session: Session, step: int, programs: str) -> None:
    """Print time, compiled programs, speed compared with its prediction, and memory; all ranks call it."""
    prepared, output = session.prepared, session.output
    output.say(session.totals.summary(step))
    output.say(session.spent.summary())
    if programs:
        output.say(programs)
    if prepared.strategy.predicted and prepared.coordination.is_first:
        try:
            text = speed_text(read_jsonl(prepared.folder / METRICS), prepared.strategy.predicted)
        except (OSError, ValueError) as error:
            text = f"WARNING: the speed is not compared with its prediction: {error}"
        if text is not None:
            output.say(text)
    peaks = prepared.coordination.gather_after_work("peak memory", list(measure_peak_memory()))
    output.say(memory_text(peaks, prepared.coordination.grid))


def _train_segments(session: Session, stop: StopSignals) -> tuple[State, int]:
    """Train from the start point to the end; each rollback starts another segment.

    Returns:
      The last state and the number of steps done.

    Raises:
      FloatingPointError: the run needs more rollbacks than are allowed.
    """
    prepared, note = session.prepared, session.output.note
    run = prepared.run
    rollbacks = Rollbacks(run.recovery.rollbacks)
    # the record of skipped data; a run without waves is not replayed
    skipped: SkippedData | None = None
    if prepared.coordination.islands is not None and run.strategy.synchronisation.distance is not None:
        skipped = SkippedData(prepared.folder, prepared.coordination.island, run.replay, note)
    newest: int | None = None
    position: Position | None = None
    while True:
        # all ranks restore the same checkpoint; after a rollback an older one
        with session.activity.at("restoring", waits=True, long=True):
            find = partial(find_start_point, prepared, session.checkpoints, newest)
            if prepared.elastic is None:
                start = find()
                if prepared.coordination.is_first:
                    mark_plain(prepared.folder, start.step)
            else:
                prepared.elastic.asked = stop.asked
                start = prepared.elastic.join(prepared.facts, prepared.init, find, session.checkpoints)
        if text := prepared.shares.restore(start.extra):
            prepared.feed.change(prepared.shares.shards())
            note(text)
        rollbacks.restored(start.step)
        session.hooks.restored(start.step)
        session.totals.record_resume(read_wall_seconds(start.extra.get(WALL_SECONDS)))
        if position is not None:
            # the data that was read before the rollback is not read again
            start = replace(start, position=position)
            if skipped is not None:
                skipped.add(start.step, position)
        elif skipped is not None:
            skipped.begin(start.step)
        try:
            segment = partial(_train_segment, session, stop)
            return train_as_repeated(segment, start, run.steps, skipped)
        except RollBack as fault:
            if prepared.elastic is not None:
                # the others go on without this island
                raise FloatingPointError(fault.why) from fault
            if skipped is not None:
                skipped.end()
            # resume from a step before the fault, with data from after it
            newest, position = rollbacks.find_newest_allowed(fault), fault.position
            where = f"step {newest} or before" if newest > 0 else "the beginning"
            note(f"WARNING: {fault.why}: rolling back to {where}, and continuing with later data")


def _train_segment(
    session: Session, stop: StopSignals, start: StartPoint, last_step: int
) -> tuple[State, int]:
    """Train from a start point to a step, see `loop.run_loop`.

    Raises:
      RollBack: a step was bad.
    """
    prepared, output = session.prepared, session.output
    run, folder, is_first = prepared.run, prepared.folder, prepared.coordination.is_first
    with ExitStack() as stack:
        # The first process writes the description of the run, and its metrics.
        def open_all(step: int) -> tuple[Sinks, int | None]:
            texts = {
                RUN_FILE: run_text(prepared.description),
                STRATEGY_FILE: strategy_text(prepared.strategy),
            }
            write_run_files(folder, texts, output)
            is_shared = prepared.elastic is not None
            return open_sinks(folder, step or None, output.note, run.sinks, is_shared=is_shared)

        sinks, logged = Sinks(), None
        if prepared.elastic is not None:
            sinks = ElasticSinks(prepared.elastic, start.step, open_all)
            logged = sinks.last_step
        elif is_first:
            sinks, logged = open_all(start.step)
        stack.callback(sinks.close)
        if start.step >= run.steps:
            output.note(
                f"{start.step} steps are done, and --steps is {run.steps}; give more, or another --run-dir"
            )
        # Show progress until the segment ends.
        bar = progress(total_steps=run.steps, start_step=start.step, unit=run.unit, console=output.console)
        output.attach(stack.enter_context(bar))
        stack.callback(output.detach)
        # Load batches from where the data was left.
        stack.enter_context(prepared.feed.reading(start.position, start.step))
        session.spent.begin()
        with session.activity.at("the training loop"):
            # First write metrics that wait for an evaluation that the previous start did not finish.
            is_logged = not is_first or logged == start.step
            finish_evaluation(session, start, sinks, is_logged=is_logged)
            return run_loop(session, start, last_step, sinks, stop)


def _end(prepared: PreparedRun, state: State, step: int, output: RunConsole, stop: StopSignals) -> str | None:
    """Draw the loss curve, say how the run ended, and return the sample if there is one."""
    run, setup, folder = prepared.run, prepared.setup, prepared.folder
    if (elastic := prepared.elastic) is not None:
        is_writer = elastic.outcome == "stopped" and elastic.may_save()
        # the processes of an island that share a mesh compute the sample together
        if not prepared.coordination.any_rank("this island ends the run", is_writer):
            if elastic.leads:
                terminal.err(f"{elastic.name}: {elastic.outcome} after step {step}\n")
            return None
    if not prepared.coordination.writes:
        return None
    if prepared.coordination.is_first:
        draw_curve(folder, output)
    if stop.received is not None or stop.time_over:
        by = "the time limit" if stop.received is None else stop.received.name
        output.say(f"stopped by {by} after step {step}, which is saved; the same command resumes from it")
        return None
    sample = None
    if run.sample is not None and setup.stage_model is not None:
        output.say("no sample: the model is distributed over islands")
    elif run.sample is not None:
        sample = sample_text(run, setup, state)
        output.say(sample)
    output.say(f"run folder: {folder}")
    return sample


KEPT_LINES = 64
"""Lines of metrics that an island keeps, to write them if the chief is lost before it has."""


class ElasticSinks:
    """A sink of which only the chief writes; others keep the newest lines, to write them if it is lost.

    Args:
      elastic: this island.
      step: steps done when it joined.
      open_sinks: (steps done) -> the sinks, with no later lines, and the step of the last line.
    """

    def __init__(
        self, elastic: ElasticRun, step: int, open_sinks: Callable[[int], tuple[Sinks, int | None]]
    ) -> None:
        self._elastic, self._open, self._step = elastic, open_sinks, step
        self._lines: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=KEPT_LINES)
        self._sinks: Sinks | None = None
        self.last_step: int | None = None
        elastic.write_kept_lines = self._write_kept
        if elastic.may_write():
            # this island has founded the run: what it did not restore is gone
            self._sinks, self.last_step = open_sinks(step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._lines.append((step, values))
        self._write_kept()

    def _write_kept(self) -> None:
        if not self._lines or not self._elastic.may_write():
            return
        if self._sinks is None:
            # what earlier chiefs have written is of steps that this island has done too
            self._sinks, self.last_step = self._open(self._lines[-1][0])
        while self._lines:
            step, values = self._lines.popleft()
            if self.last_step is None or step > self.last_step:
                self._sinks.write(step, values)
                self.last_step = step

    def close(self) -> None:
        if self._sinks is not None:
            self._sinks.close()
