"""The training loop: step, vote, save, evaluate and stop, in this order on the host.

Metrics are read some steps late (`metric_log.py`), so that the device never waits for the host. The objects
that the loop uses are in `session.py`.
"""

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain.checkpoints.policy import is_due
from shardtrain.checkpoints.save import SaveFailed
from shardtrain.checks.first_batch import find_class_problems
from shardtrain.imported import select_kept_tokens
from shardtrain.report.sinks.json_lines import strict
from shardtrain.report.sinks.sink import Sink
from shardtrain.system.stop_signals import StopSignals
from shardtrain.train_step.state import State
from shardtrain.trainer.coordination import StepVote
from shardtrain.trainer.elastic_run import IslandEnded
from shardtrain.trainer.evaluation import round_evaluation_interval
from shardtrain.trainer.metric_log import MetricLog
from shardtrain.trainer.recovery import RollBack
from shardtrain.trainer.resume import StartPoint
from shardtrain.trainer.run_checkpoints import UNLOGGED, WALL_SECONDS
from shardtrain.trainer.session import Session
from shardtrain.trainer.strategy import strategy_text
from shardtrain.trainer.synchronisation import synchronise


def run_loop(
    session: Session, start: StartPoint, last_step: int, sink: Sink, stop: StopSignals
) -> tuple[State, int]:
    """Train from a start point to a step, or until a signal asks to stop.

    Args:
      session: the objects that the loop uses.
      start: the state, which is donated, and the position in the data, from which batches are being read.
      last_step: the number of steps done at the end.
      sink: receives the metrics.
      stop: asked after every step.

    Returns:
      The last state, saved, and the number of steps done.

    Raises:
      FloatingPointError: a loss or gradient is not finite, and `Run.nonfinite` is "stop"; or every step
        was skipped.
      RollBack: a step was bad; it carries the data position after all batches that were read.
      SaveFailed: the last save failed. Earlier failures are reported to `output`, and training continues.
    """
    loop = _Loop(session, start, last_step, sink, stop)
    try:
        loop.train()
        loop.finish()
    except RollBack as fault:
        fault.position = loop.position
        raise
    return loop.state, loop.done


class _Loop:
    """One segment of a run: from a start point to the last step, or to a rollback."""

    def __init__(
        self, session: Session, start: StartPoint, last_step: int, sink: Sink, stop: StopSignals
    ) -> None:
        self.session, self.stop, self.last_step = session, stop, last_step
        self.prepared, self.run = session.prepared, session.prepared.run
        self.checkpoints = session.checkpoints
        self.state, self.first_step, self.done = start.state, start.step, start.step
        self.position: Any = None
        self.extra = {"run": self.prepared.description, "strategy": strategy_text(self.run.strategy)}
        kind = type(self.run.model)
        self.extra |= {"model": f"{kind.__module__}:{kind.__qualname__}", **select_kept_tokens(start.extra)}
        self.log = MetricLog(session, sink, self._explain)
        self.saved_seconds, self.save_is_due = time.monotonic(), False
        self.check_is_due = False
        self.saving: int | None = None
        if self.prepared.elastic is not None:
            self.prepared.elastic.save_state = self._save_written
            self.prepared.elastic.save_if_best = self._save_if_best
            # the steps that this island watched before it joined, with the evaluation of the last one
            watched = self.prepared.elastic.watched
            for step, metrics in watched:
                self.log.add(step, metrics)
            evaluates = bool(watched) and self._is_evaluated()
            self.log.catch_up(keep_newest=evaluates)
            if evaluates:
                self._evaluate_newest()
                self._save_if_best()

    def _is_evaluated(self) -> bool:
        every = round_evaluation_interval(self.run)
        return self.done == self.last_step or (every is not None and self.done % every == 0)

    def train(self) -> None:
        """Train until the last step is done or all islands have voted to stop."""
        while self.done < self.last_step:
            try:
                self._step()
            except IslandEnded:
                elastic = self.prepared.elastic
                if elastic is None or not elastic.outcome:
                    raise
                break
            result = self._vote()
            is_last = self.done == self.last_step
            evaluates = self._is_evaluated()
            # A run that resumes from a saved step does not repeat it, so its metrics must be written by now,
            # or be saved with it where they wait for the evaluation.
            # An island that joins gets a state of which all lines must be written, as it has none of them.
            if result.save or evaluates or self.prepared.elastic is not None:
                self.log.catch_up(keep_newest=evaluates)
            # Save before the evaluation, which may fail or be interrupted. A run that ends without a single
            # update is not saved: the same command must start again from the beginning.
            never_trained = is_last and not self.first_step
            if result.save and not (never_trained and not self._has_any_step_trained()):
                self._save_and_continue()
            if evaluates:
                self._evaluate_newest()
                self._save_if_best()
            if result.stop:
                self.stop.record_agreement(result.stop)
                break

    def _step(self) -> None:
        """Read a batch and do a step; its metrics are read later."""
        session, feed = self.session, self.prepared.feed
        session.activity.begin_step(self.done + 1)
        self.prepared.coordination.timer.begin()
        with session.activity.at("reading a batch", kind="input"):
            batch, self.position = next(feed)
        # the first step is compiled, which may take long, and one whose rows have changed
        is_compiled = feed.take_change() or self.done == self.first_step
        with session.activity.at("the step", waits=True, long=is_compiled, kind="step"):
            self.state, metrics = session.step(self.state, batch)
        self.done += 1
        self.stop.can_save = True
        # the device still computes the step: a hook waits for nothing
        session.hooks.step(self.done)
        self.log.add(self.done, metrics)

    def _vote(self) -> StepVote:
        """Agree with all islands whether to save, stop or roll back; check the copies of the state if due.

        Raises:
          RollBack: a step was bad on any island, or copies of the state differ.
        """
        session, done = self.session, self.done
        # A save that is due stays due: with local steps the islands vote only every few steps.
        self.save_is_due = (
            self.save_is_due
            or done == self.last_step
            or is_due(self.run.checkpoints, done, time.monotonic() - self.saved_seconds)
        )
        bad = self.log.fault.step if self.log.fault else 0
        own = StepVote(self.stop.asked(), self.save_is_due, self.checkpoints.latest(), bad)
        result = self._exchange_votes(own)
        self.checkpoints.confirm(result.saved)
        self._report_save(result.saved)
        if result.bad:
            # all roll back before the same step, the first bad one of any island
            own = self.log.fault if bad == result.bad else None
            raise own or RollBack(result.bad, f"step {result.bad} was bad on another island")
        # copies are compared at barriers: between merges they differ
        self.check_is_due |= done % (self.run.recovery.fingerprint_every or 1) == 0
        if session.check and result.at_barrier and (result.save or self.check_is_due):
            self.check_is_due = False
            with session.untimed(), session.activity.at("comparing copies", waits=True):
                session.check(done, self.state)
        return result

    def _exchange_votes(self, own: StepVote) -> StepVote:
        """Return the vote of all ranks at a barrier; report slow islands, or give them fewer rows."""
        prepared, note = self.prepared, self.session.output.note
        barriers, coordination, shares, feed = (
            prepared.barriers, prepared.coordination, prepared.shares, prepared.feed,
        )  # fmt: skip
        at_barrier = barriers.is_due(self.done)
        # a replay saves only where the earlier run had a barrier too, as planned
        wants_save = own.save and coordination.is_first and self.run.replay is None
        barriers.is_requested = bool(own.stop or own.bad or wants_save) and not at_barrier
        voted = coordination.vote(self.done, own, at_barrier=at_barrier)
        changed = voted.seconds and shares.add(voted.seconds, feed.num_rows, voted.rest_seconds)
        if changed:
            feed.change(shares.shards())
            if coordination.stragglers is not None:
                coordination.stragglers.restart()
            note(f"after step {self.done}: {changed}")
        elif voted.slow is not None:
            note(f"WARNING: {voted.slow}")
        return voted.vote

    def _save_written(self) -> None:
        """Save the newest step, unless that is done or nothing was ever trained, with its metrics written."""
        self.log.catch_up(keep_newest=False)
        if self.saving == self.done or not (self.first_step or self.log.trained):
            return
        self._save_and_continue()

    def _save_and_continue(self) -> None:
        self.saved_seconds, self.save_is_due = time.monotonic(), False
        with self.session.untimed(), self.session.activity.at("saving", long=True, kind="save"):
            self._synchronise()
            self._save(self.log.unlogged)

    def _evaluate_newest(self) -> None:
        with self.session.untimed(), _evaluating(self.session):
            self.log.evaluate(self._evaluate, self.state)

    def _evaluate(self, state: State) -> dict[str, float]:
        """Evaluate a step, and record its values before its line is written."""
        heldout = self.session.evaluate(state)
        self.checkpoints.evaluated(self.done, heldout)
        return heldout

    def _save_if_best(self) -> None:
        """Save a step that is not saved yet, if its evaluation is better than those of all saved steps."""
        # a last step that is not saved by now was never trained, or islands that come and go save it soon
        if self.run.checkpoints.best is None or self.done in (self.saving, self.last_step):
            return
        elastic = self.prepared.elastic
        is_better = self.checkpoints.is_best(self.done) and (elastic is None or elastic.may_save())
        if self._any_rank("a better evaluation", is_better):
            if elastic is None:
                self._save_and_continue()
            else:
                elastic.save_arrays()

    def finish(self) -> None:
        """Write the last metrics, check the segment for faults, and save its last step.

        Raises:
          FloatingPointError: every step of the run was skipped.
          RollBack: one of the last steps was bad.
          SaveFailed: the last step could not be saved.
        """
        log, recovers = self.log, self.run.recovery.spike or self.run.nonfinite == "roll_back"
        log.finish()
        elastic = self.prepared.elastic
        if elastic is not None:
            self.state = elastic.finish()
        if recovers and self._any_rank("a bad step", log.fault is not None):
            raise log.fault or RollBack(self.done, f"a step up to {self.done} was bad on another island")
        # nothing was trained, so there is nothing to judge or to save
        if self.done == self.first_step:
            return
        if not self._has_any_step_trained():
            if self.done == self.last_step and not self.first_step:
                raise FloatingPointError(f"every step was skipped, so nothing was learned: {log.why_skipped}")
            self.session.output.note(
                f"WARNING: every step from {self.first_step + 1} was skipped: {log.why_skipped}"
            )
        # save the last step unless that is done; all ranks take part in synchronising the state before
        with self.session.activity.at("saving the last step", long=True, kind="save"):
            self.checkpoints.settle()
            unsaved = self.checkpoints.latest() != self.done and (elastic is None or elastic.may_save())
            # those that have saved it take part, also while another elastic island takes over
            if self._any_rank("the last step is not saved", unsaved):
                self._synchronise()
                self._save(must=True)
                self.checkpoints.wait()
            self._report_awaited_save()

    def _has_any_step_trained(self) -> bool:
        return self._any_rank("a step that was not skipped", self.log.trained)

    def _save(self, unlogged: Mapping[str, float] | None = None, *, must: bool = False) -> None:
        """Save, or report why not: a run continues without a checkpoint that could not be written.

        Args:
          unlogged: metrics of the step that wait for its evaluation, see `finish_evaluation`.
          must: raise if the save fails.

        Raises:
          FloatingPointError, RollBack: a parameter is not finite, as after an optimizer that divides by zero.
            Every later step is skipped, so such a state must not replace a good one.
        """
        step = self.done
        # a pipeline stage sees only its own parameters, so all ranks vote
        if self._any_rank("parameters are not finite", not _all_finite(self.state.params)):
            text = (
                f"parameters are not finite after step {step} although gradients were: the optimizer"
                f" computed them; nothing was saved since step {self.checkpoints.latest()}"
            )
            raise RollBack(step, text) if self.run.nonfinite == "roll_back" else FloatingPointError(text)
        self.checkpoints.settle()
        self._report_awaited_save()
        if self.checkpoints.latest() == step:
            return  # the save of another island's part failed
        self.saving = step
        extra = {**self.extra, **self.prepared.shares.saved(), "position": self.position}
        if self.prepared.elastic is not None:
            extra |= self.prepared.elastic.saved()
        extra[WALL_SECONDS] = self.session.totals.wall_seconds()
        if unlogged is not None:
            extra[UNLOGGED] = {name: strict(value) for name, value in unlogged.items()}
        try:
            self.checkpoints.save(step, self.state, extra)
            self.session.output.note(f"saving step {step}")
        except SaveFailed as failure:
            if must:
                raise
            self.session.output.note(f"WARNING: {failure}")

    def _report_awaited_save(self) -> None:
        """Call the hooks for the save that this rank has waited for, if it failed on no rank."""
        if self.session.hooks.has_save and self.saving is not None:
            latest = self.checkpoints.latest()
            if not self._any_rank("a save failed", latest != self.saving):
                self._report_save(latest)

    def _report_save(self, by_all: int | None) -> None:
        """Call the hooks for the newest complete checkpoint, if they were not called for it before.

        Args:
          by_all: the newest step that all ranks have saved; None or -1 if none is known.
        """
        if self.session.hooks.has_save:
            self.session.hooks.save(self.checkpoints.complete(by_all), self.checkpoints.find_folder)

    def _synchronise(self) -> None:
        """Broadcast the common state from island 0 before it is saved, if islands differ."""
        on_deltas, note = self.run.strategy.synchronisation.on_deltas, self.session.output.note
        self.state = synchronise(self.prepared.coordination, self.state, on_deltas, note)

    def _any_rank(self, question: str, answer: bool) -> bool:
        return self.prepared.coordination.any_rank(question, answer)

    def _explain(self, step: int) -> str:
        """Return the problems of this process's rows in the data of a step; "" if there are none."""
        prepared, elastic = self.prepared, self.prepared.elastic
        if elastic is None:
            batches = [prepared.feed.load(step - self.first_step - 1)]
        else:
            batches = elastic.load_batches(step)
        problems = [
            f"batch {number} of {len(batches)}: {problem}" if len(batches) > 1 else problem
            for number, batch in enumerate(batches, 1)
            for problem in find_class_problems(prepared.expected, batch)
        ]
        return "; ".join(problems)


def finish_evaluation(session: Session, start: StartPoint, sink: Sink, *, is_logged: bool) -> None:
    """Repeat an evaluation that an earlier start began after a save but did not finish; write its metrics.

    Args:
      session: the objects that the loop uses.
      start: the checkpoint.
      sink: receives the metrics.
      is_logged: whether the metrics of the step are written, or another process writes them.
    """
    # metrics of the step that were not written because its evaluation did not finish
    step, unlogged = start.step, None if is_logged else start.extra.get(UNLOGGED)
    if not session.prepared.coordination.any_rank("an evaluation was cut short", unlogged is not None):
        return
    with _evaluating(session):
        heldout = session.evaluate(start.state)
        session.checkpoints.evaluated(step, heldout)
    if unlogged is not None:
        line = {name: float(value) for name, value in {**unlogged, **heldout}.items()}
        sink.write(step, line)
        session.output.update(step, line)
        session.hooks.log(step, line)
        session.hooks.evaluation(step, heldout)


def _evaluating(session: Session) -> Any:
    return session.activity.at("the evaluation", waits=True, long=True, kind="evaluation")


@jax.jit
def _all_finite(params: Any) -> jax.Array:
    return jnp.isfinite(optax.tree.norm(params))
