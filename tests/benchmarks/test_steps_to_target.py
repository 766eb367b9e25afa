"""Steps to a target loss, small: runs train, are given up when they diverge, and the best rate is found."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    """The script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("steps_to_target")


@pytest.fixture(scope="module")
def rows(benchmark):
    """One easy setting, two rates, and one that diverges."""
    options = benchmark.Options(settings=("easy",), replicas=(1, 2), most_steps=60, seeds=1, heldout=128)
    easy = replace(
        benchmark.SETTINGS["adam, 16 examples"],
        target=4.0,
        rates=(-6, -5, 10),
        combiners=("mean", "adasum+deltas"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(benchmark.SETTINGS, "easy", easy)
        return benchmark.measure(options)


@pytest.mark.full
def test_every_combiner_is_tried_at_every_rate(rows):
    assert [(row.replicas, row.combiner) for row in rows] == [
        (1, "mean"),
        (2, "mean"),
        (2, "adasum+deltas"),
    ]
    for row in rows:
        assert set(row.steps) == {-6, -5, 10}


@pytest.mark.full
def test_a_run_comes_to_its_target_or_is_given_up(rows):
    for row in rows:
        assert row.steps[10] is None
        assert row.best is not None
        rate, steps = row.best
        assert rate in (-6, -5)
        assert 0 < steps < 60


def test_the_table_sets_each_beside_the_rate_that_was_best_alone(benchmark):
    def row(replicas, combiner, steps):
        return benchmark.Row(setting="s", combiner=combiner, replicas=replicas, steps=steps, seconds=1.0)

    rows = [
        row(1, "mean", {0: 90.0, 1: None}),
        row(2, "mean", {0: 50.0, 1: 30.0}),
        row(2, "adasum", {0: 20.0}),
    ]
    assert benchmark.report(rows).splitlines()[2:] == [
        "| s | 1 |  | 90 | 2^0 | 90 | 90 |",
        "| s | 2 | mean | 30 | 2^1 | 50 | 30 |",
        "| s | 2 | adasum | 20 | 2^0 | 20 |  |",
    ]
