"""Plans over the axis expert: bytes, flops and memory against compiled steps, the search, what is refused."""

from dataclasses import replace

import pytest
from planned_steps import ONE_NODE as MACHINE
from planned_steps import compiled, subject_of

from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.predict import predict_choices, steps, sum_sent_by_axes
from shardtrain.plan.prediction import Choice
from shardtrain.plan.search import search
from shardtrain.plan.space import Space
from shardtrain.sharding.layout import Layout

CONFIG = DecoderConfig(
    vocab=64, seq=64, embed=32, num_layers=2, num_heads=4, mlp=64, activation="swiglu"
)  # fmt: skip


BOUNDED, DROPLESS = "num=8,top=2,capacity=1.5", "num=8,top=2"


@pytest.fixture(scope="module")
def bounded():
    return subject_of(replace(CONFIG, experts=BOUNDED))


@pytest.mark.parametrize(
    ("experts", "mesh", "accumulate", "remat"),
    [
        pytest.param(BOUNDED, {"expert": 2, "tensor": 2}, 1, "weights", marks=pytest.mark.full),
        pytest.param(BOUNDED, {"fsdp": 2, "expert": 2}, 2, "none", marks=pytest.mark.full),
        # 16 positions of a device, and room for 24 tokens in an expert
        (BOUNDED, {"context": 4}, 1, "none"),
        pytest.param(DROPLESS, {"expert": 2, "context": 2}, 1, "dots", marks=pytest.mark.full),
    ],
)
def test_a_plan_is_the_compiled_step(bounded, experts, mesh, accumulate, remat):
    subject = bounded if experts == BOUNDED else subject_of(replace(CONFIG, experts=experts))
    layout = Layout(mesh=mesh, context_attention="all-gather")
    choice = Choice(layout=layout, accumulate=accumulate, remat=remat)
    found, sums = compiled(subject, choice, 4)
    (predicted,) = predict_choices(subject, MACHINE, 4, [choice])
    (step,) = steps(subject, MACHINE, 4, [choice])
    sent = sum_sent_by_axes(step, simulated=True)
    for over, num_bytes in sums.items():
        if num_bytes > 1000:  # not scalars
            assert sent[over] == pytest.approx(num_bytes, rel=0.02), over
    assert set(sent) <= set(sums)
    state = predicted.memory.parameters + predicted.memory.optimizer + predicted.memory.batch
    assert state == pytest.approx(found.argument_bytes, rel=0.01)
    if experts == BOUNDED:
        # without a capacity XLA for CPU has up to 1.5 times the slots of other compilers
        assert predicted.flops == pytest.approx(found.flops, rel=1e-3)
        assert predicted.memory.total == pytest.approx(found.device_bytes, rel=0.15)


@pytest.mark.full
def test_expert_is_searched_for_models_with_experts(bounded):
    space = Space(accumulates=(1,), remats=("weights",))
    plan = search(bounded, MACHINE, 4, space, most=10**6)
    assert {each.choice.layout.mesh.get("expert", 1) for each in plan.ranked} == {1, 2, 4}
    # 4 heads are not split by 3, nor 8 experts
    refused = search(bounded, MACHINE, 3, space).refused["--mesh expert=3"]
    assert "dim 'experts' of size 8 cannot be split over axes ['expert'] of total size 3" in refused


def test_a_model_without_experts_has_no_axis_for_them():
    plain = subject_of(CONFIG)
    space = Space(layout=Layout(mesh={"expert": 2}), accumulates=(1,), remats=("weights",))
    refused = search(plain, MACHINE, 2, space).refused["--mesh expert=2"]
    assert "the mesh has expert=2, and the model has no experts to shard; use data=2" in refused
    found = search(plain, MACHINE, 4, Space(accumulates=(1,), remats=("weights",)), most=10**6)
    assert all("expert" not in each.choice.layout.mesh for each in found.ranked)
