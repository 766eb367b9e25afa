"""Steps that were measured on a GPU are predicted with one set of constants."""

import pytest


def test_predictions_are_near_what_was_measured(script):
    benchmark = script("gpu_predicted")
    for step in benchmark.STEPS:
        found = benchmark.predicted(step)
        if step.ms is not None:
            assert 1e3 * found.seconds.total == pytest.approx(step.ms, rel=0.1)
        if step.memory_gib is not None:
            assert found.memory.total / 2**30 == pytest.approx(step.memory_gib, rel=0.1)
