"""Pipelines of stages with several devices: dynamic programming against all cuts and groups."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.pipeline.partition import Costs, cut
from shardtrain.pipeline.stage_costs import BlockCost, ModelCosts
from shardtrain.plan.layers.replicated_costs import PipelineDevices, ReplicatedCosts, StageDevice
from shardtrain.plan.layers.replicated_stages import best_replicated_cut, find_replicated_cuts


def compositions(number, parts):
    for inner in combinations(range(1, number), parts - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *inner, number)))


def random_costs(random, blocks, devices, memory):
    def block():
        forward, state, saved, output = random.random(4)
        return BlockCost(
            forward_flops=forward,
            backward_flops=2 * forward,
            state_bytes=state,
            saved_bytes=saved,
            output_bytes=output,
        )

    nodes = np.sort(random.integers(0, 3, devices))
    return ReplicatedCosts(
        model=ModelCosts(blocks=[block() for _ in range(blocks)], first=block(), last=block()),
        gradient_bytes=Costs(blocks=list(random.random(blocks)), first=random.random(), last=random.random()),
        pipeline=PipelineDevices(
            devices=tuple(
                StageDevice(flops_per_second=speed, memory_bytes=memory * bytes_, node=int(node))
                for speed, bytes_, node in zip(
                    random.uniform(0.5, 2, devices), random.uniform(1, 3, devices), nodes, strict=True
                )
            ),
            device_bytes_per_second=4.0,
            node_bytes_per_second=1.0,
        ),
        num_microbatches=int(random.integers(1, 6)),
        rows=int(random.integers(1, 9)),
    )


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), blocks=st.integers(1, 6), devices=st.integers(1, 4), tight=st.booleans())
def test_each_number_of_stages_has_the_least_slowest_one(seed, blocks, devices, tight):
    costs = random_costs(np.random.default_rng(seed), blocks, devices, 2.0 if tight else math.inf)
    least = {}
    for stages in range(1, min(blocks, devices) + 1):
        every = [
            costs.evaluate(counts, groups).slowest_seconds
            for counts in compositions(blocks, stages)
            for groups in compositions(devices, stages)
        ]
        if min(every) < math.inf:
            least[stages] = min(every)
    found = {len(cut.counts): cut for cut in find_replicated_cuts(costs)}
    assert set(found) == set(least)
    for stages, each in found.items():
        assert each.slowest_seconds == pytest.approx(least[stages])
        assert (sum(each.counts), sum(each.devices)) == (blocks, devices)
    if found:
        assert best_replicated_cut(costs).step_seconds == min(each.step_seconds for each in found.values())


def equal_blocks(flops, gradients, sent, devices, rows=12, /, **links):
    blocks = [BlockCost(forward_flops=each, backward_flops=2 * each, output_bytes=sent) for each in flops]
    return ReplicatedCosts(
        model=ModelCosts(blocks=blocks),
        gradient_bytes=Costs(blocks=gradients),
        pipeline=PipelineDevices(devices=devices, **links),
        num_microbatches=16,
        rows=rows,
    )


def test_a_pipeline_is_cut_where_gradients_are_large_and_replicated_where_they_are_small():
    # PipeDream's VGG: convolutions with few weights are replicated, the matrix products behind are a stage
    four = (StageDevice(flops_per_second=1.0),) * 4
    links = {"device_bytes_per_second": 1.0}
    found = best_replicated_cut(equal_blocks([1, 1, 1, 1], [0.01, 0.01, 0.01, 40], 0.01, four, **links))
    assert (found.counts, found.devices) == ((3, 1), (3, 1))
    # without weights, all devices are replicas of one stage
    assert best_replicated_cut(equal_blocks([1, 1, 1, 1], [0] * 4, 0.5, four, **links)).devices == (4,)
    # large gradients: no stage has two devices
    assert best_replicated_cut(equal_blocks([1] * 4, [40] * 4, 0.0, four, **links)).devices == (1, 1, 1, 1)


def test_without_replicas_it_is_the_cut_of_equal_stages():
    flops = [3, 1, 4, 1, 5, 9, 2, 6]
    costs = equal_blocks(flops, [0] * 8, 0.0, (StageDevice(flops_per_second=1.0),) * 3)
    (found,) = [each for each in find_replicated_cuts(costs) if len(each.counts) == 3]
    parts = cut([4 * each for each in flops], 3, last_cost=0)
    slowest = max(sum(flops[a:b]) for a, b in pairwise(np.cumsum([0, *parts])))
    # the last stage saves a forward, so it may be faster than the slowest of the equal cut
    assert found.slowest_seconds <= 4 * slowest


def test_slow_links_between_nodes_keep_replicas_inside_them():
    two = tuple(StageDevice(flops_per_second=1.0, node=node) for node in (0, 0, 1, 1))
    links = {"device_bytes_per_second": 1000.0, "node_bytes_per_second": 0.5}
    found = best_replicated_cut(equal_blocks([1] * 4, [10] * 4, 0.01, two, **links))
    assert (found.counts, found.devices) == ((2, 2), (2, 2))


def test_what_cannot_be_cut_is_refused():
    many = equal_blocks([1] * 50, [0] * 50, 0.0, (StageDevice(flops_per_second=1.0),) * 50)
    with pytest.raises(ValueError, match="use 40 devices, or several as one"):
        find_replicated_cuts(many)
    small = (StageDevice(flops_per_second=1.0, memory_bytes=0.5),)
    costs = random_costs(np.random.default_rng(0), 3, 1, 1.0)
    tiny = ReplicatedCosts(
        model=costs.model,
        gradient_bytes=costs.gradient_bytes,
        pipeline=PipelineDevices(devices=small),
        num_microbatches=2,
        rows=1,
    )
    with pytest.raises(ValueError, match="no cut of 3 blocks fits the memory of 1 devices; use more devices"):
        best_replicated_cut(tiny)


def test_more_devices_than_rows_do_nothing():
    five = (StageDevice(flops_per_second=1.0),) * 5
    one_stage = {
        rows: find_replicated_cuts(equal_blocks([1, 1], [0, 0], 0, five, rows))[0] for rows in (2, 5, 6)
    }
    # the slowest device has 1 of 2, 1 of 5 and 2 of 6 rows; without a forward of its own
    assert {rows: cut.slowest_seconds for rows, cut in one_stage.items()} == pytest.approx(
        {2: 6 / 2, 5: 6 / 5, 6: 6 * 2 / 6}
    )
    several = PipelineDevices(devices=(StageDevice(flops_per_second=1.0, number=4),) * 2)
    assert several.numbers([1, 1]) == (4, 4)
    assert several.stage(0, 2, 16).flops_per_second == 8
