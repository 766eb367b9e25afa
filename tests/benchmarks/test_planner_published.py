"""The comparison with published tables: the figures are copied right, and a prediction of a row is whole."""

import importlib
import math
from pathlib import Path

import pytest


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("planner_published")


# another column of the same tables: teraflops of a device
TERAFLOPS = {
    "DP_8x1x1_16_1536x16": 41.74,
    "MP_1x32x1_16_3072x32": 2.60,
    "2D_PP_2x4x4_512_2304x24": 31.53,
    "14336x72 DP=4 TP=8 PP=12 MBS=4": 130.34,
    "13824x84 DP=8 TP=8 PP=6 MBS=4": 134.11,
}


def test_rows_are_those_of_the_tables(published):
    """Seconds and sizes give the flops a second that the tables have too; microbatches fill the batch."""
    found = {}
    for source in published.SOURCES.values():
        names = [row.name for row in source.rows]
        assert len(set(names)) == len(names)
        assert {source.probe, source.link_probe} <= {*names, ""}
        for row in source.rows:
            replicas = row.mesh.get("data", 1) * row.mesh.get("fsdp", 1)
            assert row.accumulate * replicas * row.microbatch == row.batch
            if row.seconds:
                found[row.name] = published.flops(row, source.vocab) / row.devices / row.seconds / 1e12
    assert {name: found[name] for name in TERAFLOPS} == pytest.approx(TERAFLOPS, rel=0.01)


def test_correlation_and_regret(published):
    assert published.spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert published.spearman([3, 2, 1], [1, 2, 3]) == pytest.approx(-1)
    rows = published.SOURCES["oneflow"].rows
    groups = [row.group for row in rows]
    measured = [1.0 + i for i in range(len(rows))]
    best = groups.index("1.5B, 32 GPUs")
    predicted = [-each for each in measured]  # picks the slowest
    found = published.regrets(rows, measured, predicted)
    last = len(groups) - 1 - groups[::-1].index("1.5B, 32 GPUs")
    assert found["1.5B, 32 GPUs"] == pytest.approx(measured[last] / measured[best] - 1)
    # of two ways one is refused: nothing is left to pick
    alone = [math.nan if group == "1.5B, 32 GPUs" and i > best else 1.0 for i, group in enumerate(groups)]
    assert "1.5B, 32 GPUs" not in published.regrets(rows, measured, alone)


def test_a_row_is_predicted_by_the_planner(published):
    """More tensor parallelism over the slow links between nodes is slower, as in the table."""
    source = published.SOURCES["oneflow"]
    rows = [row for row in source.rows if row.name in ("2D_PP_2x4x4_512_2304x24", "MP_PP_1x8x4_512_2304x24")]
    machine = published.machine_of(source.device, 32, in_float32=False)
    seconds = published.predicted_seconds(published.replace(source, rows=tuple(rows)), machine)
    assert seconds[0] > seconds[1] > 0
    faster = published.predicted_seconds(
        published.replace(source, rows=tuple(rows)), published.with_factor(machine, 1.0, "rate")
    )
    assert faster[1] < seconds[1]
