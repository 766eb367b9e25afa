"""Paired timing: every side once a round, in changing order; rounds that others disturbed are run again."""

import pytest


@pytest.fixture
def paired(script):
    return script("paired")


def test_each_round_runs_every_side_once_in_another_order(paired):
    calls = []
    sides = {name: lambda name=name: calls.append(name) for name in "abc"}
    found = paired.take_turns(sides, 12, seed=0)
    orders = [tuple(calls[start : start + 3]) for start in range(0, len(calls), 3)]
    assert len(orders) == 12
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 1
    assert {name: len(results) for name, results in found.items()} == {"a": 12, "b": 12, "c": 12}


@pytest.mark.parametrize(("first", "expected"), [(0, 2.0), (1, 2.5), (2, 3.0)])
def test_the_first_steps_of_a_block_are_not_among_those_whose_median_is_taken(paired, first, expected):
    block = paired.time_block(lambda ticks: ticks.extend([0.0, 1.0, 3.0, 6.0]), first)
    assert block.step_seconds == expected


def test_a_round_waits_for_a_quiet_machine_and_is_run_again_if_it_was_disturbed(paired, monkeypatch):
    calls = []
    shares = iter([0.5, 0.0, 0.3, 0.0, 0.1])  # waits, may begin, disturbed; may begin, kept

    def share_of_others(work):
        result = work() if "sleep" not in str(work) else None
        return result, next(shares)

    monkeypatch.setattr(paired, "share_of_others", share_of_others)
    found = paired.take_turns({"a": lambda: calls.append("a")}, 1, seed=0, quiet=0.2)
    assert len(calls) == 2
    assert len(found["a"]) == 1
    assert next(shares, None) is None


def test_work_is_done_and_what_others_took_is_a_number(paired):
    result, share = paired.share_of_others(lambda: "done")
    assert result == "done"
    assert isinstance(share, float)
