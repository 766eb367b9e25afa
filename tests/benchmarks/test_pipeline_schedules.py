"""The benchmark of schedules, run as people run it, small. Nothing here looks at a time it took."""

import json
from pathlib import Path

import pytest

from shardtrain.pipeline.schedule import SCHEDULES, allowed_chunks, make_table

FOLDER = Path(__file__).parents[2] / "benchmarks"
SIZES = {"microbatches": 3, "embed": 16, "num-layers": 4, "seq": 8, "vocab": 16, "rows": 1, "rounds": 2}
CHUNKS = {name: allowed_chunks(name)[0] for name in SCHEDULES}


@pytest.fixture(scope="module")
def output(mpiexec, tmp_path_factory):
    """What it prints, and its figures."""
    path = tmp_path_factory.mktemp("figures") / "figures.json"
    arguments = [word for name, value in SIZES.items() for word in (f"--{name}", value)]
    texts = mpiexec(2, FOLDER / "pipeline_schedules.py", "--json", path, *arguments)
    return texts, json.loads(path.read_text())


@pytest.mark.full
def test_every_schedule_is_simulated_and_measured(output):
    _, figures = output
    assert [row["schedule"] for row in figures["rows"]] == list(SCHEDULES)
    for row in figures["rows"]:
        assert 0 < row["work_seconds"] <= row["all_work_seconds"] <= 2 * row["work_seconds"]
        # no stage can be faster than its work, nor is a bubble anything but the rest
        assert row["work_seconds"] <= row["simulated_seconds"]
        waits = 1 - row["all_work_seconds"] / (2 * row["simulated_seconds"])
        assert row["bubble"] == pytest.approx(waits)
        assert row["in_company_seconds"] > 0
        measured, ratio = row["measured_seconds"], row["ratio"]
        assert 0 < measured["low"] <= measured["median"] <= measured["high"]
        assert ratio["median"] == pytest.approx(measured["median"] / row["simulated_seconds"])


@pytest.mark.full
def test_every_task_of_every_schedule_has_its_times(output):
    _, figures = output
    found = [
        (row["schedule"], task["stage"], task["chunk"], task["kind"])
        for row in figures["rows"]
        for task in row["tasks"]
    ]
    expected = {
        (name, task.stage, task.chunk, task.kind)
        for name in SCHEDULES
        for task in make_table(name, 2, 3, CHUNKS[name]).tasks
    }
    assert set(found) == expected
    assert len(found) == len(expected)
    tasks = [task for row in figures["rows"] for task in row["tasks"]]
    assert all(task["alone_seconds"] > 0 < task["in_company_seconds"] for task in tasks)


@pytest.mark.full
def test_a_message_is_the_stream_of_a_microbatch(output):
    _, figures = output
    assert figures["message_bytes"] == 1 * 8 * 16 * 4
    assert figures["transfer_seconds"] > 0


@pytest.mark.full
def test_the_first_rank_prints_both_tables(output):
    (printed, other), _ = output
    assert other == ""
    lines = printed.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ") and "%" in line][1:] == [
        f"| {name}" for name in SCHEDULES
    ]
    assert "| interleaved, chunk 1: backward |" in printed
