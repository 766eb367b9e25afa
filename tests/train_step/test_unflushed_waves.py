"""Pipelines across islands without a flush: plain arithmetic with the same delays."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "stages_in_flight.py"


@pytest.mark.parametrize(
    ("in_flight", "every"),
    [*(pytest.param(*case, marks=pytest.mark.full) for case in ((2, 2), (4, 4))), (3, 2)],
)
def test_parameters_are_those_of_plain_arithmetic_with_the_same_delays(in_flight, every, mpiexec):
    assert mpiexec(4, PROGRAM, in_flight, every) == ["done\n"] * 4
