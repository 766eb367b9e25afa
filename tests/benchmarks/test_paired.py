"""Paired timing: every side once a round, in changing order; rounds that others disturbed are run again."""

import doctest
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def paired():
    """The module beside the scripts, which is no part of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("paired")


def side(name, calls):
    def run(ticks):
        calls.append(name)
        ticks += [0.0, 1.0, 3.0, 6.0]

    return run


def test_each_round_runs_every_side_once_in_another_order(paired):
    calls = []
    sides = {name: side(name, calls) for name in "abc"}
    blocks = paired.rounds(sides, 12, 0, seed=0)
    orders = [tuple(calls[start : start + 3]) for start in range(0, len(calls), 3)]
    assert len(orders) == 12
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 1
    assert {name: len(found) for name, found in blocks.items()} == {"a": 12, "b": 12, "c": 12}


@pytest.mark.parametrize(("first", "expected"), [(0, 2.0), (1, 2.5), (2, 3.0)])
def test_the_first_steps_of_a_block_are_not_among_those_whose_median_is_taken(paired, first, expected):
    assert paired.timed(side("a", []), first).step_seconds == expected


def test_a_round_waits_for_a_quiet_machine_and_is_run_again_if_it_was_disturbed(paired, monkeypatch):
    calls = []
    shares = iter([0.5, 0.0, 0.3, 0.0, 0.1])  # waits, may begin, disturbed; may begin, kept

    def others_share(work):
        result = work() if "sleep" not in str(work) else None
        return result, next(shares)

    monkeypatch.setattr(paired, "others_share", others_share)
    blocks = paired.rounds({"a": side("a", calls)}, 1, 0, seed=0, quiet=0.2)
    assert len(calls) == 2
    assert len(blocks["a"]) == 1
    assert next(shares, None) is None


def test_work_is_done_and_what_others_took_is_a_number(paired):
    result, share = paired.others_share(lambda: "done")
    assert result == "done"
    assert isinstance(share, float)


def test_examples(paired):
    found = doctest.testmod(paired)
    assert found.attempted > 0
    assert found.failed == 0
