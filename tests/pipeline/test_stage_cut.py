"""Cuts for unequal stages: against brute force, within memory, never worse than the equal cut."""

import math
from itertools import accumulate, pairwise

import pytest
from every_cut import list_cuts
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.pipeline import stage_cut
from shardtrain.pipeline.partition import counts as cut_by
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_costs import BlockCost, ModelCosts, StageCosts, StageDevices
from shardtrain.pipeline.stage_cut import best_cut, bound_seconds, list_front_cuts

NUMBERS = st.integers(1, 9)
FIELDS = ("forward_flops", "backward_flops", "state_bytes", "saved_bytes", "output_bytes")
BLOCKS = st.builds(BlockCost, **dict.fromkeys(FIELDS, NUMBERS))


@st.composite
def problems(draw, most_blocks=12, most_stages=4, memory=(math.inf,)):
    blocks = draw(st.lists(BLOCKS, min_size=1, max_size=most_blocks))
    num_stages = draw(st.integers(1, min(most_stages, len(blocks))))
    devices = [
        StageDevices(
            flops_per_second=draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])),
            memory_bytes=draw(st.sampled_from(memory)),
            row_shards=draw(st.sampled_from([1, 2])),
        )
        for _ in range(num_stages)
    ]
    table = make_table(
        draw(st.sampled_from(["1f1b", "gpipe", "zero_bubble"])), num_stages, draw(st.integers(1, 6))
    )
    return StageCosts(
        model=ModelCosts(blocks=blocks, first=draw(BLOCKS), last=draw(BLOCKS)),
        devices=devices,
        table=table,
        link_bytes_per_second=draw(st.sampled_from([0.5, 4.0, math.inf])),
    )


def all_cuts(costs):
    return list_cuts(costs.num_blocks, costs.num_stages)


def groups(counts):
    return [(stage, *ends) for stage, ends in enumerate(pairwise(accumulate(counts, initial=0)))]


def fits(costs, counts):
    return all(costs.memory_bytes(*group) <= costs.devices[group[0]].memory_bytes for group in groups(counts))


def slowest(costs, counts):
    return max(
        max(costs.busy_seconds(stage, begin, end), costs.transfer_seconds(begin, stage))
        for stage, begin, end in groups(counts)
    )


@settings(max_examples=60, deadline=None)
@given(problems())
def test_no_cut_has_a_shorter_step_up_to_12_blocks_on_4_stages(costs):
    found = best_cut(costs)
    steps = {counts: costs.simulated(counts).makespan for counts in all_cuts(costs)}
    assert found.simulated.makespan == steps[found.counts] == min(steps.values())
    assert steps[found.counts] <= steps[tuple(cut_by("equal", costs.num_blocks, costs.num_stages))]
    # what ends the search early never lies above the step
    assert all(bound_seconds(costs, counts) <= step for counts, step in steps.items())


@settings(max_examples=60, deadline=None)
@given(problems())
def test_dynamic_programming_finds_the_least_slowest_stage(costs):
    least = min(slowest(costs, counts) for counts in all_cuts(costs))
    assert slowest(costs, list_front_cuts(costs)[0]) == pytest.approx(least, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(problems(memory=(10.0, 30.0, 60.0, math.inf)))
def test_memory_is_kept_and_where_it_cannot_be_the_numbers_are_told(costs):
    possible = [counts for counts in all_cuts(costs) if fits(costs, counts)]
    if possible:
        assert best_cut(costs).counts in possible
        assert all(counts in possible for counts in list_front_cuts(costs))
        return
    assert list_front_cuts(costs) == []
    with pytest.raises(ValueError, match=r"no cut of .* fits .* stages") as error:
        best_cut(costs)
    nearest = min(
        max(costs.memory_bytes(*group) / costs.devices[group[0]].memory_bytes for group in groups(counts))
        for counts in all_cuts(costs)
    )
    assert f"which needs {nearest:.2f} times the memory" in str(error.value)


def test_many_blocks_are_never_cut_worse_than_evenly(monkeypatch):
    """Where not all cuts are judged: the equal one is, and the one of the least slowest stage."""
    monkeypatch.setattr(stage_cut, "MOST_CUTS", 0)
    blocks = [BlockCost(forward_flops=1 + i % 5, backward_flops=3, output_bytes=2) for i in range(30)]
    devices = [StageDevices(flops_per_second=speed) for speed in (1, 4, 2, 3)]
    costs = StageCosts(
        model=ModelCosts(blocks=blocks),
        devices=devices,
        table=make_table("1f1b", 4, 8),
        link_bytes_per_second=4.0,
    )
    found = best_cut(costs)
    judged = [costs.simulated(counts).makespan for counts in (*list_front_cuts(costs), (7, 8, 8, 7))]
    assert found.simulated.makespan == min(judged)


def even(num_blocks, speeds, microbatches=8, **options):
    table = make_table("1f1b", len(speeds), microbatches)
    block = BlockCost(forward_flops=1, backward_flops=2, state_bytes=4, saved_bytes=6, output_bytes=1)
    devices = [StageDevices(flops_per_second=speed) for speed in speeds]
    return StageCosts(model=ModelCosts(blocks=[block] * num_blocks), devices=devices, table=table, **options)


def test_seconds_and_bytes_by_hand():
    costs = even(6, (2.0, 1.0, 1.0))
    # forward, and a backward that begins with it; the last stage has no forward of its own
    assert costs.seconds(0, 0, 2) == {"forward": 1.0, "backward": 3.0}
    assert costs.seconds(2, 4, 6) == {"forward": 0.0, "backward": 6.0}
    # state, the inputs of the microbatches in flight (3, 2, 1), and what one backward reads
    assert costs.live == (3, 2, 1)
    assert [costs.memory_bytes(*group) for group in groups((2, 2, 2))] == [8 + 12, 8 + 2 + 12, 8 + 1 + 12]


def test_what_waits_for_weight_tasks():
    """Cotangents of what a stage sent, and what its backward kept; no task computes what another has.

    The last stage has sent nothing, and the first has no cotangents to send: its backward is the weight task.
    """
    block = BlockCost(forward_flops=1, backward_flops=2, output_bytes=100, deferred_bytes=10)
    table = make_table("zero_bubble", 3, 4)
    orders = ["".join(task.kind[0] for task in table.order(stage)) for stage in range(3)]
    assert orders == ["fffbwfbwbwbw", "ffbfbwfbwbww", "fbfbfbwfbwww"]
    devices = [StageDevices(flops_per_second=1)] * 3
    costs = StageCosts(model=ModelCosts(blocks=[block] * 3), devices=devices, table=table)
    assert costs.delayed_weights == (1, 2, 3)
    # three inputs in flight on each, of which the tokens of the first are not counted
    assert [costs.memory_bytes(*group) for group in groups((1, 1, 1))] == [100, 300 + 220, 300 + 30]
    assert [tuple(costs.seconds(*group).values()) for group in groups((1, 1, 1))] == [
        (1, 0, 3),
        (1, 2, 1),
        (0, 2, 1),
    ]


def test_what_does_not_fit_together_is_told():
    with pytest.raises(ValueError) as error:
        StageCosts(
            model=ModelCosts(blocks=[BlockCost()]),
            devices=[StageDevices(flops_per_second=0), StageDevices(flops_per_second=1)],
            table=make_table("interleaved", 2, 2, 2),
        )
    assert str(error.value) == (
        "1 blocks cannot be cut for 2 stages by time:\n"
        "  - the schedule 'interleaved' has 2 chunks a stage; cut by time needs one part a stage, not in"
        " lock-step: use 1f1b, zero_bubble or gpipe with one virtual stage, or numbers of blocks\n"
        "  - each stage has one block or more; use at most 1 stages\n"
        "  - the speed of stage 0 is 0; use one above 0"
    )
