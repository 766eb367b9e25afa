"""The training loop: step, vote, save, evaluate, stop; ordered effects on the host.

Metrics are read some steps late (`metric_log.py`), so that the device never waits for the host. What the
loop is given is in `loop_parts.py`, and how that is made of a `Run` in `loop_parts.py`.
"""

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain.checkpoints.policy import due
from shardtrain.checkpoints.save import SaveFailed
from shardtrain.report.sinks.json_lines import strict
from shardtrain.system.stop_signals import StopSignals
from shardtrain.train_step.state import State
from shardtrain.trainer.coordination import StepVote
from shardtrain.trainer.loop_parts import LoopOptions, LoopParts
from shardtrain.trainer.metric_log import MetricLog
from shardtrain.trainer.recovery import RollBack
from shardtrain.trainer.run_checkpoints import UNLOGGED, WALL_SECONDS


def run_loop(
    state: State, first_step: int, parts: LoopParts, options: LoopOptions, stop: StopSignals
) -> tuple[State, int]:
    """Train from `first_step` to `options.steps`, or until a signal asks to stop.

    Args:
      state: the state after `first_step` steps; it is donated.
      first_step: steps done so far.
      parts: what to work with.
      options: when to log, evaluate, check and end.
      stop: asked after every step.

    Returns:
      The last state, saved, and the number of steps done.

    Raises:
      FloatingPointError: a loss or gradient is not finite, and `options.nonfinite` is "stop"; or every step
        was skipped.
      RollBack: a step was bad; it carries the data position after all batches that were read.
      SaveFailed: the last save failed. Earlier failures are reported to `progress`, and training continues.
    """
    loop = _Loop(state, first_step, parts, options, stop)
    try:
        loop.train()
        loop.finish()
    except RollBack as fault:
        fault.position = loop.position
        raise
    return loop.state, loop.done


class _Loop:
    """One segment of a run, from its first step to its last, or to a rollback."""

    def __init__(
        self, state: State, first_step: int, parts: LoopParts, options: LoopOptions, stop: StopSignals
    ) -> None:
        self.parts, self.options, self.stop = parts, options, stop
        self.state, self.first_step, self.done = state, first_step, first_step
        self.position: Any = None
        self.log = MetricLog(parts, options)
        self.saved_seconds, self.save_is_due = time.monotonic(), False
        self.check_is_due = False
        self.saving: int | None = None

    def train(self) -> None:
        """Train until the last step is done or all islands have voted to stop."""
        while self.done < self.options.steps:
            self._step()
            result = self._vote()
            is_last = self.done == self.options.steps
            every = self.options.evaluate_every
            evaluates = is_last or (every is not None and self.done % every == 0)
            # A run that resumes from a saved step does not repeat it, so its metrics must be written by now,
            # or be saved with it where they wait for the evaluation.
            if result.save or evaluates:
                self.log.catch_up(keep_newest=evaluates)
            # Save before the evaluation, which may fail or be interrupted. A run that ends without a single
            # update is not saved: the same command must start again from the beginning.
            never_trained = is_last and not self.first_step
            if result.save and not (never_trained and not self._any_step_trained()):
                self._save_and_continue()
            if evaluates:
                evaluating = self.parts.activity.at(
                    "the evaluation", waits=True, long=True, kind="evaluation"
                )
                with self.parts.aside(), evaluating:
                    heldout = self.log.evaluate(self._evaluate, self.state)
                self._save_if_best(heldout)
            if result.stop:
                self.stop.agreed(result.stop)
                break

    def _step(self) -> None:
        """Read a batch and do a step; its metrics are read later."""
        parts = self.parts
        parts.activity.begin_step(self.done + 1)
        parts.timer.begin()
        with parts.activity.at("reading a batch", kind="input"):
            batch, self.position = next(parts.batches)
        # the first step is compiled, which may take long, and one whose rows have changed
        is_compiled = parts.recompiles() or self.done == self.first_step
        with parts.activity.at("the step", waits=True, long=is_compiled, kind="step"):
            self.state, metrics = parts.step(self.state, batch)
        self.done += 1
        self.stop.can_save = True
        # the device still computes the step: a hook waits for nothing
        parts.hooks.step(self.done)
        self.log.add(self.done, metrics)

    def _vote(self) -> StepVote:
        """Agree with all islands whether to save, stop or roll back; check the copies of the state if due.

        Raises:
          RollBack: a step was bad on any island, or copies of the state differ.
        """
        parts, done = self.parts, self.done
        # A save that is due stays due: with local steps the islands vote only every few steps.
        self.save_is_due = (
            self.save_is_due
            or done == self.options.steps
            or due(parts.policy, done, time.monotonic() - self.saved_seconds)
        )
        bad = self.log.fault.step if self.log.fault else 0
        own = StepVote(self.stop.asked(), self.save_is_due, parts.checkpoints.latest(), bad)
        result = parts.vote(done, own)
        parts.checkpoints.confirm(result.saved)
        _report_save(parts, result.saved)
        if result.bad:
            # all roll back before the same step, the first bad one of any island
            own = self.log.fault if bad == result.bad else None
            raise own or RollBack(result.bad, f"step {result.bad} was bad on another island")
        # copies are compared where islands meet: between merges they differ
        self.check_is_due |= done % (self.options.check_every or 1) == 0
        if parts.check and result.met and (result.save or self.check_is_due):
            self.check_is_due = False
            with parts.aside(), parts.activity.at("comparing copies", waits=True):
                parts.check(done, self.state)
        return result

    def _save_and_continue(self) -> None:
        self.saved_seconds, self.save_is_due = time.monotonic(), False
        with self.parts.aside(), self.parts.activity.at("saving", long=True, kind="save"):
            self.state = self.parts.before_save(self.state)
            self._save(self.log.unlogged)

    def _evaluate(self, state: State) -> dict[str, float]:
        """Evaluate a step, and record its values before its line is written, if it is saved."""
        heldout = self.parts.evaluate(state)
        if self.saving == self.done:
            self.parts.checkpoints.evaluated(self.done, heldout)
        return heldout

    def _save_if_best(self, heldout: Mapping[str, float]) -> None:
        """Save a step that is not saved yet, if its evaluation is better than those of all saved steps."""
        parts = self.parts
        # a last step that is not saved by now was never trained
        if parts.policy.best is None or self.done in (self.saving, self.options.steps):
            return
        if parts.any_rank("a better evaluation", parts.checkpoints.is_best(heldout)):
            self._save_and_continue()
            parts.checkpoints.evaluated(self.done, heldout)

    def finish(self) -> None:
        """Write the last metrics, check the segment for faults, and save its last step.

        Raises:
          FloatingPointError: every step of the run was skipped.
          RollBack: one of the last steps was bad.
          SaveFailed: the last step could not be saved.
        """
        parts, options, log = self.parts, self.options, self.log
        log.finish()
        if (options.spikes or options.nonfinite == "roll_back") and parts.any_rank(
            "a bad step", log.fault is not None
        ):
            raise log.fault or RollBack(self.done, f"a step up to {self.done} was bad on another island")
        # nothing was trained, so there is nothing to judge or to save
        if self.done == self.first_step:
            return
        if not self._any_step_trained():
            if self.done == options.steps and not self.first_step:
                raise FloatingPointError(f"every step was skipped, so nothing was learned: {log.why_skipped}")
            parts.progress.note(
                f"WARNING: every step from {self.first_step + 1} was skipped: {log.why_skipped}"
            )
        # save the last step unless that is done; all ranks take part in synchronising the state before
        with parts.activity.at("saving the last step", long=True, kind="save"):
            _wait(parts)
            unsaved = parts.checkpoints.latest() != self.done
            if parts.any_rank("the last step is not saved", unsaved):
                self.state = parts.before_save(self.state)
            if unsaved:
                self._save(must=True)
                parts.checkpoints.wait()
            self._report_awaited_save()

    def _any_step_trained(self) -> bool:
        return self.parts.any_rank("a step that was not skipped", self.log.trained)

    def _save(self, unlogged: Mapping[str, float] | None = None, *, must: bool = False) -> None:
        """Save, or report why not: a run continues without a checkpoint that could not be written.

        Args:
          unlogged: metrics of the step that wait for its evaluation, see `finish_evaluation`.
          must: raise where the save fails.

        Raises:
          FloatingPointError, RollBack: a parameter is not finite. An optimizer that divides by zero makes it
            so from a finite gradient, and every later step is skipped: such a state must not replace a good
            one.
        """
        parts, step = self.parts, self.done
        # a pipeline stage sees its own parameters alone, so the ranks ask each other
        if parts.any_rank("parameters are not finite", not _all_finite(self.state.params)):
            text = (
                f"parameters are not finite after step {step}, and gradients were: the optimizer made them"
                f" so; nothing was saved since step {parts.checkpoints.latest()}"
            )
            raise RollBack(step, text) if self.options.nonfinite == "roll_back" else FloatingPointError(text)
        _wait(parts)
        self._report_awaited_save()
        self.saving = step
        extra = {**parts.extra, **parts.shares(), "position": self.position}
        extra[WALL_SECONDS] = parts.totals.wall_seconds()
        if unlogged is not None:
            extra[UNLOGGED] = {name: strict(value) for name, value in unlogged.items()}
        try:
            parts.checkpoints.save(step, self.state, extra)
            parts.progress.note(f"saving step {step}")
        except SaveFailed as failure:
            if must:
                raise
            parts.progress.note(f"WARNING: {failure}")

    def _report_awaited_save(self) -> None:
        """Call the hooks for the save that this rank has waited for, if that of no other rank failed."""
        parts = self.parts
        if parts.hooks.has_save and self.saving is not None:
            latest = parts.checkpoints.latest()
            if not parts.any_rank("a save failed", latest != self.saving):
                _report_save(parts, latest)


def finish_evaluation(parts: LoopParts, step: int, state: State, unlogged: Mapping[str, Any] | None) -> None:
    """Repeat the evaluation of a step that was saved but not evaluated to its end, and write its metrics.

    Args:
      parts: the parts of the loop.
      step: the step of the checkpoint.
      state: the state of the checkpoint.
      unlogged: the metrics in the checkpoint, if they are missing in the sink; None on islands that do not
        write metrics.
    """
    if not parts.any_rank("an evaluation was cut short", unlogged is not None):
        return
    with parts.activity.at("the evaluation", waits=True, long=True, kind="evaluation"):
        heldout = parts.evaluate(state)
        parts.checkpoints.evaluated(step, heldout)
    if unlogged is not None:
        line = {name: float(value) for name, value in {**unlogged, **heldout}.items()}
        parts.sink.write(step, line)
        parts.progress.update(step, line)
        parts.hooks.log(step, line)
        parts.hooks.evaluation(step, heldout)


def _wait(parts: LoopParts) -> None:
    """Wait for the save under way, and report if it failed."""
    try:
        parts.checkpoints.wait()
    except SaveFailed as failure:
        parts.progress.note(f"WARNING: {failure}")


def _report_save(parts: LoopParts, by_all: int | None) -> None:
    """Call the hooks for the newest complete checkpoint, if they were not called for it before.

    Args:
      parts: the parts of the loop.
      by_all: the newest step that all ranks have saved; None or -1: none is known.
    """
    if parts.hooks.has_save:
        parts.hooks.save(parts.checkpoints.complete(by_all), parts.checkpoints.folder_of)


@jax.jit
def _all_finite(params: Any) -> jax.Array:
    return jnp.isfinite(optax.tree.norm(params))
