"""Shards of the parameters, whatever the order of messages: bounds of waves, sums, barriers, replays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.islands.parameter_shard import Event, ParameterShard, Push

EVERY = 2
"""Steps of a wave."""


class Log:
    def __init__(self):
        self.events: list[Event] = []

    def begin(self, step):
        self.events = [event for event in self.events if event.step <= step]

    def write(self, event):
        self.events.append(event)


class Simulation:
    """Islands whose messages arrive in an order that `choose` draws; update w of island i is known."""

    def __init__(self, num_islands, distance, num_waves, *, calls=(), orders=None):
        self.num_islands, self.distance, self.num_waves, self.calls = num_islands, distance, num_waves, calls
        self.logs = [Log() for _ in range(num_islands)]
        orders = orders or [()] * num_islands
        self.shards = [
            ParameterShard(num_islands, log, order) for log, order in zip(self.logs, orders, strict=True)
        ]
        self.updates = np.random.default_rng(0).normal(size=(num_islands, num_waves + 1, num_islands))
        for number, shard in enumerate(self.shards):
            shard.begin(0, np.array([number], np.float32), ())
        self.clock = [0] * num_islands
        self.pulled = [[] for _ in range(num_islands)]
        self.at_barrier: list[tuple[int, int]] = []
        self.at_vote: list[int] = []
        self.on_the_way: list[tuple[int, int, Push]] = []
        self.answers: list[dict] = [{} for _ in range(num_islands)]
        for island in range(num_islands):
            self.push(island)

    def push(self, island):
        """End a wave of an island."""
        self.clock[island] += 1
        clock = self.clock[island]
        is_last = clock == self.num_waves
        push = Push(
            step=clock * EVERY,
            least=clock if is_last else clock - self.distance,
            requests_barrier=(island, clock) in self.calls,
            totals=np.ones(1),
        )
        self.send(island, push, self.updates[island, clock].astype(np.float32))

    def send(self, island, push, update):
        for shard in range(self.num_islands):
            own = None if update is None else update[shard : shard + 1]
            self.on_the_way.append((shard, island, push._replace(update=own)))
        self.answers[island] = {}

    def run(self, choose):
        while self.on_the_way:
            shard, island, push = self.on_the_way.pop(choose(len(self.on_the_way)))
            for answered, answer in self.shards[shard].push(island, push):
                self.answers[answered][shard] = answer
                if len(self.answers[answered]) == self.num_islands:
                    self.go_on(answered)
        return self

    def go_on(self, island):
        """What an island does with the answers of all shards, as `Waves` does."""
        answers = [self.answers[island][shard] for shard in range(self.num_islands)]
        clock = self.clock[island]
        waits_for_all = (island, clock) in self.at_barrier
        if answers[0].barrier == clock and clock < self.num_waves and not waits_for_all:
            self.at_barrier.append((island, clock))
            self.send(island, Push(step=clock * EVERY, least=clock, totals=np.zeros(1)), None)
            return
        clocks = np.min([answer.clocks for answer in answers], axis=0)
        values = np.concatenate([answer.values for answer in answers])
        self.pulled[island].append((clock, clocks, [answer.clocks for answer in answers], values))
        # after a barrier they vote: nobody pushes before all have come
        if (island, clock) not in self.at_barrier:
            if clock < self.num_waves:
                self.push(island)
            return
        self.at_vote.append(island)
        if len(self.at_vote) == self.num_islands:
            met, self.at_vote = self.at_vote, []
            for each in met:
                self.push(each)


sizes = st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))


@given(sizes, st.data())
def test_islands_run_ahead_by_the_distance_at_most_and_no_update_is_lost_or_counted_twice(size, data):
    num_islands, distance, num_waves = size
    choose = data.draw(st.randoms(use_true_random=False)).randrange
    simulation = Simulation(num_islands, distance, num_waves).run(choose)
    for island in range(num_islands):
        assert [clock for clock, *_ in simulation.pulled[island]] == list(range(1, num_waves + 1))
        for clock, clocks, by_shard, values in simulation.pulled[island]:
            # its own waves are all in, once; nobody is behind by more than the distance
            assert clocks[island] == clock
            assert all(each[island] == clock for each in by_shard)
            assert clock - min(clocks) <= distance
            expected = [
                shard + sum(simulation.updates[i, 1 : n + 1, shard].sum() for i, n in enumerate(each))
                for shard, each in enumerate(by_shard)
            ]
            np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)
    # at the end all have the same bits: the start and all updates
    ends = {tuple(pulled[-1][-1].tolist()) for pulled in simulation.pulled}
    assert len(ends) == 1


@given(sizes, st.data())
def test_a_called_barrier_is_at_one_wave_of_all_islands_with_equal_parameters(size, data):
    num_islands, distance, num_waves = size
    caller = (data.draw(st.integers(0, num_islands - 1)), data.draw(st.integers(1, num_waves)))
    choose = data.draw(st.randoms(use_true_random=False)).randrange
    simulation = Simulation(num_islands, distance, num_waves, calls=[caller]).run(choose)
    waves = {clock for _, clock in simulation.at_barrier}
    assert all(len(pulled) == num_waves for pulled in simulation.pulled)
    # unless the call came in the last wave, or was for it, where there is one anyway
    if waves:
        assert len(waves) == 1
        assert sorted(island for island, _ in simulation.at_barrier) == list(range(num_islands))
        (wave,) = waves
        assert caller[1] <= wave <= caller[1] + distance
        values = {tuple(pulled[wave - 1][-1].tolist()) for pulled in simulation.pulled}
        assert len(values) == 1
    else:
        assert caller[1] >= num_waves - distance


@given(sizes, st.data())
def test_a_replay_gives_the_same_bits_in_any_order_of_messages(size, data):
    choose = data.draw(st.randoms(use_true_random=False)).randrange
    first = Simulation(*size).run(choose)
    again = Simulation(*size, orders=[log.events for log in first.logs]).run(choose)
    for one, other in zip(first.pulled, again.pulled, strict=True):
        for (*_, values), (*_, repeated) in zip(one, other, strict=True):
            assert values.tobytes() == repeated.tobytes()


@given(sizes, st.data())
def test_a_replay_that_meets_elsewhere_ends_and_hangs_nowhere(size, data):
    num_islands, _, num_waves = size
    caller = (data.draw(st.integers(0, num_islands - 1)), data.draw(st.integers(1, num_waves)))
    choose = data.draw(st.randoms(use_true_random=False)).randrange
    first = Simulation(*size).run(choose)
    again = Simulation(*size, calls=[caller], orders=[log.events for log in first.logs]).run(choose)
    assert all(len(pulled) == num_waves for pulled in again.pulled)
    assert len({tuple(pulled[-1][-1].tolist()) for pulled in again.pulled}) == 1


def test_sums_of_parameters_of_fewer_bits_are_rounded():
    import jax.numpy as jnp

    shard = ParameterShard(1)
    shard.begin(0, np.array([1.0, 1.0], np.float32), [(slice(1, 2), jnp.dtype(jnp.bfloat16))])
    ((_, answer),) = shard.push(0, Push(1, 1, update=np.full(2, 2.0**-9, np.float32)))
    assert answer.values.tolist() == [1 + 2.0**-9, 1.0]


def test_totals_reach_island_0_once():
    shard = ParameterShard(2)
    shard.begin(0, np.zeros(1, np.float32), ())
    update = np.zeros(1, np.float32)
    ((_, of_1),) = shard.push(1, Push(1, 0, totals=np.array([5.0]), update=update))
    ((_, of_0),) = shard.push(0, Push(1, 0, totals=np.array([2.0]), update=update))
    ((_, later),) = shard.push(0, Push(2, 0, totals=np.array([1.0]), update=update))
    assert [of_1.totals.tolist(), of_0.totals.tolist(), later.totals.tolist()] == [[0.0], [7.0], [1.0]]
