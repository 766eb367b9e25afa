"""The training loop: step, log, evaluate, save, stop; effects in order, on the host, nothing clever.

Metrics are read some steps late, so that the device never waits for the host. What the pieces are
and how they are made from a `Run` is in `train.py`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardtrain.checkpoints.checkpointer import SaveFailed
from shardtrain.checkpoints.policy import CheckpointPolicy, due
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.report.metrics import Mean, Progress, Rate, Sink, strict
from shardtrain.system.stop_signals import StopSignals
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, Step
from shardtrain.trainer.recovery import RollBack, Spikes

MOST_SKIPPED = 100
"""So many steps skipped one after the other end a run: it will not recover by itself."""

HELD = "held"
"""In a checkpoint: the metrics of its step, which are written once it is evaluated."""

STEPS_LATE = 2
"""How many steps may be under way before the host reads the metrics of the first."""


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """What happens when.

    Args:
      steps: the last step.
      log_every: steps between lines of metrics.
      evaluate_every: steps between held-out losses; None only at the end.
      nonfinite: "skip", "stop" or "roll_back", see `config.Run`.
      unit: what the loss counts.
      spikes: judges losses; None: nobody does.
      check_every: steps between checks of the state; every save is one too.
    """

    steps: int
    log_every: int = 10
    evaluate_every: int | None = None
    nonfinite: Literal["skip", "stop", "roll_back"] = "skip"
    unit: str = "tokens"
    spikes: Spikes | None = None
    check_every: int | None = None


class Saving(Protocol):
    """What saves: `Checkpoints`, or a stand-in on islands whose state another one saves."""

    def latest(self) -> int | None: ...
    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None: ...
    def wait(self) -> None: ...
    def confirm(self, step: int | None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class LoopParts:
    """What the loop works with.

    Args:
      step: (state, batch) -> (state, metrics), compiled.
      batches: yields (batch on the mesh, the data position after it).
      evaluate: state -> held-out values by name; {} where there is nothing held out.
      checkpoints: where to save.
      policy: when to save.
      sink: where metrics go.
      progress: whom to tell.
      extra: what a checkpoint holds beside state and position.
      agree: (step, wish) -> what all islands do after this step; alone, that is the wish.
      anywhere: (question, answer here) -> whether it is so on any island; alone, on this one.
      before_save: the state that is saved, and gone on with; islands make theirs equal here.
      labels: what the entries of a metric (L,) are of.
      marks: where this process is, for its watchdog.
      check: (step, state) -> raises `RollBack` where copies of it are not the same; None: not looked at.
      explain: step -> why the data of this step gives no finite loss, "" where it is not known.
    """

    step: Step
    batches: Iterator[tuple[Any, Any]]
    evaluate: Callable[[State], dict[str, float]]
    checkpoints: Saving
    policy: CheckpointPolicy
    sink: Sink
    progress: Progress
    extra: Mapping[str, Any]
    agree: "Callable[[int, StepVote], StepVote]" = lambda step, wish: wish
    anywhere: Callable[[str, bool], bool] = lambda question, here: here
    before_save: Callable[[State], State] = lambda state: state
    labels: Sequence[str] = ()
    marks: ActivityRecord = field(default_factory=ActivityRecord)
    check: Callable[[int, State], None] | None = None
    explain: Callable[[int], str] = lambda step: ""


class StepVote(NamedTuple):
    """What a process would do after a step.

    Args:
      stop: the number of the signal that asked to stop, `TIME_OVER`, or 0.
      save: a checkpoint is due.
      saved: the newest step that is saved here, and once agreed on everywhere.
      bad: a step that was found to be bad, or 0.
    """

    stop: int
    save: bool
    saved: int | None = None
    bad: int = 0


def run_loop(
    state: State, first_step: int, pieces: LoopParts, pace: LoopOptions, stop: StopSignals
) -> tuple[State, int]:
    """Train from `first_step` to `pace.steps`, or until a signal asks to stop.

    Args:
      state: the state after `first_step` steps; it is donated.
      first_step: steps done so far.
      pieces: what to work with.
      pace: what happens when.
      stop: asked after every step.

    Returns:
      The last state, saved, and the number of steps done.

    Raises:
      FloatingPointError: a loss or gradient is not finite, and `pace.nonfinite` is "stop"; or every step was
        skipped.
      RollBack: a step was bad; with the position in the data after what was read since.
      SaveFailed: the last save failed. Earlier ones are told to `progress`, and training goes on.
    """
    reached = _Reached()
    try:
        return _run(state, first_step, pieces, pace, stop, reached)
    except RollBack as fault:
        fault.position = reached.position
        raise


@dataclass
class _Reached:
    """The position in the data after the newest batch that was read."""

    position: Any = None


def _run(
    state: State, first_step: int, pieces: LoopParts, pace: LoopOptions, stop: StopSignals, reached: _Reached
) -> tuple[State, int]:
    log = _Log(pieces, pace)
    done, saved_seconds, is_due = first_step, time.monotonic(), False
    marks = pieces.marks
    while done < pace.steps:
        marks.begin_step(done + 1)
        with marks.at("reading a batch"):
            batch, reached.position = next(pieces.batches)
        # the first one is compiled
        with marks.at("the step", waits=True, long=done == first_step):
            state, metrics = pieces.step(state, batch)
        done += 1
        stop.can_save = True
        log.add(done, metrics)
        last = done == pace.steps
        # once due it stays so: replicas may not be of one mind before some steps more
        is_due = is_due or last or due(pieces.policy, done, time.monotonic() - saved_seconds)
        mine = StepVote(stop.asked(), is_due, pieces.checkpoints.latest(), log.fault.step if log.fault else 0)
        stop_now, save_now, saved, bad = pieces.agree(done, mine)
        pieces.checkpoints.confirm(saved)
        if bad:
            raise log.fault or RollBack(bad, f"step {bad} was bad on another island")
        if pieces.check and (save_now or done % (pace.check_every or 1) == 0):
            with marks.at("comparing copies", waits=True):
                pieces.check(done, state)
        evaluates = last or (pace.evaluate_every is not None and done % pace.evaluate_every == 0)
        # a run that resumes from this step does not do it again
        if save_now or evaluates:
            log.catch_up(hold_newest=evaluates)
        # before the evaluation, which may fail or be cut short. A run that ends without a single update is
        # not saved: the same command shall begin again
        is_nothing = last and not first_step
        if save_now and not (is_nothing and not pieces.anywhere("a step that was not skipped", log.trained)):
            saved_seconds, is_due = time.monotonic(), False
            with marks.at("saving", long=True):
                state = pieces.before_save(state)
                _save(pieces, pace, done, state, reached.position, log.held)
        if evaluates:
            with marks.at("the evaluation", waits=True, long=True):
                log.evaluated(pieces.evaluate, state)
        if stop_now:
            stop.agreed(stop_now)
            break
    log.finish()
    if (pace.spikes or pace.nonfinite == "roll_back") and pieces.anywhere(
        "a bad step", log.fault is not None
    ):
        raise log.fault or RollBack(done, f"a step up to {done} was bad on another island")
    if done > first_step and not pieces.anywhere("a step that was not skipped", log.trained):
        if done == pace.steps and not first_step:
            raise FloatingPointError(f"every step was skipped, so nothing was learned: {log.why_skipped}")
        pieces.progress.note(f"WARNING: every step from {first_step + 1} was skipped: {log.why_skipped}")
    if done > first_step:
        with marks.at("saving the last step", long=True):
            _wait(pieces)
            unsaved = pieces.checkpoints.latest() != done
            if pieces.anywhere("the last step is not saved", unsaved):
                state = pieces.before_save(state)
            if unsaved:
                _save(pieces, pace, done, state, reached.position, must=True)
                pieces.checkpoints.wait()
    return state, done


def write_held(pieces: LoopParts, step: int, state: State, held: Mapping[str, Any] | None) -> None:
    """Evaluate a step again whose evaluation was cut short after it was saved, and write its metrics.

    Args:
      held: its metrics, as the checkpoint has them, where they are missing in the sink; None on islands that
        do not write them.
    """
    if not pieces.anywhere("an evaluation was cut short", held is not None):
        return
    with pieces.marks.at("the evaluation", waits=True, long=True):
        heldout = pieces.evaluate(state)
    if held is not None:
        line = {name: float(value) for name, value in {**held, **heldout}.items()}
        pieces.sink.write(step, line)
        pieces.progress.update(step, line)


def _wait(pieces: LoopParts) -> None:
    try:
        pieces.checkpoints.wait()
    except SaveFailed as failure:
        pieces.progress.note(f"WARNING: {failure}")


def _save(
    pieces: LoopParts,
    pace: LoopOptions,
    step: int,
    state: State,
    position: Any,
    held: Mapping[str, float] | None = None,
    *,
    must: bool = False,
) -> None:
    """Save, or say why not: a run goes on without a checkpoint that could not be written.

    Args:
      held: metrics of the step that wait for its evaluation, see `write_held`.

    Raises:
      FloatingPointError, RollBack: a parameter is not finite. An optimizer that divides by zero makes it
        so from a finite gradient, and every later step is skipped: such a state must not take a good one's
        place.
    """
    # a stage sees its own alone
    if pieces.anywhere("parameters are not finite", not _all_finite(state.params)):
        text = (
            f"parameters are not finite after step {step}, and gradients were: the optimizer made them so;"
            f" nothing was saved since step {pieces.checkpoints.latest()}"
        )
        raise RollBack(step, text) if pace.nonfinite == "roll_back" else FloatingPointError(text)
    _wait(pieces)
    extra = {**pieces.extra, "position": position}
    if held is not None:
        extra[HELD] = {name: strict(value) for name, value in held.items()}
    try:
        pieces.checkpoints.save(step, state, extra)
        pieces.progress.note(f"checkpoint of step {step}")
    except SaveFailed as failure:
        if must:
            raise
        pieces.progress.note(f"WARNING: {failure}")


def _plain(values: Metrics, labels: Sequence[str]) -> dict[str, float]:
    """The metrics that are no sums; one for each label where it is an array, and their mean."""
    line = {}
    for name, value in values.items():
        if isinstance(value, tuple):
            continue
        if np.ndim(value) == 0:
            line[name] = float(value)
        elif len(finite := value[np.isfinite(value)]):  # else it was not computed in this step
            line[name] = float(np.mean(finite))
            line |= {f"{name}/{label}": float(x) for label, x in zip(labels, value, strict=True)}
    return line


@jax.jit
def _all_finite(params: Any) -> jax.Array:
    return jnp.isfinite(optax.tree.norm(params))


class _Log:
    """Metrics on their way from the device to the sinks: read late, merged over a window, written."""

    def __init__(self, pieces: LoopParts, pace: LoopOptions) -> None:
        self._pieces, self._pace = pieces, pace
        self._pending: deque[tuple[int, Metrics]] = deque()
        self._means: dict[str, Mean] = {}
        self._rate = Rate()
        self._skipped = 0
        self.trained, self.why_skipped = False, ""
        self.fault: RollBack | None = None
        self.held: dict[str, float] | None = None

    def add(self, step: int, metrics: Metrics) -> None:
        self._pending.append((step, metrics))
        while len(self._pending) > STEPS_LATE:
            self._read()

    def catch_up(self, *, hold_newest: bool) -> None:
        """Read and write what is under way; hold the line of the newest step, which is evaluated."""
        while len(self._pending) > hold_newest:
            self._read()
        if hold_newest:
            self._held_step = self._pending[0][0]
            self._read(hold=True)

    def evaluated(self, evaluate: Callable[[State], dict[str, float]], state: State) -> None:
        """Write the line that is held, with the held-out values."""
        began = time.monotonic()
        heldout = evaluate(state)
        self._rate = self._rate.paused(time.monotonic() - began)
        assert self.held is not None
        self._write(self._held_step, {**self.held, **heldout})
        self.held = None

    def finish(self) -> None:
        while self._pending:
            self._read(always=len(self._pending) == 1)

    def _read(self, *, always: bool = False, hold: bool = False) -> None:
        step, metrics = self._pending.popleft()
        with self._pieces.marks.at(f"the metrics of step {step}", waits=True):
            values = jax.device_get(metrics)
        pace = self._pace
        count = float(values.pop("count"))
        skipped = bool(values.pop("skipped"))
        loss = Mean(sum=float(values.pop("loss_sum")), count=count)
        self._rate = self._rate.after(now_seconds=time.monotonic(), units=count)
        if skipped:
            self._refuse(step, loss.value, values)
        else:
            self._skipped, self.trained = 0, True
            self._judge(step, loss.value)
            pairs = {
                k: Mean(sum=float(v[0]), count=float(v[1])) for k, v in values.items() if isinstance(v, tuple)
            }
            for name, mean in {"loss": loss, **pairs}.items():
                self._means[name] = self._means.get(name, Mean()) + mean
        if step % pace.log_every and not (always or hold):
            return
        line = {f"train/{name}": mean.value for name, mean in self._means.items() if mean.value is not None}
        line |= _plain(values, self._pieces.labels)
        line["skipped"] = float(skipped)
        if self._rate.per_second is not None:
            line[f"{pace.unit}_per_second"] = self._rate.per_second
        self._means = {}
        if hold:
            self.held = line
        else:
            self._write(step, line)

    def _write(self, step: int, line: Mapping[str, float]) -> None:
        self._pieces.sink.write(step, line)
        self._pieces.progress.update(step, line)

    def _judge(self, step: int, loss: float | None) -> None:
        spikes = self._pace.spikes
        if spikes is None or loss is None:
            return
        limit = spikes.limit()
        if spikes.add(loss):
            self._found(RollBack(step, f"the loss of step {step} is {loss:.4f}, above {limit:.4f}: a spike"))

    def _found(self, fault: RollBack) -> None:
        """All islands go back together, at their next meeting."""
        self.fault = self.fault or fault

    def _refuse(self, step: int, loss: float | None, values: Metrics) -> None:
        self._skipped += 1
        norm = float(values["grad_norm"])
        text = f"step {step} was skipped: loss {loss}, gradient norm {norm} not finite"
        # the first of a row is explained: it takes its batch anew
        if self._skipped == 1 and (why := self._pieces.explain(step)):
            text = f"{text}; {why}"
        self.why_skipped = self.why_skipped or text
        if self._skipped >= MOST_SKIPPED:
            raise FloatingPointError(
                f"{text}; these were {MOST_SKIPPED} steps in a row, so the run ends. The first of all:"
                f" {self.why_skipped}"
            )
        if self._pace.nonfinite == "roll_back":
            self._found(RollBack(step, f"{text}; nonfinite is 'roll_back'"))
            return
        if self._pace.nonfinite == "stop":
            raise FloatingPointError(f"{text}; nonfinite is 'stop', and nothing of this step was kept")
        self._pieces.progress.note(f"WARNING: {text}")
