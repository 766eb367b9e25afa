"""Read metrics from the device some steps late, merge them over a window, and write them to the sinks.

Losses that are not finite and loss spikes are detected here, where the host first reads them. Next:
`loop.py`.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from shardtrain.plan.advice.noise_scale import NO_NOISE, GradientNoise
from shardtrain.report.metrics import Mean, Rate
from shardtrain.report.sinks.sink import Sink
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics
from shardtrain.trainer.recovery import RollBack, Spikes
from shardtrain.trainer.session import Session
from shardtrain.trainer.usage import measure_peak_memory

MOST_SKIPPED = 100
"""Consecutive skipped steps after which a run ends, because it will not recover."""

STEPS_LATE = 2
"""Number of steps in progress after which the host reads the metrics of the first."""


class MetricLog:
    """Reads the metrics of steps, merges them until the next line is due, and writes it.

    Args:
      session: the objects that the loop uses.
      sink: receives the lines.
      explain: step -> why the data of this step gives no finite loss; "" if the reason is unknown.

    Attributes:
      trained: whether a step updated the parameters.
      why_skipped: why the first skipped step was skipped.
      fault: a bad step, after which all islands roll back at their next vote; or None.
      unlogged: metrics of a step that wait for its evaluation.
    """

    def __init__(self, session: Session, sink: Sink, explain: Callable[[int], str]) -> None:
        self._session, self._prepared, self._run = session, session.prepared, session.prepared.run
        self._sink, self._explain = sink, explain
        recovery, on_deltas = self._run.recovery, self._run.strategy.synchronisation.on_deltas
        self._spikes = None if recovery.spike is None else Spikes(recovery.spike, recovery.window)
        # with deltas each replica clips its own gradient, and the metric is the mean of their norms
        self._clip: float | None = None if on_deltas else getattr(self._run.optimizer, "clip", None)
        self._pending: deque[tuple[int, Metrics, float]] = deque()
        self._means: dict[str, Mean] = {}
        self._rate, self._updates, self._at_peak, self._clipped = Rate(), Rate(), Rate(), Mean()
        self._noise = NO_NOISE
        self._num_skipped = 0
        self.trained, self.why_skipped = False, ""
        self.fault: RollBack | None = None
        self.unlogged: dict[str, float] | None = None

    def add(self, step: int, metrics: Metrics) -> None:
        """Add the metrics of a step that may still be computing, and read those of earlier steps."""
        # copy them while later steps are started; on a CPU there is nothing to copy
        if jax.default_backend() != "cpu":
            for x in jax.tree.leaves(metrics):
                if isinstance(x, jax.Array):
                    x.copy_to_host_async()
        self._pending.append((step, metrics, self._prepared.seconds_at_peak()))
        while len(self._pending) > STEPS_LATE:
            self._read()

    def catch_up(self, *, keep_newest: bool) -> None:
        """Read and write all pending metrics.

        Args:
          keep_newest: keep the line of the newest step in `unlogged` for its evaluation.
        """
        while len(self._pending) > keep_newest:
            self._read()
        if keep_newest:
            self._unlogged_step = self._pending[0][0]
            self._read(keep=True)

    def evaluate(self, evaluate: Callable[[State], dict[str, float]], state: State) -> None:
        """Evaluate the newest step, and write its line with the held-out values."""
        start_seconds = time.monotonic()
        heldout = evaluate(state)
        seconds = time.monotonic() - start_seconds
        for rate in (self._rate, self._updates, self._at_peak):
            rate.pause(seconds)
        assert self.unlogged is not None
        self._write(self._unlogged_step, {**self.unlogged, **heldout})
        self._session.hooks.evaluation(self._unlogged_step, heldout)
        self.unlogged = None

    def finish(self) -> None:
        """Read and write the remaining metrics; the last step is always written."""
        while self._pending:
            self._read(always=len(self._pending) == 1)

    def _read(self, *, always: bool = False, keep: bool = False) -> None:
        step, metrics, seconds_at_peak = self._pending.popleft()
        with self._session.activity.at(f"the metrics of step {step}", waits=True, kind="step"):
            values = jax.tree.map(np.asarray, metrics)
        count = float(values.pop("count"))
        skipped = bool(values.pop("skipped"))
        # a step that only fills a pipeline has no gradient
        updated = not skipped and "grad_norm" in values
        loss = Mean(sum=float(values.pop("loss_sum")), count=count)
        now_seconds = time.monotonic()
        self._rate.add(now_seconds=now_seconds, units=count)
        self._updates.add(now_seconds=now_seconds, units=updated)
        self._at_peak.add(now_seconds=now_seconds, units=seconds_at_peak)
        # sums over many steps of all islands leave skipped ones out, so they count whatever this step was
        of_many = "skipped_by_islands" in values
        if skipped:
            self._handle_skipped(step, loss.value, values, of_many)
        elif updated:
            self._num_skipped, self.trained = 0, True
            if self._spikes is not None and loss.value is not None:
                limit = self._spikes.limit()
                if self._spikes.add(loss.value):
                    text = f"the loss of step {step} is {loss.value:.4f}, above {limit:.4f}: a spike"
                    self.fault = self.fault or RollBack(step, text)
            # whether its gradient was clipped, as `optax.clip_by_global_norm` decides
            clipped = None if self._clip is None else float(values["grad_norm"]) >= self._clip
            if clipped is not None:
                self._clipped += Mean(sum=clipped, count=1)
            self._session.totals.updated(clipped)
        if of_many or not skipped:
            self._merge(loss, values)
        if step % self._run.log_every and not (always or keep):
            return
        line = self._line(values, skipped)
        if keep:
            self.unlogged = line
        else:
            self._write(step, line)

    def _merge(self, loss: Mean, values: Metrics) -> None:
        """Add a step's sums and counts to those since the last line."""
        pairs = {
            name: Mean(sum=float(value[0]), count=float(value[1]))
            for name, value in values.items()
            if isinstance(value, tuple)
        }
        for name, mean in {"loss": loss, **pairs}.items():
            self._means[name] = self._means.get(name, Mean()) + mean
        square, trace = (pairs.get(f"gradient_{name}", Mean()).value for name in ("square", "trace"))
        if square is not None and trace is not None:
            self._noise = self._noise.smooth(GradientNoise(square, trace))

    def _line(self, values: Metrics, skipped: bool) -> dict[str, float]:
        """Return the line of metrics since the last one, and start the next."""
        line = {f"train/{name}": mean.value for name, mean in self._means.items() if mean.value is not None}
        line |= _plain(values, self._prepared.labels)
        line["skipped"] = float(skipped)
        if self._rate.per_second is not None:
            line[f"{self._run.unit}_per_second"] = self._rate.per_second
            if self._prepared.num_devices > 1:
                per_device = self._rate.per_second / self._prepared.num_devices
                line[f"{self._run.unit}_per_second_per_device"] = per_device
        if self._updates.per_second is not None:
            line["updates_per_second"] = self._updates.per_second
        # seconds of work at the peak in a second; 0 if the peak is not known
        if self._at_peak.per_second:
            line["mfu"] = self._at_peak.per_second
        if self._clipped.value is not None:
            line["clipped"] = self._clipped.value
        # an estimate of the gradient that is not positive yet is useless
        if self._noise.gradient_square > 0:
            line["gradient_noise_scale"] = self._noise.scale
        line["wall_seconds"] = self._session.totals.wall_seconds()
        line |= {**self._session.spent(), "peak_memory_bytes": measure_peak_memory().num_bytes}
        if (num_skipped := self._prepared.num_skipped) is not None:
            line["data_skipped"] = num_skipped
        self._means, self._clipped = {}, Mean()
        return line

    def _write(self, step: int, line: Mapping[str, float]) -> None:
        self._sink.write(step, line)
        self._session.output.update(step, line)
        self._session.hooks.log(step, line)

    def _handle_skipped(self, step: int, loss: float | None, values: Metrics, of_many: bool) -> None:
        self._num_skipped += 1
        if values.get("overflowed", 0) and self._num_skipped < MOST_SKIPPED:
            # a smaller loss scale fixes it: that is no fault of the run
            text = f"step {step} was skipped: gradients in float16 overflowed at their loss scale, now halved"
            self.why_skipped = self.why_skipped or text
            self._session.output.note(text)
            return
        found = f"loss {loss}, gradient norm {float(values['grad_norm'])}"
        text = f"step {step} was skipped: {'loss or gradient norm' if of_many else found} not finite"
        # only the first skipped step in a row is explained, because that loads its batch again
        if self._num_skipped == 1 and (why := self._explain(step)):
            text = f"{text}; {why}"
        self.why_skipped = self.why_skipped or text
        if self._num_skipped >= MOST_SKIPPED:
            raise FloatingPointError(
                f"{text}; these were {MOST_SKIPPED} steps in a row, so the run ends. The first of all:"
                f" {self.why_skipped}"
            )
        if self._run.nonfinite == "roll_back":
            self.fault = self.fault or RollBack(step, f"{text}; nonfinite is 'roll_back'")
            return
        if self._run.nonfinite == "stop":
            raise FloatingPointError(f"{text}; nonfinite is 'stop', and nothing of this step was kept")
        self._session.output.note(f"WARNING: {text}")


def _plain(values: Metrics, labels: Sequence[str]) -> dict[str, float]:
    """Return the metrics that are no sums; an array gives its mean, and each entry by its label."""
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
