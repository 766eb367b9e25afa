"""The cut into parts: the best of all cuts, against brute force; and what is refused."""

from itertools import accumulate, pairwise

import pytest
from every_cut import list_cuts
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.pipeline.partition import BY_TIME, Costs, counts, cut, parse_stages


def judged(numbers, costs, first, last):
    found = [sum(costs[begin:end]) for begin, end in pairwise(accumulate(numbers, initial=0))]
    found[0] += first
    found[-1] += last
    return max(found), sum(cost**2 for cost in found)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_the_best_of_all_cuts(costs, data):
    num_parts = data.draw(st.integers(1, len(costs)))
    first, last = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    found = cut(costs, num_parts, first_cost=first, last_cost=last)
    assert len(found) == num_parts
    assert sum(found) == len(costs)
    assert min(found) >= 1
    best = min(judged(numbers, costs, first, last) for numbers in list_cuts(len(costs), num_parts))
    assert judged(found, costs, first, last) == best


def test_what_cannot_be_cut_is_told():
    with pytest.raises(ValueError) as error:
        cut([1, -2, float("nan")], 4, last_cost=float("inf"))
    assert str(error.value) == (
        "3 blocks cannot be cut into 4 parts:\n"
        "  - block 1 costs -2; give a number from 0\n"
        "  - block 2 costs nan; give a number from 0\n"
        "  - last costs inf; give a number from 0\n"
        "  - each part has one block or more; use at most 3 parts, or 4 blocks"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("equal", "equal"),
        (" flops ", "flops"),
        ("params", "params"),
        ("3, 4,4,1", (3, 4, 4, 1)),
        ("12", (12,)),
    ],
)
def test_stages_are_read(text, expected):
    assert parse_stages(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("flop", "stages 'flop' (did you mean 'flops'?); or a list of numbers of blocks, such as 3,4,4,1"),
        ("", "stages '' (known: equal, params, flops, time); or a list"),
        ("3,x,0", "'x' is not a number of blocks; write a whole number from 1\n  - '0' is not a number"),
        ("3,,1", "'' is not a number of blocks"),
        ("3,-1", "'-1' is not a number of blocks"),
    ],
)
def test_what_cannot_be_read_is_told(text, told):
    with pytest.raises(ValueError) as error:
        parse_stages(text)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("num_blocks", "num_parts", "expected"),
    [
        (13, 4, [3, 4, 3, 3]),
        (14, 4, [3, 4, 4, 3]),
        (5, 5, [1] * 5),
        (7, 1, [7]),
    ],
)
def test_equal_leaves_the_rest_to_the_middle(num_blocks, num_parts, expected):
    assert counts("equal", num_blocks, num_parts) == expected


def test_counts_by_cost_are_the_cut():
    assert counts("params", 4, 2, Costs(blocks=[5, 1, 1, 1], first=1)) == [1, 3]
    assert counts("flops", 4, 2, Costs(blocks=[1, 1, 1, 1], last=2)) == [3, 1]
    assert counts((1, 2, 1), 4, 3) == [1, 2, 1]


@pytest.mark.parametrize(
    ("by", "num_blocks", "num_parts", "told"),
    [
        ("equal", 3, 4, "each part has one block or more; use at most 3 parts, or 4 blocks"),
        ("equal", 3, 0, "parts is 0; use 1 or more"),
        ("flops", 4, 2, "by 'flops' needs the costs of each block; give them, or cut by 'equal'"),
        ("time", 4, 2, f"{BY_TIME}"),
        ((3, 4, 4), 12, 4, "3,4,4 is 3 numbers; give 4, as 3,3,3,3"),
        (
            (3, 4, 4, 1), 13, 4,
            "3,4,4,1 adds up to 12; each part has one or more and all have 13, as 3,5,4,1",
        ),
        (
            (3, 0, 1), 4, 3,
            "3,0,1 has a part without blocks; each part has one or more and all have 4, as 2,1,1",
        ),
        ((1, 1), 1, 2, "each part has one block or more; use at most 1 part, or 2 blocks"),
    ],
)  # fmt: skip
def test_counts_that_do_not_fit_are_told(by, num_blocks, num_parts, told):
    with pytest.raises(ValueError) as error:
        counts(by, num_blocks, num_parts)
    asked = f"{num_blocks} blocks cannot be cut into {num_parts} parts:\n  - "
    assert str(error.value) == asked + told
