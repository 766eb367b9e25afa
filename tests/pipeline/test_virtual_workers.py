"""Virtual workers from a pool: policies by value, the search against brute force, what is synchronised."""

from itertools import permutations

import pytest

from shardtrain.pipeline import virtual_workers
from shardtrain.pipeline.device_pool import DeviceGroup, Pool, all_allocations, policy
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_costs import BlockCost, ModelCosts, StageDevices
from shardtrain.pipeline.virtual_workers import (
    WorkerPredictor,
    allocation,
    search,
    synchronisation_seconds,
)

BLOCKS = [
    BlockCost(forward_flops=1 + i % 3, backward_flops=4, saved_bytes=2, output_bytes=1) for i in range(6)
]
SENT = [10.0] * len(BLOCKS)


def pool(*speeds, number=2, memory=100.0, network=2.0):
    groups = [
        DeviceGroup(
            kind=f"kind {i}",
            node=f"node {i}",
            number=number,
            device=StageDevices(flops_per_second=speed, memory_bytes=memory),
        )
        for i, speed in enumerate(speeds)
    ]
    return Pool(groups=groups, node_bytes_per_second=20.0, network_bytes_per_second=network)


def predictor(devices, blocks=BLOCKS):
    return WorkerPredictor(
        devices, ModelCosts(blocks=blocks), lambda stages: make_table("1f1b", stages, 4), 8, recomputes=False
    )


def test_the_policies_of_four_kinds():
    devices = pool(4.0, 5.0, 2.0, 1.0, number=4)
    assert policy("node partition", devices) == ((0,) * 4, (1,) * 4, (2,) * 4, (3,) * 4)
    assert policy("equal distribution", devices) == ((0, 1, 2, 3),) * 4
    # the fastest with the slowest, the second with the third
    assert policy("hybrid distribution", devices) == ((1, 1, 3, 3),) * 2 + ((0, 0, 2, 2),) * 2


def test_the_search_finds_the_best_of_all_allocations():
    found = predictor(pool(3.0, 1.0, 2.0))
    best = search(found, 3, SENT)
    # brute force: every order of the six devices, dealt out two by two
    dealt = {
        tuple(sorted(tuple(sorted(order[i : i + 2])) for i in (0, 2, 4)))
        for order in permutations([0, 0, 1, 1, 2, 2])
    }
    assert dealt == set(all_allocations((2, 2, 2), 2))
    every = [allocation("", workers, found, SENT) for workers in dealt]
    assert best.rows_per_second == max(each.rows_per_second for each in every if each is not None)
    equal = search(found, 3, SENT, equal_rows=True)
    assert equal.equal_rows_per_second == max(
        each.equal_rows_per_second for each in every if each is not None
    )
    assert equal.equal_rows_per_second >= best.equal_rows_per_second


def test_throughput_by_hand():
    """Four equal blocks: worker 0 is twice as fast as worker 1, so it gets two thirds of the rows."""
    blocks = [BlockCost(forward_flops=1, backward_flops=2)] * 2
    found = allocation("", ((0, 0), (1, 1)), predictor(pool(2.0, 1.0), blocks), [6.0, 6.0])
    assert found is not None
    # 1F1B of two equal stages and 4 microbatches: 5 times a forward and a backward
    fast, slow = (8 * 4 / (5 * 3 / speed) for speed in (2.0, 1.0))
    assert [worker.rows_per_second for worker in found.workers] == pytest.approx([fast, slow])
    # each node sends both blocks once: 2 (2 - 1) / 2 of 12 bytes
    assert found.synchronisation_seconds == 12 / 2.0
    assert found.step_seconds == pytest.approx(64 / (fast + slow))
    assert found.rows_per_second == pytest.approx(64 / (64 / (fast + slow) + 6))
    assert found.equal_rows_per_second == pytest.approx(64 / (15 + 6))


def test_equal_workers_synchronise_inside_their_nodes():
    """The owners of a block are all on one node where workers are alike, and nothing crosses the network."""
    devices = pool(2.0, 1.0)
    alike = allocation("", ((0, 1), (0, 1)), predictor(devices), SENT)
    assert alike is not None
    owned = [alike.workers[0].owners.count(group) for group in (0, 1)]
    assert alike.synchronisation_seconds == pytest.approx(max(owned) * 10 / 20.0)
    apart = allocation("", ((0, 0), (1, 1)), predictor(devices), SENT)
    assert apart is not None
    assert apart.synchronisation_seconds == 60 / 2.0
    assert synchronisation_seconds(alike.workers[:1], devices, SENT) == 0


def test_what_fits_no_memory_or_makes_no_workers_is_told():
    small = predictor(pool(2.0, 1.0, memory=1.0))
    assert allocation("", ((0, 0), (1, 1)), small, SENT) is None
    with pytest.raises(ValueError, match="no allocation of 4 devices to 2 virtual workers fits their memory"):
        search(small, 2, SENT)
    with pytest.raises(
        ValueError, match="4 devices do not make 3 virtual workers of equal size; use 1, 2, 4"
    ):
        search(predictor(pool(2.0, 1.0)), 3, SENT)
    with pytest.raises(ValueError, match=r"8 devices on 8 stages have 40,320 orders"):
        search(predictor(pool(*range(1, 9), number=1), BLOCKS * 2), 1, SENT * 2)
    with pytest.raises(ValueError, match="pairs need even numbers of kinds and of devices"):
        policy("hybrid distribution", pool(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match=r"policy 'nodes' \(known: node partition, .*; or search"):
        policy("nodes", pool(1.0))
    with pytest.raises(ValueError, match=r"2.0 bytes|use more than 0"):
        pool(1.0, network=0.0)
    uneven = Pool(
        groups=[pool(1.0).groups[0], pool(1.0, number=1).groups[0]],
        node_bytes_per_second=1.0,
        network_bytes_per_second=1.0,
    )
    with pytest.raises(ValueError, match="equal workers need as many devices of each kind"):
        policy("equal distribution", uneven)


def test_too_many_allocations_are_told(monkeypatch):
    monkeypatch.setattr(virtual_workers, "MOST_ALLOCATIONS", 2)
    with pytest.raises(
        ValueError, match="more than 2 allocations of 6 devices to 3 virtual workers; use a policy"
    ):
        search(predictor(pool(3.0, 1.0, 2.0)), 3, SENT)
