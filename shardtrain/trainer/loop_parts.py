"""The inputs of the training loop: its parts, its options, and a process's vote after a step.

Next: `loop.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.islands.watchdog.stragglers import StepTimer
from shardtrain.report.metrics import Progress
from shardtrain.report.sinks.sink import Sink
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Step
from shardtrain.trainer.hooks import Hooks
from shardtrain.trainer.memory import peak_memory
from shardtrain.trainer.recovery import Spikes
from shardtrain.trainer.run_totals import RunTotals
from shardtrain.trainer.spent import Spent


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


class StepVote(NamedTuple):
    """The vote of a process after a step.

    Args:
      stop: the number of the signal that asked to stop, `TIME_OVER`, or 0.
      save: a checkpoint is due.
      saved: the newest step saved by this process; after the vote, by all processes.
      bad: a step that was found to be bad, or 0.
      met: whether islands voted after this step; a single one always does.
    """

    stop: int
    save: bool
    saved: int | None = None
    bad: int = 0
    met: bool = True


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
