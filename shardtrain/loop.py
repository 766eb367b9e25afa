"""The training loop: step, log, evaluate, save, stop; effects in order, on the host, nothing clever.

Metrics are read some steps late, so that the device never waits for the host. What the pieces are
and how they are made from a `Run` is in `trainer.py`.
"""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardtrain.checkpoint import SaveFailed
from shardtrain.checkpoint_policy import CheckpointPolicy, due
from shardtrain.islands.marks import Marks
from shardtrain.metrics import Mean, Progress, Rate, Sink
from shardtrain.recovery import RollBack, Spikes
from shardtrain.state import State
from shardtrain.step import Metrics, Step

MOST_SKIPPED = 100
"""So many steps skipped one after the other end a run: it will not recover by itself."""

STEPS_LATE = 2
"""How many steps may be under way before the host reads the metrics of the first."""


TIME_OVER = 1000
"""In the place of a signal's number: the time limit is near."""


@dataclass(frozen=True, kw_only=True)
class Pace:
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
class Pieces:
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
      anywhere: whether something is so on any island; alone, on this one.
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
    agree: "Callable[[int, Wish], Wish]" = lambda step, wish: wish
    anywhere: Callable[[bool], bool] = lambda here: here
    before_save: Callable[[State], State] = lambda state: state
    labels: Sequence[str] = ()
    marks: Marks = field(default_factory=Marks)
    check: Callable[[int, State], None] | None = None
    explain: Callable[[int], str] = lambda step: ""


class Wish(NamedTuple):
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


class StopSignals:
    """While this is entered, Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 (Slurm's warning) only ask to stop.

    A second Ctrl-C interrupts.

    Args:
      until_seconds: by `time.monotonic`; the time is over then.
    """

    def __init__(self, until_seconds: float | None = None) -> None:
        self.received: signal.Signals | None = None
        self.time_over = False
        self._until_seconds = until_seconds
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread alone
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> int:
        """The number of the signal that asked to stop, `TIME_OVER`, or 0."""
        over = self._until_seconds is not None and time.monotonic() > self._until_seconds
        return self.received or (TIME_OVER if over else 0)

    def agreed(self, asked: int) -> None:
        """All islands stop, for what one of them was asked."""
        self.time_over = asked == TIME_OVER
        self.received = None if self.time_over else signal.Signals(asked)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        # written at once and raw: a handler may interrupt the printing of another line
        text = f"{self.received.name}: stopping after this step; Ctrl-C interrupts without saving\n"
        os.write(2, text.encode())


def run_loop(
    state: State, first_step: int, pieces: Pieces, pace: Pace, stop: StopSignals
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
    state: State, first_step: int, pieces: Pieces, pace: Pace, stop: StopSignals, reached: _Reached
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
        log.add(done, metrics)
        last = done == pace.steps
        # once due it stays so: replicas may not be of one mind before some steps more
        is_due = is_due or last or due(pieces.policy, done, time.monotonic() - saved_seconds)
        mine = Wish(stop.asked(), is_due, pieces.checkpoints.latest(), log.fault.step if log.fault else 0)
        stop_now, save_now, saved, bad = pieces.agree(done, mine)
        pieces.checkpoints.confirm(saved)
        if bad:
            raise log.fault or RollBack(bad, f"step {bad} was bad on another island")
        if pieces.check and (save_now or done % (pace.check_every or 1) == 0):
            with marks.at("comparing copies", waits=True):
                pieces.check(done, state)
        evaluates = last or (pace.evaluate_every is not None and done % pace.evaluate_every == 0)
        # before the evaluation, which may fail or be cut short
        if save_now:
            # a run that goes on from this step does not do it again
            log.catch_up(but_newest=evaluates)
        # what ends without a single update is not saved: the same command shall begin again
        if save_now and not (last and not pieces.anywhere(log.trained)):
            saved_seconds, is_due = time.monotonic(), False
            with marks.at("saving", long=True):
                state = pieces.before_save(state)
                _save(pieces, pace, done, state, reached.position)
        if evaluates:
            with marks.at("the evaluation", waits=True, long=True):
                log.evaluated(pieces.evaluate, state)
        if stop_now:
            stop.agreed(stop_now)
            break
    log.finish()
    if done > first_step and not pieces.anywhere(log.trained):
        text = f"every step was skipped, so nothing was learned: {log.why_skipped}"
        if done == pace.steps:
            raise FloatingPointError(text)
        pieces.progress.note(f"WARNING: {text}")
    if (pace.spikes or pace.nonfinite == "roll_back") and pieces.anywhere(log.fault is not None):
        raise log.fault or RollBack(done, f"a step up to {done} was bad on another island")
    if done > first_step:
        with marks.at("saving the last step", long=True):
            _wait(pieces)
            unsaved = pieces.checkpoints.latest() != done
            if pieces.anywhere(unsaved):
                state = pieces.before_save(state)
            if unsaved:
                _save(pieces, pace, done, state, reached.position, must=True)
                pieces.checkpoints.wait()
    return state, done


def _wait(pieces: Pieces) -> None:
    try:
        pieces.checkpoints.wait()
    except SaveFailed as failure:
        pieces.progress.note(f"WARNING: {failure}")


def _save(pieces: Pieces, pace: Pace, step: int, state: State, position: Any, *, must: bool = False) -> None:
    """Save, or say why not: a run goes on without a checkpoint that could not be written.

    Raises:
      FloatingPointError, RollBack: a parameter is not finite. An optimizer that divides by zero makes it
        so from a finite gradient, and every later step is skipped: such a state must not take a good one's
        place.
    """
    # a stage sees its own alone
    if pieces.anywhere(not _all_finite(state.params)):
        text = (
            f"parameters are not finite after step {step}, and gradients were: the optimizer made them so;"
            f" nothing was saved since step {pieces.checkpoints.latest()}"
        )
        raise RollBack(step, text) if pace.nonfinite == "roll_back" else FloatingPointError(text)
    _wait(pieces)
    try:
        pieces.checkpoints.save(step, state, {**pieces.extra, "position": position})
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

    def __init__(self, pieces: Pieces, pace: Pace) -> None:
        self._pieces, self._pace = pieces, pace
        self._pending: deque[tuple[int, Metrics]] = deque()
        self._means: dict[str, Mean] = {}
        self._rate = Rate()
        self._skipped = 0
        self.trained, self.why_skipped = False, ""
        self.fault: RollBack | None = None

    def add(self, step: int, metrics: Metrics) -> None:
        self._pending.append((step, metrics))
        while len(self._pending) > STEPS_LATE:
            self._read()

    def catch_up(self, *, but_newest: bool) -> None:
        """Read and write what is under way."""
        while len(self._pending) > but_newest:
            self._read()

    def evaluated(self, evaluate: Callable[[State], dict[str, float]], state: State) -> None:
        """Everything up to the newest step, which gets the held-out values too."""
        self.catch_up(but_newest=True)
        began = time.monotonic()
        heldout = evaluate(state)
        self._rate = self._rate.paused(time.monotonic() - began)
        self._read(heldout)

    def finish(self) -> None:
        while self._pending:
            self._read(always=len(self._pending) == 1)

    def _read(self, heldout: Mapping[str, float] | None = None, *, always: bool = False) -> None:
        step, metrics = self._pending.popleft()
        with self._pieces.marks.at(f"the metrics of step {step}", waits=True):
            values = jax.device_get(metrics)
        pace, progress = self._pace, self._pieces.progress
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
        if heldout is None and step % pace.log_every and not always:
            return
        line = {f"train/{name}": mean.value for name, mean in self._means.items() if mean.value is not None}
        line |= _plain(values, self._pieces.labels)
        line |= {"skipped": float(skipped), **(heldout or {})}
        if self._rate.per_second is not None:
            line[f"{pace.unit}_per_second"] = self._rate.per_second
        self._pieces.sink.write(step, line)
        progress.update(step, line)
        self._means = {}

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
