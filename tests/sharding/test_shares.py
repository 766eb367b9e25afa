"""Integer shares: properties of a fair split, against brute force, and refused values."""

from fractions import Fraction
from itertools import accumulate, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardtrain.sharding.shares import parse_weights, shares, starts

WEIGHTS = st.lists(
    st.one_of(st.integers(0, 20), st.floats(0, 1e6, allow_subnormal=False)), min_size=1, max_size=7
).filter(any)
TOTALS = st.integers(0, 5000)


def proportional(total, weights):
    exact = [Fraction(weight) for weight in weights]
    return [total * weight / sum(exact) for weight in exact]


@pytest.mark.parametrize(
    ("total", "weights", "options", "expected"),
    [
        (1, [1, 1], {}, [1, 0]),
        (1, [1, 1.0000001], {}, [0, 1]),
        # one part is an island without rows
        (8, [0, 1], {"minimum": 3}, [0, 8]),
        # layers: a slow stage gets its one, the others share the rest as they would among themselves
        (12, [1, 40, 40, 19], {"minimum": 1}, [1, 5, 4, 2]),
        (6, [1, 1], {"multiples": [2, 6], "minimum": 1}, None),
        (12, [1, 5, 0], {"multiples": [4, 8, 16], "minimum": 1}, [4, 8, 0]),
    ],
)
def test_shares_by_value(total, weights, options, expected):
    if expected is None:
        with pytest.raises(ValueError, match="use 8 rows"):
            shares(total, weights, **options)
    else:
        assert shares(total, weights, **options) == expected


@given(TOTALS, WEIGHTS)
def test_shares_add_up_and_are_near_proportion(total, weights):
    found = shares(total, weights)
    assert sum(found) == total
    assert all(abs(share - want) < 1 for share, want in zip(found, proportional(total, weights), strict=True))
    assert all(share == 0 for share, weight in zip(found, weights, strict=True) if not weight)


@given(TOTALS, WEIGHTS, st.integers(-8, 8))
def test_only_ratios_count(total, weights, exponent):
    """Whole numbers and the floats of the same ratios: the same shares, to the last row."""
    assume(all(weight == 0 or weight > 1e-200 for weight in weights))
    assert shares(total, [float(weight) * 2.0**exponent for weight in weights]) == shares(total, weights)


@given(TOTALS, WEIGHTS, st.integers(0, 30))
def test_a_minimum_is_kept(total, weights, minimum):
    used = sum(1 for weight in weights if weight)
    assume(total >= used * minimum)
    found = shares(total, weights, minimum=minimum)
    assert sum(found) == total
    assert all(share >= minimum for share, weight in zip(found, weights, strict=True) if weight)
    # parts above the minimum are in proportion among themselves
    above = [i for i, share in enumerate(found) if share > minimum]
    wanted = proportional(sum(found[i] for i in above), [weights[i] for i in above]) if above else []
    assert all(abs(found[i] - want) < 2 for i, want in zip(above, wanted, strict=True))
    plain = shares(total, weights)
    if all(share >= minimum for share, weight in zip(plain, weights, strict=True) if weight):
        assert all(abs(a - b) <= 1 for a, b in zip(found, plain, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 24),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_the_nearest_of_all_splits(total, parts, minimum):
    """Against every split there is: with multiples of any kind, and whether there is one at all."""
    weights, multiples = zip(*parts, strict=True)
    assume(any(weights))
    ranges = [
        range(-(-minimum // m) * m, total + 1, m) if weight else range(1)
        for weight, m in zip(weights, multiples, strict=True)
    ]
    every = [split for split in product(*ranges) if sum(split) == total]
    try:
        found = shares(total, weights, minimum=minimum, multiples=multiples)
    except ValueError:
        assert not every
        return
    assert tuple(found) in every
    if not minimum:
        wanted = proportional(total, weights)

        def distance(split):
            return sum((share - want) ** 2 for share, want in zip(split, wanted, strict=True))

        least = min(map(distance, every))
        assert tuple(found) == max(split for split in every if distance(split) == least)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3))
def test_the_totals_of_the_error_have_a_split(total, multiples):
    weights = [1] * len(multiples)
    try:
        shares(total, weights, multiples=multiples, minimum=1)
    except ValueError as error:
        use = str(error).partition("; use ")[2].partition(" rows")[0]
        for other in use.split(" or "):
            assert sum(shares(int(other), weights, multiples=multiples, minimum=1)) == int(other)


@given(st.lists(st.integers(0, 9), max_size=6))
def test_starts_are_sums_of_previous_shares(parts):
    assert starts(parts) == [0, *accumulate(parts)][: len(parts)]


@pytest.mark.parametrize(
    ("total", "weights", "options", "text"),
    [
        (
            4,
            [1] * 6,
            {"minimum": 1, "what": "layers"},
            "4 layers cannot be split into 6 parts, at least 1 each; use 6 layers, or a minimum of 0",
        ),
        (
            33,
            [1, 1],
            {"multiples": 2},
            "33 rows cannot be split into 2 parts, multiples of 2; use 32 or 34 rows",
        ),
        (
            5,
            [1, 2, 0],
            {"multiples": [4, 2, 1], "minimum": 1},
            "5 rows cannot be split into 2 parts, at least 1 each and multiples of 4, 2; use 6 rows",
        ),
        (
            -1,
            [1, -2, float("nan")],
            {"multiples": [1, 0]},
            "-1 rows cannot be split:"
            "\n  - weight 1 is -2; use a number from 0"
            "\n  - weight 2 is nan; use a number from 0"
            "\n  - -1 rows with a minimum of 0; use 0 or more for both"
            "\n  - multiples is [1, 0]; give 3 numbers from 1",
        ),
        (1, [], {}, "1 rows cannot be split:\n  - weights is []; at least one must be above 0"),
    ],
)
def test_errors_of_shares(total, weights, options, text):
    with pytest.raises(ValueError) as error:
        shares(total, weights, **options)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("text", "weights"),
    [("3,1", (3.0, 1.0)), (" 1 , .5,2e1,0", (1.0, 0.5, 20.0, 0.0)), ("7", (7.0,)), ("+1.,0", (1.0, 0.0))],
)
def test_weights_of_the_command_line(text, weights):
    assert parse_weights(text) == weights


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("3,x,-1", [f"'{word}' is not a number from 0, as in 3,1" for word in ("x", "-1")]),
        ("", ["'' is not a number from 0, as in 3,1"]),
        ("nan,1_0", [f"'{word}' is not a number from 0, as in 3,1" for word in ("nan", "1_0")]),
        ("0,0", ["weights is [0.0, 0.0]; at least one must be above 0"]),
        ("1e999,1", ["weight 0 is inf; use a number from 0"]),
    ],
)
def test_errors_of_weights(text, problems):
    with pytest.raises(ValueError) as error:
        parse_weights(text)
    assert str(error.value) == f"weights {text!r} cannot be used:" + "".join(f"\n  - {p}" for p in problems)
