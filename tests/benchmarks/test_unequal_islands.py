"""The arithmetic of the benchmark of unequal islands; what it runs is tests/cli/test_islands.py's."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("unequal_islands")


def test_a_run_that_was_stopped_early_gives_no_figures(benchmark):
    assert benchmark.cut_off("auto", 80, 80) is None
    wanted = "the run with shares auto was stopped after step 41 of 80, so nothing was measured"
    assert benchmark.cut_off("auto", 41, 80) == wanted


def test_ratios_are_of_runs_next_to_each_other_and_the_ideal_is_what_all_compute_together(benchmark):
    result = benchmark.Result
    # 16 rows a second and 8, which take 16 / 8 seconds with equal shares; the ideal is 32 / 24
    equal = result(2.0, 24.0, [16, 16], [], 2.5)
    text = benchmark.table(
        benchmark.Options(),
        {benchmark.EQUAL: [equal] * 2, benchmark.AUTO: [result(1.4, 25.6, [21, 11], [10], 2.5), equal]},
    )
    assert "| --shares auto | 1.4000 | 21, 11 | 10 | 2.50000 |" in text
    assert "equal shares / auto: 1.21 (1.43, 1.00)" in text
    assert "auto / ideal: 1.27 (1.05, 1.50)" in text
    assert "auto / ideal of the same run: 1.31 (1.12, 1.50)" in text
    # the best of two fixed splits takes 1.4 seconds, which is 1.05 of the ideal: no shares do better
    fixed = {
        "rows 20,12": [result(1.5, 24.0, [20, 12], [], 2.5)],
        "rows 21,11": [result(1.4, 24.0, [21, 11], [], 2.5)],
    }
    found = {benchmark.EQUAL: [equal], benchmark.AUTO: [result(1.4, 24.0, [21, 11], [10], 2.5)], **fixed}
    text = benchmark.table(benchmark.Options(), found)
    assert "| rows 20,12 | 1.5000 | 20, 12 |  | 2.50000 |" in text
    assert "auto / best of the fixed splits (rows 21,11): 1.00 (1.00)" in text
    assert "best of the fixed splits / ideal: 1.05 (1.05)" in text
