"""The objects that the training loop uses: step, its profile, evaluation, checkpoints, output, hooks, counts.

What is made before the first array is in `prepared_run.py`. Next: `loop.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardtrain.checks.first_batch import find_class_problems
from shardtrain.functional.loss import Batch
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.report.trace import UNTIMED, find_operations, read_trace, summarise, summary_text
from shardtrain.report.trace_programs import read_sources
from shardtrain.system.program_cache import make_hardware_key
from shardtrain.train_step.island_compute import IslandCompute
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, Step
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.evaluation import Evaluate, make_evaluation
from shardtrain.trainer.hooks import Hooks
from shardtrain.trainer.prepared_run import PreparedRun
from shardtrain.trainer.recovery import RollBack
from shardtrain.trainer.run_checkpoints import RunCheckpoints
from shardtrain.trainer.synchronisation import divergence_text, find_faulty_copies, make_find_divergence
from shardtrain.trainer.usage import RunTotals, UsageLog

FOLDER = "profile"


@dataclass(frozen=True, kw_only=True)
class ProfiledSteps:
    """The range of steps that are profiled.

    Args:
      first: the first step, 2 or later, because the first step of a run compiles.
      last: the last step.
    """

    first: int
    last: int


def parse_steps(text: str) -> ProfiledSteps:
    """Parse the value of --profile.

    Raises:
      ValueError: it is not two numbers of steps in order.

    >>> parse_steps("10-12"), parse_steps("5")
    (ProfiledSteps(first=10, last=12), ProfiledSteps(first=5, last=5))
    """
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal() and 2 <= int(first) <= int(last)):
        raise ValueError(
            f"--profile is {text!r}; give the first and the last step, from 2 on (the first one compiles), as"
            " in 10-12"
        )
    return ProfiledSteps(first=int(first), last=int(last))


class ProfiledStep:
    """A step that records one trace of a range of steps.

    It waits for the device before the first and after the last of these steps, and around work in `untimed`,
    so that the trace has only these steps. The first step of a start, which compiles, is not recorded. The
    trace ends early if a rollback interrupts the range.

    Args:
      step: the step of the run.
      steps: the range of steps to profile.
      number: returns the number of the next step, from 1.
      folder: the folder of the run; the trace is in its folder `profile`.
      report: receives the summary, or a warning.
    """

    def __init__(
        self,
        step: Step,
        steps: ProfiledSteps,
        number: Callable[[], int],
        folder: Path,
        report: Callable[[str], None],
    ) -> None:
        self._step, self._steps, self._number = step, steps, number
        self._folder, self._report = folder / FOLDER, report
        self._begun_at: int | None = None
        self._num_done = 0
        self._is_compiled = self._is_done = False
        self._last: Any = None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        if self._is_done:
            return self._step(state, batch)
        number = self._number()
        if self._begun_at is not None and number != self._begun_at + self._num_done:
            self.close()
        elif self._is_compiled and self._steps.first <= number <= self._steps.last and not self._num_done:
            jax.block_until_ready(state)
            self._begin(number)
        found = self._step(state, batch)
        self._is_compiled = True
        if self._begun_at is not None:
            self._num_done, self._last = self._num_done + 1, found
            if number == self._steps.last:
                self.close()
        return found

    def _begin(self, number: int) -> None:
        options = jax.profiler.ProfileOptions()
        # each call of Python would be an event, and make steps longer
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._begun_at = number

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave work inside out of the summary: an evaluation, a save, a comparison of copies."""
        if self._last is None:
            yield
            return
        jax.block_until_ready(self._last)
        with jax.profiler.TraceAnnotation(UNTIMED):
            yield

    def close(self) -> None:
        """Stop the trace and report it; report a warning if no such step was run."""
        if self._is_done:
            return
        self._is_done = True
        if self._begun_at is not None:
            jax.block_until_ready(self._last)
            self._last = None
            jax.profiler.stop_trace()
            self._report(profile_text(self._folder, self._num_done))
        else:
            asked = f"{self._steps.first}-{self._steps.last}"
            self._report(f"WARNING: --profile {asked}: this start ran no such step, so there is no trace")


def profile_text(folder: Path, num_steps: int) -> str:
    """Return the summary of the newest trace in a folder, or a warning that it cannot be read."""
    try:
        newest = max(folder.glob("plugins/profile/*/*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        found = read_sources(next(newest.parent.glob("*.xplane.pb")))
        summary = summarise(find_operations(read_trace(newest), found))
    except (OSError, ValueError, StopIteration) as error:
        return f"WARNING: the trace in {folder} cannot be summarised: {error}"
    return f"{summary_text(summary, num_steps)}trace, for Perfetto or xprof: {newest}"


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
