"""The benchmark of virtual workers: its models are the published ones; its table says what was predicted."""

import argparse
import doctest
import importlib
from pathlib import Path

import pytest

OPTIONS = argparse.Namespace(efficiency=0.5, microbatches=4, rows=32, recompute=False)


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("unequal_pipelines")


def test_parameters_and_products_of_the_models_are_the_published_ones(benchmark):
    assert doctest.testmod(benchmark) == (0, 5)


def test_the_table_has_every_policy_and_search_is_none_of_them_worse(benchmark, monkeypatch):
    layers = benchmark.vgg19()[6:12]
    monkeypatch.setitem(benchmark.MODELS, "VGG-19", lambda: layers)
    found = benchmark.allocations("VGG-19", OPTIONS)
    policies = [each for name, each in found.items() if "search" not in name]
    assert len(policies) == 3
    assert all(found["search"].rows_per_second >= each.rows_per_second for each in policies)
    assert all(
        found["search, equal rows"].equal_rows_per_second >= each.equal_rows_per_second for each in policies
    )
    text = benchmark.table(found, benchmark.pool(0.5))
    assert "| node partition | 1 x V" in text
    assert f" | {found['search'].rows_per_second:.0f} | " in text
    assert "| does not fit |" not in text
    assert "| tiny | does not fit |" in benchmark.table({"tiny": None}, benchmark.pool(0.5))
