"""The benchmark of memory, run as people run it, small."""

import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "pipeline_memory.py"
SIZES = "--stages 2 --microbatches 2 6 --rows 1 --embed 16 --num-layers 3 --seq 8 --vocab 16 --cut 1,2"


# tests/plan/test_pipeline_programs.py has the same figures, of smaller models
@pytest.mark.full
def test_it_prints_what_each_schedule_holds(warm_python):
    words = ["--schedules", "1f1b", "accumulate", *SIZES.split()]
    done = subprocess.run([*warm_python, PROGRAM, *words], capture_output=True, text=True, check=True)
    first, _, _, _, *lines = done.stdout.splitlines()
    assert first == "the activations between two stages have 0.00 MB"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[:3] for row in rows] == [
        ["1f1b", "2", "5"],
        ["1f1b", "6", "6"],
        ["accumulate", "2", ""],
        ["accumulate", "6", ""],
    ]
    for few, many in (rows[:2], rows[2:]):
        assert few[4] == many[4]  # the state
        sizes = [int(row[6].replace(",", "")) for row in (few, many)]  # of the program
        assert max(sizes) < 1.01 * min(sizes)
