"""Plans of one pipeline over islands: the cut, its time beside replicas, the strategy, what is refused."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

from shardtrain import Text, next_token_loss
from shardtrain.functional.nnx_model import as_model
from shardtrain.functional.remat import with_remat
from shardtrain.islands.cluster import Cluster, IslandKind
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.island_stages import plan_stages
from shardtrain.plan.islands import plan_cluster
from shardtrain.plan.space import Space
from shardtrain.plan.subject import Subject
from shardtrain.report.plan import island_stages_text
from shardtrain.trainer.config import Run
from shardtrain.trainer.planned import staged_strategy
from shardtrain.trainer.strategy import read_strategy, strategy_text

CONFIG = DecoderConfig(vocab=64, seq=32, embed=32, num_layers=4, num_heads=4, mlp=128)
SPACE = Space(remats=("none",))


@pytest.fixture(scope="module")
def subject():
    batch = {
        "tokens": jax.ShapeDtypeStruct((16, CONFIG.seq + 1), jnp.int32),
        "weights": jax.ShapeDtypeStruct((16,), jnp.float32),
    }
    return Subject(
        model=lambda remat: as_model(with_remat(CONFIG, remat)),
        loss=next_token_loss,
        optimizer=optax.adamw(1e-3),
        batch=batch,
    )


def planned(subject, link=1.0, devices=(2, 1), memory=None):
    device = partial(ClusterDevice, teraflops=0.1, memory_gb_per_second=1000.0, memory_gb=memory)
    kinds = tuple(
        IslandKind(kind=name, devices=number, device=device(kernel_us=0.0))
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
    assert found.counts == (3, 1)
    assert sum(found.counts) == CONFIG.num_layers
    text = island_stages_text(found, far)
    assert f"--across pipeline --stages 3,1 --accumulate {found.accumulate}" in text
    assert f"{found.seconds / far.seconds:.2f} times that of replicas" in text
    run = Run(model=CONFIG, data=Text(seq=CONFIG.seq), batch=16, steps=2)
    strategy = staged_strategy(run, found)
    (path := tmp_path / "strategy.toml").write_text(strategy_text(strategy))
    read = read_strategy(path)
    assert read == strategy
    assert (read.across.axis, read.pipeline.stages, dict(read.layout.mesh)) == (
        "pipeline",
        "3,1",
        {"data": -1},
    )
    assert sum(read.predicted.values()) == pytest.approx(found.seconds)


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
