"""What becomes of the metrics of steps between the device and the line."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.trainer.metric_log import MOST_SKIPPED, MetricLog
from shardtrain.trainer.recovery import Recovery
from shardtrain.trainer.strategy import Strategy


def make_log():
    """A log, the losses that it writes in every second step, and its notes."""
    lines, notes = {}, []
    run = SimpleNamespace(
        log_every=2,
        unit="tokens",
        nonfinite="skip",
        recovery=Recovery(),
        strategy=Strategy(),
        optimizer=None,
    )
    prepared = SimpleNamespace(
        run=run, labels=(), num_devices=1, num_skipped=None, seconds_at_peak=lambda: 0.0
    )
    session: Any = SimpleNamespace(
        prepared=prepared,
        activity=ActivityRecord(),
        output=SimpleNamespace(update=lambda step, line: None, note=notes.append),
        hooks=SimpleNamespace(log=lambda step, line: None),
        totals=SimpleNamespace(updated=lambda clipped: None, wall_seconds=lambda: 0.0),
        spent=dict,
    )
    sink: Any = SimpleNamespace(write=lambda step, line: lines.update({step: line.get("train/loss")}))
    return MetricLog(session, sink, lambda step: ""), lines, notes


def lines_of(steps):
    """The losses by step, and the notes."""
    log, lines, notes = make_log()
    for step, metrics in enumerate(steps, start=1):
        log.add(step, {"grad_norm": 1.0, "skipped": 0.0, **metrics})
    log.finish()
    return lines, notes


def test_sums_of_many_steps_count_although_the_step_that_brings_them_was_skipped():
    none = {"loss_sum": 0.0, "count": 0.0}
    merged = {"loss_sum": 12.0, "count": 4.0, "skipped": 1.0, "skipped_by_islands": 1.0}
    lines, (note,) = lines_of([none, merged])
    assert lines == {2: 3.0}
    assert note == "WARNING: step 2 was skipped: loss or gradient norm not finite"


def test_a_skipped_step_of_its_own_does_not_count():
    plain = {"loss_sum": 4.0, "count": 2.0}
    bad = {"loss_sum": math.nan, "count": 2.0, "grad_norm": math.nan, "skipped": 1.0}
    lines, (note,) = lines_of([plain, bad])
    assert lines == {2: 2.0}
    assert note == "WARNING: step 2 was skipped: loss nan, gradient norm nan not finite"


def test_a_step_that_only_fills_a_pipeline_updates_nothing():
    log, lines, notes = make_log()
    bad = {"loss_sum": math.nan, "count": 2.0, "grad_norm": math.nan, "skipped": 1.0}
    filling = {"loss_sum": 0.0, "count": 0.0, "skipped": 0.0}
    for step in range(1, 2 * MOST_SKIPPED):
        log.add(step, bad if step % 2 else filling)
    with pytest.raises(FloatingPointError, match=f"these were {MOST_SKIPPED} steps in a row"):
        log.finish()
    assert not log.trained
    assert lines[2] is None
    assert len(notes) == MOST_SKIPPED - 1
