"""The table of the benchmark of islands that differ; tests/trainer/test_mixed_islands.py has the runs."""

import importlib
from pathlib import Path

from shardtrain.trainer.strategy import read_strategy


def test_losses_stand_beside_those_of_float32_and_the_strategies_are_what_the_rows_say(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    benchmark = importlib.import_module("mixed_islands")
    lines = [{"skipped": 1.0}, {"skipped": 0.0, "heldout/loss": 2.0}]
    text = benchmark.table(
        {"float32": lines, "float16": [*lines[:1], {"skipped": 1.0, "heldout/loss": 2.01}]}
    )
    assert "| float32 | 2 | 1 | 2.0000 | 1.0000 |" in text
    assert "| float16 | 2 | 2 | 2.0100 | 1.0050 |" in text
    path = tmp_path / "strategy.toml"
    for name, strategy in benchmark.WAYS.items():
        path.write_text(strategy)
        found = [
            read_strategy(path).of_island(island, "cpu").compute_dtype or "float32" for island in range(3)
        ]
        assert ", ".join(dict.fromkeys(found)) == name
