"""The benchmark of schedules, run as people run it, small. Nothing here looks at a time it took."""

import json
from pathlib import Path

import pytest

from shardtrain.pipeline.schedule import SCHEDULES, allowed_chunks, make_table

FOLDER = Path(__file__).parents[2] / "benchmarks"
SIZES = {"microbatches": 3, "embed": 16, "num-layers": 4, "seq": 8, "vocab": 16, "rows": 1, "rounds": 2}
FEW = ("1f1b", "interleaved", "zb_v")
"""Without `--full`: one chunk a stage, two, and two whose gradients of weights are tasks of their own."""
PROGRAM = """
import runpy, sys
from shardtrain.pipeline.schedule import SCHEDULES

program, names, *sys.argv[1:] = sys.argv[1:]
for name in set(SCHEDULES) - set(names.split(",")):
    del SCHEDULES[name]
sys.path.insert(0, program.rpartition("/")[0])
runpy.run_path(program, run_name="__main__")
"""
CHUNKS = {name: allowed_chunks(name)[0] for name in SCHEDULES}


@pytest.fixture(scope="module")
def names(pytestconfig):
    """The schedules that are measured."""
    return [name for name in SCHEDULES if name in FEW or pytestconfig.getoption("--full")]


@pytest.fixture(scope="module")
def output(names, mpiexec, tmp_path_factory):
    """What it prints, and its figures."""
    path = tmp_path_factory.mktemp("figures") / "figures.json"
    arguments = [word for name, value in SIZES.items() for word in (f"--{name}", value)]
    words = (FOLDER / "pipeline_schedules.py", ",".join(names), "--json", path, *arguments)
    texts = mpiexec(2, PROGRAM, *words)
    return texts, json.loads(path.read_text())


@pytest.mark.full
def test_every_schedule_is_simulated_and_measured(output, names):
    _, figures = output
    assert [row["schedule"] for row in figures["rows"]] == names
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


def test_every_task_of_every_schedule_has_its_times(output, names):
    _, figures = output
    found = [
        (row["schedule"], task["stage"], task["chunk"], task["kind"])
        for row in figures["rows"]
        for task in row["tasks"]
    ]
    expected = {
        (name, task.stage, task.chunk, task.kind)
        for name in names
        for task in make_table(name, 2, 3, CHUNKS[name]).tasks
    }
    assert set(found) == expected
    assert len(found) == len(expected)
    tasks = [task for row in figures["rows"] for task in row["tasks"]]
    assert all(task["alone_seconds"] > 0 < task["in_company_seconds"] for task in tasks)


def test_a_message_is_the_stream_of_a_microbatch(output):
    _, figures = output
    assert figures["message_bytes"] == 1 * 8 * 16 * 4
    assert figures["transfer_seconds"] > 0


def test_the_first_rank_prints_both_tables(output, names):
    (printed, other), _ = output
    assert other == ""
    lines = printed.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ") and "%" in line][1:] == [
        f"| {name}" for name in names
    ]
    assert "| interleaved, chunk 1: backward |" in printed
