"""Shares by measured speed: near the ideal in a few changes, found again when a speed changes, exact sums."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from shardtrain.islands.measured_shares import MeasuredShares, Speed, balance_rows, capacities

Seconds = Callable[[int, int], float]
"""(island, its capacity) -> seconds of its own work."""


def run(shares: MeasuredShares, seconds: Seconds, steps: int, noise: float = 0.0, seed: int = 0) -> list[int]:
    """The steps after which the rows changed."""
    draw = random.Random(seed)
    changes, batch = [], sum(shares.rows)
    for step in range(1, steps + 1):
        own = [seconds(i, n) * draw.uniform(1, 1 + noise) for i, n in enumerate(shares.capacities)]
        if shares.add(own):
            changes.append(step)
        assert sum(shares.rows) == batch
        assert min(shares.rows) >= 0
    return changes


def slowest(shares: MeasuredShares, seconds: Seconds) -> float:
    return max(seconds(i, n) for i, n in enumerate(shares.capacities))


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("rates", "fixed"),
    [((1, 4), 4.0), ((3, 1, 2), 1.0), ((1, 1, 1, 5), 0.0)],
)
def test_it_comes_near_the_ideal_in_two_changes(rates, fixed, noise):
    seconds: Seconds = lambda island, rows: fixed + rates[island] * rows  # noqa: E731
    rows = [64 // len(rates) + (i < 64 % len(rates)) for i in range(len(rates))]
    shares = MeasuredShares(64, rows, [1] * len(rates))
    changes = run(shares, seconds, 50, noise)
    assert 1 <= len(changes) <= 2
    # the ideal takes no whole rows
    ideal = fixed + 64 / sum(1 / rate for rate in rates)
    assert slowest(shares, seconds) <= 1.1 * ideal


def test_the_second_change_corrects_what_the_first_could_not_know():
    """Half of the speed, and 20 s that no row takes: 21 and 11 rows at first, and 22 and 10 save 6.6 %."""
    seconds: Seconds = lambda island, rows: 20 + 6 * rows if island else 3.65 * rows  # noqa: E731
    shares = MeasuredShares(32, [16, 16], [1, 1])
    assert run(shares, seconds, 50) == [18, 36]
    assert shares.rows == [22, 10]


def test_what_follows_an_islands_own_work_is_balanced_too():
    """Sending takes an island of a quarter of the speed 40 s, ten times as long as the other one."""

    def step_seconds(rows):
        own = [4.0 * rows[0], 16.0 * rows[1]]
        return own, max(own[0] + 4, own[1] + 40)

    def trained(with_rest):
        shares = MeasuredShares(32, [16, 16], [1, 1])
        changes = 0
        for _ in range(60):
            own, end = step_seconds(shares.rows)
            changes += shares.add(own, [end - x for x in own] if with_rest else None)
        return step_seconds(shares.rows)[1], changes

    best = min(step_seconds([rows, 32 - rows])[1] for rows in range(33))
    seconds, changes = trained(True)
    assert seconds <= 1.05 * best
    assert changes <= 2
    assert trained(False)[0] > 1.15 * best


def test_no_island_gets_more_than_its_limit():
    seconds: Seconds = lambda island, rows: (1, 4, 4)[island] * rows  # noqa: E731
    shares = MeasuredShares(66, [22, 22, 22], [1, 1, 2], [30, 66, 26])
    assert 1 <= len(run(shares, seconds, 50)) <= 2
    assert shares.capacities[0] == 30
    # the others share what is left
    assert abs(shares.rows[1] - shares.rows[2]) <= 2
    assert not shares.restore([31, 20, 15])


def test_equal_islands_keep_their_rows_whatever_the_noise():
    shares = MeasuredShares(64, [32, 32], [1, 1])
    assert run(shares, lambda island, rows: 1.0 + rows, 300, noise=0.1) == []


def test_a_disturbance_of_two_windows_changes_no_rows():
    """12 % more on one island: alone the windows would save 5.7 %; beside older ones the first saves 3."""
    shares = MeasuredShares(64, [32, 32], [1, 1])
    run(shares, lambda island, rows: rows, 26)
    assert run(shares, lambda island, rows: rows * (1 if island else 1.12), 16) == []


def test_a_noisy_machine_changes_rows_ever_more_rarely():
    """Each change is compiled. With one gain for all these disturbances change rows 10 times, not 6."""
    counts = []
    for seed in range(6):
        draw = random.Random(seed)
        disturbed = [[draw.lognormvariate(0, 0.2) for _ in range(25)] for _ in range(2)]
        shares = MeasuredShares(64, [32, 32], [1, 1])
        changes = []
        for step in range(300):
            own = [(1, 3)[i] * n * disturbed[i][step // 12] for i, n in enumerate(shares.capacities)]
            changes.append(shares.add([x * draw.lognormvariate(0, 0.2) for x in own]))
        counts.append(sum(changes))
    assert sum(counts) / len(counts) < 6


def test_a_speed_that_changes_is_found_again_within_fifty_steps():
    shares = MeasuredShares(64, [32, 32], [1, 1])
    run(shares, lambda island, rows: (1, 2)[island] * rows, 50)
    assert shares.rows[0] > shares.rows[1]
    changed: Seconds = lambda island, rows: (3, 1)[island] * rows  # noqa: E731
    assert len(run(shares, changed, 50)) <= 2
    assert slowest(shares, changed) <= 1.1 * 64 * 3 / 4


@pytest.mark.parametrize("seed", range(4))
def test_whatever_speeds_change_when_it_comes_near_the_ideal_again(seed):
    draw = random.Random(seed)
    before, after = ([draw.choice((1, 2, 3, 5)) for _ in range(2)] for _ in range(2))
    shares = MeasuredShares(64, [32, 32], [1, 1])
    run(shares, lambda island, rows: before[island] * rows, draw.randrange(60))
    changed: Seconds = lambda island, rows: after[island] * rows  # noqa: E731
    run(shares, changed, 60)
    assert slowest(shares, changed) <= 1.15 * 64 / sum(1 / x for x in after)


def test_islands_get_what_they_can_split():
    fast, slow = Speed(), Speed()
    fast.add(32, 1.0)
    slow.add(32, 100.0)
    # an island computes its least capacity in any case
    assert balance_rows(64, [fast, slow], [1, 8]) == [56, 8]
    assert balance_rows(64, [fast, slow], [1, 1]) == [63, 1]
    assert balance_rows(7, [fast, slow], [8, 1]) == [6, 1]
    assert balance_rows(1, [fast, slow], [1, 1]) in ([1, 0], [0, 1])
    assert all(n % 6 == 0 for n in capacities(100, 6))


def test_padding_is_little_and_numbers_of_rows_are_few():
    found = capacities(4096, 1)
    assert len(found) < 16 * 10
    assert all(b - a <= max(a / 16, 1) for a, b in pairwise(found))


def test_an_island_is_compiled_for_its_rows_where_these_are_few():
    """A quarter of the speed: with capacities an eighth apart the fast island padded 26 rows to 27."""
    shares = MeasuredShares(32, [16, 16], [1, 1])
    # seconds of two islands of which one has a quarter of its core, as they were measured
    for _ in range(40):
        shares.add([0.012 + 0.0042 * shares.capacities[0], 0.019 * shares.capacities[1]])
    assert shares.rows == shares.capacities == [26, 6]
