"""The parts and options of the training loop, made of a run.

What the parts mean is in `loop_parts.py`. Next: `loop.py`.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from shardtrain.functional.loss import Batch
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.optim.optimizer import Optimizer
from shardtrain.report.sinks.sink import Sinks
from shardtrain.train_step.delta_island_step import DeltaIslandStep
from shardtrain.train_step.island_step import GradientIslandStep
from shardtrain.train_step.stage_step import StageStep
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, Step, combined_labels
from shardtrain.trainer.config import Run
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.evaluation import evaluated_every, make_evaluation
from shardtrain.trainer.feed import Feed
from shardtrain.trainer.fingerprints import divergence_text, hardware, make_find_divergence
from shardtrain.trainer.first_batch import class_problems
from shardtrain.trainer.hooks import Hooks
from shardtrain.trainer.loop_parts import LoopOptions, LoopParts, StepVote
from shardtrain.trainer.prepared_run import PreparedRun
from shardtrain.trainer.recovery import RollBack, Spikes
from shardtrain.trainer.resume import StartPoint
from shardtrain.trainer.run_checkpoints import RunCheckpoints
from shardtrain.trainer.spent import Spent
from shardtrain.trainer.strategy import strategy_text
from shardtrain.trainer.synchronisation import faulty_copies, synchronise


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
