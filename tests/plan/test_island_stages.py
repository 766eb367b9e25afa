"""Plans of pipelines over islands, and which islands of a cluster are used."""

import re
from dataclasses import replace

import pytest
from planned_steps import subject_of
from tiny_language_model import TinyConfig

from shardtrain import Text
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.nnx_model import convert_model
from shardtrain.islands.cluster import (
    Cluster,
    IslandKind,
    add_up_devices,
    arrange_islands,
    cluster_text,
    read_cluster,
)
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.islands.options import Across
from shardtrain.plan.island_orders import list_arrangements, name_distribution
from shardtrain.plan.island_stages import IslandPipelines, plan_stages
from shardtrain.plan.islands import ReplicaPlanner
from shardtrain.plan.pools import plan_pools
from shardtrain.plan.space import Space
from shardtrain.report.plan_pools import pools_text
from shardtrain.report.quantities import count_text
from shardtrain.trainer.combinations import find_refused
from shardtrain.trainer.config import Run
from shardtrain.trainer.planned import make_planned_strategy, make_staged_strategy
from shardtrain.trainer.strategy import Strategy, read_strategy, strategy_text

CONFIG = TinyConfig(vocab=64, seq=32, embed=32, num_layers=4, mlp=192)
SPACE = Space(remats=("none",))


@pytest.fixture(scope="module")
def subject():
    return subject_of(CONFIG, model=lambda remat: convert_model(CONFIG))


def planned(subject, link=1.0, devices=(2, 1), count=1, memory_gb=None, **options):
    device = ClusterDevice(
        teraflops=0.1, memory_gb_per_second=1000.0, kernel_us=0.0, memory_gb=memory_gb, price_per_hour=1.0
    )
    kinds = tuple(
        IslandKind(kind=name, count=count, devices=number, device=device)
        for name, number in zip("ab", devices, strict=True)
    )
    cluster = Cluster(islands=kinds, link_gb_per_second=link)
    return ReplicaPlanner([subject, subject], cluster, SPACE, **options)


def test_over_a_slow_link_stages_are_faster_than_replicas(subject, tmp_path):
    near, far = planned(subject, link=100.0), planned(subject, link=1e-3)
    (fast,) = plan_stages(IslandPipelines(near), [0, 1])
    assert fast.seconds > near.plan([1, 1]).seconds
    (found,) = plan_stages(IslandPipelines(far), [0, 1])
    # a microbatch's activations are less than the gradients of all parameters
    assert found.seconds < far.plan([1, 1]).seconds
    # the island of two devices has more blocks
    assert (found.islands, found.cuts) == (((1, 0),), "1,3")
    assert found.rows == (16,)
    run = Run(model=CONFIG, data=Text(seq=CONFIG.seq), batch=16, steps=2)
    strategy = make_staged_strategy(run, found)
    (path := tmp_path / "strategy.toml").write_text(strategy_text(strategy))
    read = read_strategy(path)
    assert read == strategy
    assert (read.across.axis, read.pipeline.stages, dict(read.layout.mesh)) == (
        "pipeline",
        "1,3",
        {"data": -1},
    )
    assert sum(read.predicted.values()) == pytest.approx(found.seconds)
    # a number that the run gives stands, and stages have one program
    asked = replace(run, strategy=Strategy(across=Across(gradient_parts=2)))
    with pytest.raises(ValueError, match="gradient_parts is 2, and stages of a pipeline"):
        make_staged_strategy(asked, found)


def test_the_strategy_of_one_island_has_nothing_of_several(subject):
    plan = planned(subject).plan([1, 0])
    (kind,) = plan.kinds
    own = replace(kind.kind, strategy={"compute_dtype": "bfloat16"})
    several = Strategy(
        across=Across(axis="pipeline", partitions=2, shares=(3.0, 1.0)),
        synchronisation=Synchronisation(on="deltas", every=4, distance=1),
        islands={"1": {"accumulate": 2}},
    )
    run = Run(model=CONFIG, data=Text(seq=CONFIG.seq), batch=16, steps=2, strategy=several)
    found = make_planned_strategy(run, replace(plan, kinds=(replace(kind, kind=own),)))
    assert (found.across, found.synchronisation, found.islands) == (Across(), Synchronisation(), {})
    assert found.compute_dtype == "bfloat16"
    assert found.layout.mesh == kind.plan.ranked[0].choice.layout.mesh


def test_pipelines_of_each_distribution_share_the_batch_by_speed(subject, tmp_path):
    found = plan_stages(IslandPipelines(planned(subject, link=2.0, count=2)), [0, 0, 1, 1])
    by_form = {(each.partitions, name_distribution(each.islands)): each for each in found}
    assert set(by_form) == {(2, "node"), (2, "equal"), (4, "equal")}
    assert found[0] == min(found, key=lambda each: each.seconds)
    node = by_form[2, "node"]
    fast, slow = node.pipelines
    assert (node.islands, node.cuts) == (((0, 0), (1, 1)), "2,2")
    assert (fast.rows, slow.rows) == (12, 4)
    # each virtual worker has an island of each kind, so that both are as fast
    equal = by_form[2, "equal"]
    assert {frozenset(each) for each in equal.islands} == {frozenset((0, 1))}
    assert equal.rows == (8, 8)
    # a ring of two owners sends each block's gradients once; the last stage has the head too
    assert node.join_seconds == pytest.approx(max(fast.gradient_bytes) / 2e9)
    assert sum(fast.gradient_bytes) == pytest.approx(4 * subject.num_parameters)
    run = Run(model=CONFIG, data=Text(seq=CONFIG.seq), batch=16, steps=2)
    (path := tmp_path / "strategy.toml").write_text(strategy_text(make_staged_strategy(run, node)))
    read = read_strategy(path)
    assert (read.across.partitions, read.across.shares) == (2, (fast.rows, slow.rows))
    assert sum(read.predicted.values()) == pytest.approx(node.seconds)


def test_pipelines_are_cut_differently_unless_they_must_not(subject):
    # the islands of a pipeline: two devices and one, then one and two
    planner = planned(subject, link=10.0, count=2)
    pools = [(0, 1), (1, 0)]
    own = IslandPipelines(planner).plan(pools, (8, 8), 4)
    assert [each.counts for each in own] == [(3, 1), (1, 3)]
    alike = IslandPipelines(planner, one_cut=True).plan(pools, (8, 8), 4)
    assert [each.counts for each in alike] == [(2, 2), (2, 2)]
    assert max(each.seconds for each in own) < max(each.seconds for each in alike)


def test_batches_in_flight_fill_the_pipelines_of_waves(subject, tmp_path):
    waves = Synchronisation(on="deltas", every=4, distance=1)
    planner = planned(subject, link=2.0, count=2, synchronisation=waves)
    found = plan_stages(IslandPipelines(planner, one_cut=True, unflushed=True), [0, 0, 1, 1])
    by_form = {
        (name_distribution(each.islands), each.in_flight): each for each in found if each.partitions == 2
    }
    assert set(by_form) == {(name, number) for name in ("node", "equal") for number in (1, 2)}
    full, flushed = by_form["equal", 2], by_form["equal", 1]
    # a stage waits only while the first of many batches fills the pipeline
    assert full.slowest.bubble_seconds < 0.1 * full.slowest.compute_seconds
    assert full.slowest.bubble_seconds < flushed.slowest.bubble_seconds
    # changes are pushed once a wave
    assert full.join_seconds == pytest.approx(max(full.slowest.gradient_bytes) / 2e9 / 4)
    # the changes of a wave, and the weights or gradients of another batch
    assert max(full.memory_bytes) > max(flushed.memory_bytes) > 2 * max(flushed.slowest.gradient_bytes)
    run = Run(
        model=CONFIG, data=Text(seq=CONFIG.seq), batch=16, steps=2, strategy=Strategy(synchronisation=waves)
    )
    strategy = make_staged_strategy(run, full)
    assert (strategy.pipeline.in_flight, strategy.accumulate, strategy.across.partitions) == (2, 1, 2)
    assert find_refused(replace(run, strategy=strategy), "stages") == []
    # where such copies do not fit, there is no such plan
    least = max(flushed.memory_bytes) / 0.85 / 1e9
    short = planned(subject, 2.0, count=2, memory_gb=least, synchronisation=waves)
    pipelines = IslandPipelines(short, one_cut=True, unflushed=True)
    assert {each.in_flight for each in plan_stages(pipelines, [0, 0, 1, 1]) if each.partitions == 2} == {1}


def test_costs_of_blocks_grow_with_the_rows(subject):
    found = IslandPipelines(planned(subject))._model(16)
    traced = subject.block_costs(16)
    for one, other in (
        (found.first, traced.first),
        (found.last, traced.last),
        *zip(found.blocks, traced.blocks, strict=True),
    ):
        assert vars(one) == pytest.approx(vars(other), rel=0.01)


def test_a_stage_needs_less_memory_than_a_replica(subject):
    planner = planned(subject)
    replicas = [each.plan.ranked[0].prediction.memory.total for each in planner.plan([1, 1]).kinds]
    (found,) = plan_stages(IslandPipelines(planner), [0, 1])
    assert max(found.memory_bytes) < min(replicas)


def test_of_many_islands_the_distributions_of_hetpipe_are_tried():
    # four nodes of four devices, the fastest first: V, R, G, Q
    found = list_arrangements([kind for kind in range(4) for _ in range(4)], 4)
    assert {
        ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
        ((0, 1, 2, 3),) * 4,
        ((0, 0, 3, 3), (0, 0, 3, 3), (1, 1, 2, 2), (1, 1, 2, 2)),
    } <= found
    assert len(found) < 10


def test_what_cannot_be_stages_is_refused(subject):
    with pytest.raises(ValueError, match="4 blocks cannot be cut into 5 stages, one for each"):
        plan_stages(IslandPipelines(planned(subject)), [0, 0, 0, 1, 1])
    with pytest.raises(ValueError, match="rows cannot be split over 3 and 1 devices; use a larger batch"):
        plan_stages(IslandPipelines(planned(subject, devices=(3, 1))), [0, 1])
    with pytest.raises(ValueError, match="memory"):
        plan_stages(IslandPipelines(planned(subject, devices=(1, 1), memory_gb=1e-5)), [0, 1])


def cluster_of(kinds, link, **device):
    devices = [
        ClusterDevice(
            teraflops=0.1 * speed,
            memory_gb_per_second=100.0 * speed,
            kernel_us=0.0,
            price_per_hour=speed,
            watts=100.0,
            **device,
        )
        for _, speed, _ in kinds
    ]
    islands = tuple(
        IslandKind(kind=name, count=count, devices=1, device=each)
        for (name, _, count), each in zip(kinds, devices, strict=True)
    )
    return Cluster(islands=islands, link_gb_per_second=link)


def pools_of(subject, cluster):
    planner = ReplicaPlanner([subject] * len(cluster.islands), cluster, SPACE)
    return plan_pools(planner, IslandPipelines(planner))


KINDS = (("slow", 0.02, 1), ("half", 0.5, 1), ("fast", 1.0, 2))


def test_an_island_that_only_costs_is_left_out_by_name(subject):
    cluster = cluster_of(KINDS, link=10.0)
    plan = pools_of(subject, cluster)
    assert plan.left_out == {"slow": 1}
    assert plan.pool.counts == (0, 1, 2)
    # nothing was left out that would make a step shorter
    every = ReplicaPlanner([subject] * 3, cluster, SPACE).plan([1, 1, 2])
    assert plan.pool.seconds < every.seconds
    text = pools_text(plan, cluster.islands)
    lines = [line.split("  ") for line in text.splitlines()]
    rows = {cells[1]: [each.strip() for each in cells[2:] if each.strip()] for cells in lines if cells[1:]}
    assert rows["2 x fast"][-1] == rows["+ half"][-1] == "used"
    assert re.fullmatch(r"left out: a step takes \d+\.\d\d times as long", rows["+ slow"][-1])
    assert "left out: 1 x slow\n" in text
    per_second = 16 / plan.pool.seconds
    hour, watts = 2 * 1.0 + 0.5, 300.0
    assert rows["+ half"][2:5] == [count_text(per_second / each) for each in (1.0, hour / 3600, watts)]
    assert "ways to use these islands" in text


def test_islands_that_do_not_fit_alone_are_a_pipeline(subject):
    alone = ReplicaPlanner([subject], cluster_of((("a", 1.0, 1),), 1.0), SPACE).plan([1])
    needed = alone.kinds[0].plan.ranked[-1].prediction.memory.total
    cluster = cluster_of((("a", 1.0, 2),), 1.0, memory_gb=0.7 * needed / 0.85 / 1e9)
    plan = pools_of(subject, cluster)
    assert not plan.pool.replicas.fits
    assert plan.pool.best == plan.pool.pipelines[0]
    assert plan.left_out == {}
    assert [each.verdict for each in plan.additions] == ["does not fit", "used"]
    assert "replicas (too large)" in pools_text(plan, cluster.islands)


def change_first(cluster, devices=1, **device):
    first, *others = cluster.islands
    first = replace(first, devices=devices, device=replace(first.device, **device))
    return replace(cluster, islands=(first, *others))


def test_the_first_island_is_not_the_one_of_the_most_flops(subject):
    # eight devices have 1.6 times the flops of one, and a link of almost no speed
    cluster = cluster_of((("eight", 0.2, 1), ("one", 1.0, 1)), link=1e-3)
    plan = pools_of(subject, change_first(cluster, devices=8, link_gb_per_second=1e-3))
    assert plan.pool.counts == (0, 1)
    assert [each.kind.kind for each in plan.additions] == ["one", "eight"]
    assert re.fullmatch(r"left out: a step takes \d+(\.\d\d)? times as long", plan.additions[1].verdict)


def test_a_fast_island_of_too_little_memory_is_left_out(subject):
    cluster = change_first(cluster_of((("fast", 1.0, 1), ("big", 0.2, 1)), link=10.0), memory_gb=1e-4)
    plan = pools_of(subject, cluster)
    assert plan.pool.fits
    assert plan.left_out == {"fast": 1}
    assert [each.verdict for each in plan.additions] == ["used", "does not fit"]
    # where nothing fits, nothing is used
    cluster = cluster_of((("a", 1.0, 1), ("b", 1.0, 1)), link=10.0, memory_gb=1e-4)
    plan = pools_of(subject, cluster)
    assert not plan.pool.fits
    assert [each.verdict for each in plan.additions] == ["does not fit", "does not fit"]


def test_an_island_that_saves_too_little_is_left_out(subject):
    kinds = (("a", 1.0, 1), ("b", 1.0, 1))
    near = ReplicaPlanner([subject] * 2, cluster_of(kinds, link=1.0), SPACE)
    both, alone = near.plan([1, 1]), near.plan([1, 0]).seconds
    # a link over which both take 0.995 times as long as one
    link = both.join_seconds / (0.995 * alone - both.island_seconds)
    planner = ReplicaPlanner([subject] * 2, cluster_of(kinds, link=link), SPACE)
    assert planner.plan([1, 1]).seconds == pytest.approx(0.995 * alone)
    plan = plan_pools(planner, "no pipelines")
    assert plan.left_out == {"b": 1}
    assert plan.additions[1].verdict == "left out: saves less than 1% of a step"


def test_written_islands_are_those_that_the_strategy_is_for(tmp_path):
    cluster = cluster_of(KINDS, link=0.1)
    chosen = arrange_islands(cluster, (2, 1, 2))
    (path := tmp_path / "cluster.toml").write_text(cluster_text(chosen))
    assert read_cluster(path) == chosen
    assert [each.kind for each in chosen.of_islands] == ["fast", "half", "fast-2"]
    assert add_up_devices(chosen.islands, "watts") == 300.0
    assert add_up_devices(chosen.islands, "memory_gb") is None
    with pytest.raises(ValueError, match=r"watts is 0\.0; use a number above 0"):
        ClusterDevice(teraflops=1.0, watts=0.0)
