"""Plans of one pipeline over islands: the cut, its time beside replicas, the strategy, what is refused."""

from dataclasses import replace
from functools import partial

import pytest
from planned_steps import subject_of
from tiny_language_model import TinyConfig

from shardtrain import Text
from shardtrain.functional.nnx_model import convert_model
from shardtrain.islands.cluster import Cluster, IslandKind
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.islands.options import Across
from shardtrain.plan.island_stages import IslandPipelines, plan_stages
from shardtrain.plan.islands import plan_cluster
from shardtrain.plan.space import Space
from shardtrain.report.plan_islands import island_stages_text
from shardtrain.trainer.config import Run
from shardtrain.trainer.planned import make_staged_strategy
from shardtrain.trainer.strategy import Strategy, read_strategy, strategy_text

CONFIG = TinyConfig(vocab=64, seq=32, embed=32, num_layers=4, mlp=192)
SPACE = Space(remats=("none",))


@pytest.fixture(scope="module")
def subject():
    return subject_of(CONFIG, model=lambda remat: convert_model(CONFIG))


def planned(subject, link=1.0, devices=(2, 1), count=1):
    device = partial(ClusterDevice, teraflops=0.1, memory_gb_per_second=1000.0)
    kinds = tuple(
        IslandKind(kind=name, count=count, devices=number, device=device(kernel_us=0.0))
        for name, number in zip("ab", devices, strict=True)
    )
    subjects = [subject, subject]
    plan = plan_cluster(subjects, Cluster(islands=kinds, link_gb_per_second=link), SPACE)
    return plan, partial(plan_stages, subjects, plan, SPACE)


def test_over_a_slow_link_stages_are_faster_than_replicas(subject, tmp_path):
    near, fast = planned(subject, link=100.0)
    far, slow = planned(subject, link=1e-3)
    assert fast().seconds > near.seconds
    found = slow()
    # a microbatch's activations are less than the gradients of all parameters
    assert found.seconds < far.seconds
    # the island of two devices has more blocks
    assert found.cuts == "3,1"
    assert found.rows == (16,)
    text = island_stages_text(found, far)
    assert f"--across pipeline --stages 3,1 --accumulate {found.accumulate}" in text
    assert f"{found.seconds / far.seconds:.2f} times that of replicas" in text
    run = Run(model=CONFIG, data=Text(seq=CONFIG.seq), batch=16, steps=2)
    strategy = make_staged_strategy(run, found)
    (path := tmp_path / "strategy.toml").write_text(strategy_text(strategy))
    read = read_strategy(path)
    assert read == strategy
    assert (read.across.axis, read.pipeline.stages, dict(read.layout.mesh)) == (
        "pipeline",
        "3,1",
        {"data": -1},
    )
    assert sum(read.predicted.values()) == pytest.approx(found.seconds)
    # a number that the run gives stands, and stages have one program
    asked = replace(run, strategy=Strategy(across=Across(gradient_parts=2)))
    with pytest.raises(ValueError, match="gradient_parts is 2, and stages of a pipeline"):
        make_staged_strategy(asked, found)


def test_several_pipelines_share_the_batch_by_speed(subject, tmp_path):
    # two islands of two devices are a pipeline, two of one device the other
    plan, stages = planned(subject, link=2.0, count=2)
    found = stages()
    fast, slow = found.pipelines
    assert (found.partitions, found.cuts) == (2, "2,2")
    assert (fast.rows, slow.rows) == (12, 4)
    # a ring of two owners sends each block's gradients once; the last stage has the head too
    assert found.join_seconds == pytest.approx(max(fast.gradient_bytes) / 2e9)
    assert sum(fast.gradient_bytes) == pytest.approx(4 * subject.num_parameters)
    text = island_stages_text(found, plan)
    assert f'--partitions 2 --stages "2,2" --shares {fast.rows},{slow.rows}' in text
    run = Run(model=CONFIG, data=Text(seq=CONFIG.seq), batch=16, steps=2)
    (path := tmp_path / "strategy.toml").write_text(strategy_text(make_staged_strategy(run, found)))
    read = read_strategy(path)
    assert (read.across.partitions, read.across.shares) == (2, (fast.rows, slow.rows))
    assert sum(read.predicted.values()) == pytest.approx(found.seconds)


def test_pipelines_are_cut_differently_unless_they_must_not(subject):
    # the islands of a pipeline: two devices and one, then one and two
    plan, _ = planned(subject, link=10.0, count=2)
    pipelines = IslandPipelines([subject, subject], plan, SPACE)
    pools = [(0, 1), (1, 0)]
    own = pipelines.plan(pools, (8, 8), 4, one_cut=False)
    assert [each.counts for each in own] == [(3, 1), (1, 3)]
    alike = pipelines.plan(pools, (8, 8), 4, one_cut=True)
    assert [each.counts for each in alike] == [(2, 2), (2, 2)]
    assert max(each.seconds for each in own) < max(each.seconds for each in alike)


def test_a_stage_needs_less_memory_than_a_replica(subject):
    plan, stages = planned(subject)
    replicas = [each.plan.ranked[0].prediction.memory.total for each in plan.kinds]
    found = stages()
    assert max(found.memory_bytes) < min(replicas)


def test_what_cannot_be_stages_is_refused(subject):
    plan, _ = planned(subject)
    many = replace(plan, shares=(4, 3, 3, 3, 3))
    with pytest.raises(ValueError, match="4 blocks cannot be cut into 5 stages, one for each"):
        plan_stages([subject, subject], many, SPACE)
    plan, stages = planned(subject, devices=(3, 1))
    with pytest.raises(ValueError, match="rows cannot be split over 3 and 1 devices; use a larger batch"):
        stages()
    small = replace(
        plan,
        kinds=tuple(
            replace(
                each,
                kind=replace(each.kind, devices=1),
                machine=replace(each.machine, rates=replace(each.machine.rates, memory_bytes=1e4)),
            )
            for each in plan.kinds
        ),
    )
    with pytest.raises(ValueError, match="memory"):
        plan_stages([subject, subject], small, SPACE)
