"""Real pipelines under mpiexec: the law of the central test, stage by stage."""

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"


@pytest.mark.parametrize(
    ("num_stages", "num_replicas"),
    [(2, 2), *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, 1), (3, 1), (3, 2)))],
)
def test_stages_give_the_plain_step(num_stages, num_replicas, mpiexec, pytestconfig):
    num_islands = num_stages * num_replicas
    words = [num_stages, *(["full"] if pytestconfig.getoption("--full") else [])]
    texts = mpiexec(num_islands, PROGRAMS / "stages_step.py", *words, devices=2)
    assert texts == ["done\n"] * num_islands
