"""The inputs of the training loop: its parts, its options, and a process's vote after a step.

Next: `loop.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.functional.loss import Batch
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.islands.watchdog.stragglers import StepTimer
from shardtrain.optim.optimizer import Optimizer
from shardtrain.report.metrics import Progress
from shardtrain.report.sinks.sink import Sink, Sinks
from shardtrain.train_step.delta_island_step import DeltaIslandStep
from shardtrain.train_step.island_step import GradientIslandStep
from shardtrain.train_step.stage_step import StageStep
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, Step, combined_labels
from shardtrain.trainer.config import Run
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.coordination import StepVote
from shardtrain.trainer.evaluation import evaluated_every, make_evaluation
from shardtrain.trainer.feed import Feed
from shardtrain.trainer.first_batch import class_problems
from shardtrain.trainer.hooks import Hooks
from shardtrain.trainer.prepared_run import PreparedRun
from shardtrain.trainer.program_cache import hardware
from shardtrain.trainer.recovery import RollBack, Spikes
from shardtrain.trainer.resume import StartPoint
from shardtrain.trainer.run_checkpoints import RunCheckpoints
from shardtrain.trainer.strategy import strategy_text
from shardtrain.trainer.synchronisation import (
    divergence_text,
    faulty_copies,
    make_find_divergence,
    synchronise,
)
from shardtrain.trainer.usage import RunTotals, Spent, peak_memory


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """When the loop logs, evaluates, checks and ends.

    Args:
      steps: the last step.
      log_every: steps between lines of metrics.
      evaluate_every: steps between evaluations on held-out data; None evaluates only at the end.
      nonfinite: "skip", "stop" or "roll_back", see `config.Run`.
      unit: what the loss counts, such as tokens.
      spikes: detects loss spikes; None disables detection.
      check_every: steps between checks of the state; the state is also checked before every save.
      clip: the norm from which the optimizer clips the gradient of a step; None: it does not, or each replica
        clips its own.
    """

    steps: int
    log_every: int = 10
    evaluate_every: int | None = None
    nonfinite: Literal["skip", "stop", "roll_back"] = "skip"
    unit: str = "tokens"
    spikes: Spikes | None = None
    check_every: int | None = None
    clip: float | None = None


class CheckpointWriter(Protocol):
    """The methods of a run's checkpoints that the loop needs; see `RunCheckpoints`."""

    def latest(self) -> int | None:
        """Return the newest saved step."""
        ...

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Start saving a step in the background."""
        ...

    def wait(self) -> None:
        """Wait for the save under way."""
        ...

    def complete(self, by_all: int | None) -> int | None:
        """Return the newest step that is complete on the disk, given what all writers have finished."""
        ...

    def folder_of(self, step: int) -> Path:
        """Return the folder of a complete step."""
        ...

    def is_best(self, values: Mapping[str, float]) -> bool:
        """Return whether held-out values are better than those of every saved step."""
        ...

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Record the held-out values of a step that is saved, or being saved."""
        ...

    def confirm(self, step: int | None) -> None:
        """Allow older steps to be deleted, as all writers have finished this one."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoopParts:
    """The objects that the loop uses.

    Args:
      step: (state, batch) -> (state, metrics), compiled.
      batches: yields (batch on the mesh, the data position after it), see `feed.Feed`.
      evaluate: state -> held-out values by name; {} where there is no held-out data.
      checkpoints: saves the state.
      policy: when to save.
      sink: receives the metrics.
      progress: shows metrics and notes to the user.
      extra: what a checkpoint holds beside state and position.
      shares: returns what it holds of the rows of islands.
      vote: (step, own vote) -> the vote of all islands; a single island keeps its own.
      timer: started at the begin of each step, see `stragglers.StepTimer`.
      recompiles: asked before a step: whether its program may have to be compiled, which takes long.
      any_rank: (question, own answer) -> whether the answer is yes on any rank.
      before_save: state -> the state that is saved and trained further; islands synchronise theirs here.
      labels: names of the entries of a metric of shape (L,).
      activity: what this process is doing, for its watchdog.
      check: (step, state) -> None; raises `RollBack` where copies of the state differ. None disables it.
      aside: entered around what is no part of a step: evaluations, saves, comparisons of copies.
      hooks: functions of the user, called at the events of the run.
      totals: the wall time of the run, and the updates of this start.
      peak_memory_bytes: returns the most memory that this rank has used at once.
      spent: returns on what time was spent, and what was sent, since its last call, as metrics.
      num_devices: number of devices of all islands.
      seconds_at_peak: returns the seconds that all devices need at their peak for the model flops of the
        newest batch; 0: not known.
      num_skipped: returns how many samples the data has left out as they cannot be read; None: none ever is.
      explain: step -> why the data of this step gives no finite loss; "" where the reason is unknown.
    """

    step: Step
    batches: Iterator[tuple[Any, Any]]
    evaluate: Callable[[State], dict[str, float]]
    checkpoints: CheckpointWriter
    policy: CheckpointPolicy
    sink: Sink
    progress: Progress
    extra: Mapping[str, Any]
    vote: Callable[[int, StepVote], StepVote] = lambda step, vote: vote
    timer: StepTimer = field(default_factory=StepTimer)
    recompiles: Callable[[], bool] = lambda: False
    shares: Callable[[], Mapping[str, Any]] = dict
    any_rank: Callable[[str, bool], bool] = lambda question, answer: answer
    before_save: Callable[[State], State] = lambda state: state
    labels: Sequence[str] = ()
    activity: ActivityRecord = field(default_factory=ActivityRecord)
    aside: Callable[[], AbstractContextManager[None]] = nullcontext
    check: Callable[[int, State], None] | None = None
    hooks: Hooks = field(default_factory=Hooks)
    totals: RunTotals = field(default_factory=RunTotals)
    peak_memory_bytes: Callable[[], int] = lambda: peak_memory().num_bytes
    spent: Spent = field(default_factory=lambda: Spent(ActivityRecord()))
    num_devices: int = 1
    seconds_at_peak: Callable[[], float] = lambda: 0.0
    num_skipped: Callable[[], int | None] = lambda: None
    explain: Callable[[int], str] = lambda step: ""


def make_loop_parts(
    prepared: PreparedRun, checkpoints: RunCheckpoints, output: RunConsole, activity: ActivityRecord
) -> LoopParts:
    """Make the parts of the loop that are the same in every segment of the run.

    Sink and `explain` depend on where a segment starts, and are set there.
    """
    run, setup, coordination = prepared.run, prepared.setup, prepared.coordination
    island_step, placement, meetings = prepared.island_step, setup.placement, prepared.meetings

    feed = Feed(prepared.loader, prepared.later_loaders)

    # all ranks vote where they meet; who is slow is reported here, and gets fewer rows
    def vote(step: int, own: StepVote) -> StepVote:
        met = meetings.at(step)
        # a replay saves only where the earlier run met too, as planned
        wants_save = own.save and coordination.is_first and run.replay is None
        wants = own.stop or own.bad or wants_save
        meetings.is_wanted = bool(wants) and not met
        voted = coordination.vote(step, own, meets=met)
        changed = voted.seconds and prepared.shares.add(voted.seconds, feed.num_rows, voted.rest_seconds)
        if changed:
            feed.change(prepared.shares.shards())
            if coordination.stragglers is not None:
                coordination.stragglers.restart()
            output.note(f"after step {step}: {changed}")
        elif voted.slow is not None:
            output.note(f"WARNING: {voted.slow}")
        return voted.vote

    # what islands have in common must be equal when it is saved
    def before_save(state: State) -> State:
        return synchronise(coordination, state, run.strategy.synchronisation.on_deltas, output.note)

    # sinks differ in each segment: `train._train_segment` sets them
    return LoopParts(
        step=_make_step(prepared, feed),
        batches=feed,
        evaluate=make_evaluation(
            run,
            setup,
            coordination,
            prepared.heldout,
            island_step,
            prepared.shares.limits,
            partial(class_problems, prepared.expected),
        ),
        checkpoints=checkpoints,
        policy=run.checkpoints,
        sink=Sinks(),
        progress=output,
        extra={"run": prepared.description, "strategy": strategy_text(run.strategy)},
        vote=vote,
        timer=coordination.timer,
        recompiles=feed.take_change,
        shares=prepared.shares.saved,
        any_rank=coordination.any_rank,
        before_save=before_save,
        labels=island_step.labels if island_step else combined_labels(placement),
        activity=activity,
        spent=_make_spent(prepared, activity),
        num_devices=prepared.num_devices,
        seconds_at_peak=lambda: feed.num_rows * prepared.row_seconds_at_peak,
        num_skipped=lambda: getattr(prepared.loader.batches.source, "num_skipped", None),
        hooks=Hooks(run.hooks, run.hook_errors, output.note, activity, coordination.is_first),
        check=None if run.recovery.fingerprint_every is None else _make_check(prepared),
    )


def _make_step(prepared: PreparedRun, feed: Feed) -> Step:
    """Return the step; among several islands it receives which rows of the whole batch its own are."""
    island_step = prepared.island_step
    if not isinstance(island_step, GradientIslandStep | DeltaIslandStep):
        return prepared.step

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        island_step.first_row = np.uint32(feed.first_row)
        return island_step(state, batch)

    return step


def _make_spent(prepared: PreparedRun, activity: ActivityRecord) -> Spent:
    """Make what tells where the time goes, and what this rank sends over each link."""
    transfers, island_step = prepared.coordination.transfers, prepared.island_step
    sent: dict[str, Callable[[], int]] = {}
    if transfers:
        sent["islands"] = lambda: sum(each.num_bytes for each in transfers)
    if isinstance(island_step, StageStep):
        sent["stages"] = lambda: island_step.mailbox.num_bytes
    stragglers = prepared.coordination.stragglers
    return Spent(
        activity,
        sent,
        dict if stragglers is None else stragglers.medians,
        prepared.coordination.bucket_seconds,
    )


def _make_check(prepared: PreparedRun):
    """Make the function that raises `RollBack` where copies of the parameters are not the same bits."""
    setup = prepared.setup
    find = make_find_divergence(setup.mesh, setup.placement.state.params)
    kind = f"{len(setup.mesh.devices.flat)} x {hardware()}, {setup.mesh.shape}, {setup.placement.layout}"

    def check(step: int, state: State) -> None:
        found = find(state.params)
        problem = divergence_text(step, found) if found else ""
        if text := faulty_copies(prepared.coordination, step, problem, kind, state.params):
            raise RollBack(step, text)

    return check


def make_loop_options(run: Run) -> LoopOptions:
    """Make the options of the loop."""
    # with deltas each replica clips its own gradient, and the norm in the metrics is a mean over them
    optimizer = None if run.strategy.synchronisation.on_deltas else run.optimizer
    return LoopOptions(
        steps=run.steps,
        log_every=run.log_every,
        evaluate_every=evaluated_every(run),
        nonfinite=run.nonfinite,
        unit=run.unit,
        spikes=None if run.recovery.spike is None else Spikes(run.recovery.spike, run.recovery.window),
        check_every=run.recovery.fingerprint_every,
        clip=optimizer.clip if isinstance(optimizer, Optimizer) else None,
    )


def explain_step(prepared: PreparedRun, feed: Feed, start: StartPoint, step: int) -> str:
    """Return what is wrong with this process's rows of the batch of a step; "" if nothing is."""
    return "; ".join(class_problems(prepared.expected, feed.load(step - start.step - 1)))
