"""Real islands under mpiexec: the law of the central test, and what belongs to each island alone."""

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("num_islands", "devices"),
    [(1, 2), *(pytest.param(*case, marks=FULL) for case in ((2, 1), (2, 2), (3, 1), (3, 2), (4, 1)))],
)
def test_islands_give_the_plain_step(num_islands, devices, mpiexec, pytestconfig):
    words = ["full"] if pytestconfig.getoption("--full") else []
    texts = mpiexec(num_islands, PROGRAMS / "island_step.py", *words, devices=devices)
    assert texts == ["done\n"] * num_islands
