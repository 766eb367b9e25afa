"""The objects that the training loop uses: step, evaluation, checkpoints, output, hooks and counts.

What is made before the first array is in `prepared_run.py`. Next: `loop.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import numpy as np

from shardtrain.functional.loss import Batch
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.train_step.island_compute import IslandCompute
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, Step
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.evaluation import Evaluate, make_evaluation
from shardtrain.trainer.first_batch import find_class_problems
from shardtrain.trainer.hooks import Hooks
from shardtrain.trainer.prepared_run import PreparedRun
from shardtrain.trainer.profiling import ProfiledStep, ProfiledSteps
from shardtrain.trainer.program_cache import make_hardware_key
from shardtrain.trainer.recovery import RollBack
from shardtrain.trainer.run_checkpoints import RunCheckpoints
from shardtrain.trainer.synchronisation import divergence_text, find_faulty_copies, make_find_divergence
from shardtrain.trainer.usage import RunTotals, UsageLog


class Session:
    """The objects that the training loop uses, the same in all segments of a start.

    Args:
      prepared: everything that was made before the first array.
      checkpoints: saves the state.
      output: shows metrics and notes to the user.
      activity: what this process is doing, for its watchdog.
      totals: the wall time of the run, and the updates of this start.
      profile: steps of which rank 0 records a trace; None disables it.
      stack: ends the trace.

    Attributes:
      step: (state, batch) -> (state, metrics), compiled.
      evaluate: state -> held-out values by name; {} where there is no held-out data.
      check: (step, state) -> None; raises `RollBack` where copies of the state differ. None disables it.
      untimed: context for work outside the step: evaluations, saves, comparisons of copies.
      hooks: functions of the user, called at the events of the run.
      spent: the seconds and bytes of each kind of work.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        checkpoints: RunCheckpoints,
        output: RunConsole,
        activity: ActivityRecord,
        totals: RunTotals,
        profile: ProfiledSteps | None,
        stack: ExitStack,
    ) -> None:
        self.prepared, self.checkpoints, self.output = prepared, checkpoints, output
        self.activity, self.totals = activity, totals
        run, coordination, mark = prepared.run, prepared.coordination, prepared.mark
        compute = None if prepared.island_step is None else prepared.island_step.compute
        self.step: Step = mark.first_run("the training step", _make_step(prepared, compute))
        self.untimed: Callable[[], AbstractContextManager[None]] = nullcontext
        if profile is not None and coordination.is_first:
            self.step = step = ProfiledStep(
                self.step, profile, lambda: activity.step, prepared.folder, output.note
            )
            stack.callback(step.close)
            self.untimed = step.untimed
        evaluate = make_evaluation(
            run,
            prepared.setup,
            coordination,
            prepared.heldout,
            prepared.island_step,
            prepared.shares.limits,
            partial(find_class_problems, prepared.expected),
        )
        self.evaluate: Evaluate = mark.first_run("the evaluation", evaluate)
        self.check = None if run.recovery.fingerprint_every is None else _make_check(prepared)
        self.hooks = Hooks(run.hooks, run.hook_errors, output.note, activity, lambda: coordination.is_first)
        transfers, stragglers = coordination.transfers, coordination.stragglers
        sent: dict[str, Callable[[], int]] = {}
        if transfers:
            sent["islands"] = lambda: sum(each.num_bytes for each in transfers)
        if isinstance(compute, StageCompute):
            sent["stages"] = lambda: compute.mailbox.num_bytes
        medians = dict if stragglers is None else stragglers.medians
        self.spent = UsageLog(activity, sent, medians, coordination.bucket_seconds)


def _make_step(prepared: PreparedRun, compute: IslandCompute | StageCompute | None) -> Step:
    """Return the step; among several islands it receives which rows of the whole batch its own are."""
    if not isinstance(compute, IslandCompute):
        return prepared.step

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        compute.first_row = np.uint32(prepared.feed.first_row)
        return prepared.step(state, batch)

    return step


def _make_check(prepared: PreparedRun) -> Callable[[int, State], None]:
    """Make the function that raises `RollBack` where copies of the parameters are not the same bits."""
    setup = prepared.setup
    find = make_find_divergence(setup.mesh, setup.placement.state.params)
    mesh, layout = setup.mesh, setup.placement.layout
    kind = f"{mesh.devices.size} x {make_hardware_key()}, {mesh.shape}, {layout}"

    def check(step: int, state: State) -> None:
        found = find(state.params)
        problem = divergence_text(step, found) if found else ""
        if text := find_faulty_copies(prepared.coordination, step, problem, kind, state.params):
            raise RollBack(step, text)

    return check
