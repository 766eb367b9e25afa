"""Plans over the axis context: bytes and flops against compiled steps, and what is refused."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planned_steps import ONE_NODE as MACHINE
from planned_steps import compiled, subject_of

from shardtrain.functional.loss import translation_loss
from shardtrain.functional.nnx_model import convert_model
from shardtrain.functional.remat import apply_remat
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.mlp import MlpConfig
from shardtrain.pipeline.schedule import make_table
from shardtrain.plan.device_calls import AttentionCall
from shardtrain.plan.hlo.collectives import PERMUTE
from shardtrain.plan.predict import predict_choices, steps, sum_sent_by_axes
from shardtrain.plan.prediction import Choice
from shardtrain.plan.program import CallSizes
from shardtrain.plan.search import search
from shardtrain.plan.space import Space, list_allowed_choices, mesh_text
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import Target
from shardtrain.sharding.layout import Layout

CONFIG = DecoderConfig(vocab=64, seq=64, embed=32, num_layers=2, num_heads=4, mlp=128)


@pytest.fixture(scope="module")
def subject():
    return subject_of(CONFIG)


def layout_of(kind, **mesh):
    return Layout(mesh=mesh, context_attention=kind)


@pytest.mark.parametrize(
    ("layout", "accumulate", "remat"),
    [
        pytest.param(layout_of("ring", context=4), 1, "weights", marks=pytest.mark.full),
        pytest.param(layout_of("all-gather", data=2, context=2), 2, "full", marks=pytest.mark.full),
        (layout_of("all-to-all", fsdp=2, context=2), 1, "dots"),
    ],
    ids=lambda value: getattr(value, "context_attention", None),
)
def test_bytes_and_flops_are_those_of_the_compiled_step(subject, layout, accumulate, remat):
    choice = Choice(layout=layout, accumulate=accumulate, remat=remat)
    found, sums = compiled(subject, choice, 4)
    (step,) = steps(subject, MACHINE, 4, [choice])
    (predicted,) = predict_choices(subject, MACHINE, 4, [choice])
    assert predicted.flops == pytest.approx(found.flops, rel=1e-3)
    sent = sum_sent_by_axes(step, simulated=True)
    # one sum of 4 kB over fsdp is sent as a reduce-scatter in this small step, and counted as an all-reduce
    near = 0.025 if layout.context_attention == "all-to-all" else 0.02
    for over in sent:
        assert sent[over] == pytest.approx(sums[over], rel=near), over
    # what the plan does not know of is below that too: positions of the batch
    assert sum(sums.values()) == pytest.approx(sum(sent.values()), rel=0.02)
    assert predicted.seconds.collectives["context",] > sent["context",] / 1e9


@pytest.mark.full
def test_context_is_searched_where_it_is_named(subject):
    def meshes(context, kind="ring", **others):
        mesh = others if context is None else {"context": context, **others}
        space = Space(layout=layout_of(kind, **mesh), accumulates=(1,), remats=("weights",))
        return search(subject, MACHINE, 8, space, most=10**6)

    def sizes(plan):
        found = {each.choice.layout.mesh.get("context", 1) for each in plan.ranked}
        assert all(math.prod(each.choice.layout.mesh.values()) == 8 for each in plan.ranked)
        return found

    def kinds(plan):
        layouts = [each.choice.layout for each in plan.ranked]
        return {layout.context_attention for layout in layouts if layout.mesh.get("context", 1) > 1}

    # pipelines are compared once, as they take most of the time
    assert sizes(meshes(None, pipeline=1)) == {1}
    every = meshes(-1)
    assert sizes(every) == {1, 2, 4, 8}
    # ring is what a run has unless it says otherwise, so the other kinds are compared too
    assert kinds(every) == {"ring", "all-gather", "all-to-all"}
    assert kinds(meshes(-1, "all-gather", pipeline=1)) == {"all-gather"}
    assert sizes(meshes(2, "all-gather", pipeline=1)) == {2}
    # by the run's own checks: 4 heads, and an odd ring inside a pipeline
    exchanged = meshes(-1, "all-to-all", pipeline=1)
    assert sizes(exchanged) == {1, 2, 4}
    refused = exchanged.refused["--mesh context=8 --context-attention all-to-all"]
    assert "4 heads of a device cannot be split over 8; use a context that divides them" in refused
    staged = {"pipeline", "context"}
    rings = [each.choice.layout for each in every.ranked if each.choice.layout.mesh.keys() >= staged]
    assert "ring" in {layout.context_attention for layout in rings}
    odd = Space(layout=layout_of("ring", pipeline=2, context=3), accumulates=(1,), remats=("weights",))
    by_odd = search(subject, MACHINE, 6, odd, most=10**6)
    assert "context=3 is odd; use context=2 or 4" in by_odd.refused["--mesh pipeline=2,context=3"]
    parts = replace(
        odd.layout, mesh={"pipeline": 2, "tensor": 3}, sequence_sharded=True, collective_matmul=True
    )
    whole = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ())
    by_odd = search(subject, MACHINE, 6, replace(odd, layout=replace(parts, parameters=whole)), most=10**6)
    named = "--mesh pipeline=2,tensor=3 --sequence-sharded --collective-matmul"
    assert "tensor=3 is odd; use tensor=2 or 4" in by_odd.refused[named]
    # the other way to shard activations is planned too
    assert {mesh_text(each.choice.layout) for each in by_odd.ranked} == {"--mesh pipeline=2,tensor=3"}


def test_context_is_searched_for_long_sequences_alone(subject, monkeypatch):
    space = Space(layout=Layout(mesh={"pipeline": 1}), accumulates=(1,), remats=("weights",))

    def sizes():
        found = search(subject, MACHINE, 8, space, most=10**6).ranked
        return {each.choice.layout.mesh.get("context", 1) for each in found}

    monkeypatch.setattr("shardtrain.plan.space.LONG_SEQUENCE", CONFIG.seq)
    # and a device has at least so many positions
    monkeypatch.setattr("shardtrain.plan.space.PART_OF_SEQUENCE", CONFIG.seq // 2)
    assert sizes() == {1, 2}
    monkeypatch.setattr("shardtrain.plan.space.LONG_SEQUENCE", CONFIG.seq + 1)
    assert sizes() == {1}


@pytest.mark.full
def test_memory_of_long_sequences_over_context():
    """Scores exist in blocks, which loops give the same memory, five arrays of them in programs for CPU."""
    long = subject_of(replace(CONFIG, seq=2048, num_layers=1), rows=1)
    layout = layout_of("ring", context=4)
    choice = Choice(layout=layout, remat="full")
    real = compiled(long, choice, 4)[0].device_bytes
    of_cpu = replace(MACHINE, rates=replace(MACHINE.rates, copies_stacked=True))
    (predicted,) = predict_choices(long, of_cpu, 4, [choice])
    assert predicted.memory.total == pytest.approx(real, rel=0.1)
    # whole scores of two heads of four would be 8 times a block of 512 x 256 and its gradients
    assert real < 4 * CONFIG.num_heads * 512 * 2048


@pytest.mark.full
def test_memory_of_long_sequences_on_one_device():
    """Of a step whose attention is computed in blocks, as "auto" chooses for CPUs."""
    long = subject_of(replace(CONFIG, seq=2048, num_layers=1), rows=1)
    choice = Choice(layout=Layout(mesh={"data": 1}), remat="full")
    real = compiled(long, choice, 1)[0].device_bytes
    of_cpu = replace(MACHINE, rates=replace(MACHINE.rates, copies_stacked=True))
    (predicted,) = predict_choices(replace(long, target=Target("cpu", one_device=True)), of_cpu, 1, [choice])
    assert predicted.memory.total == pytest.approx(real, rel=0.1)


@pytest.mark.full
def test_a_window_of_a_ring_is_counted(subject):
    def predicted(window):
        windowed = subject_of(replace(CONFIG, window=window))
        (step,) = steps(windowed, MACHINE, 4, [Choice(layout=layout_of("ring", context=4))])
        return step.cost.flops, sum_sent_by_axes(step)["context",]

    # of 4 devices only the neighbour's keys are needed, and no halves are exchanged
    assert all(near < far for near, far in zip(predicted(8), predicted(None), strict=True))


def test_a_balanced_exchange_is_two_messages():
    """Its halves, there and back, beside keys and values."""

    def messages(**options):
        call = AttentionCall(kind="ring", queries=8, keys=8, head_dim=4, item_bytes=4, **options)
        sizes = CallSizes([np.array([64.0])] * 3, [np.array([64.0])], lambda axis: 1 + (axis == "context"))
        (sent,) = call.cost(sizes).sent
        return sent.times

    assert messages(causal=False) == 2
    assert messages(causal=True) == 4
    assert messages(causal=True, backward=True) == 8


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 5])
def test_a_ring_in_stages_is_planned_as_it_is_compiled(window):
    """Each tick counts all segments; a window's neighbour is reached in two exchanges."""
    # loops of one block would be left out, and keys that are there twice merged
    staged = subject_of(replace(CONFIG, num_layers=4, window=window))
    layout = layout_of("ring", pipeline=2, context=4)
    choice = Choice(layout=layout, accumulate=2, remat="weights")
    (step,) = steps(staged, MACHINE, 8, [choice])
    found, _ = compiled(staged, choice, 8)
    assert step.forward is not None
    segments = [*step.forward.segments[:2], *step.cost.segments[1:]]
    ticks = make_table(choice.schedule, 2, 2, lockstep=True).num_ticks
    # compilers leave out a part of the forward that is computed again
    assert ticks * sum(each.flops for each in segments) == pytest.approx(found.flops, rel=0.01)
    sent = sum(each.num_bytes for segment in segments for each in segment.sent if each.kind == PERMUTE)
    in_pairs = [each for each in found.collectives if each.axes == ("context",) and each.group_size == 2]
    assert ticks * sent == pytest.approx(sum(each.wire_bytes_per_device for each in in_pairs), rel=1e-3)


def test_a_model_without_attention_of_the_run_is_refused():
    batch = {
        "x": jax.ShapeDtypeStruct((8, 4), jnp.float32),
        "y": jax.ShapeDtypeStruct((8, 2), jnp.float32),
    }

    def loss(model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2).sum(), jnp.float32(8)

    model = convert_model(MlpConfig(features=4, mlp=8, num_layers=1, classes=2))
    other = Subject(model=lambda remat: model, loss=loss, optimizer=optax.sgd(1e-2), batch=batch)
    with pytest.raises(ValueError, match="context=2 is planned for models that let the run compute"):
        predict_choices(other, MACHINE, 2, [Choice(layout=layout_of("ring", context=2))])


def test_relative_positions_are_planned_as_a_run_computes_them():
    config = EncoderDecoderConfig(
        vocab=64, seq=8, embed=16, num_encoder_layers=1, num_decoder_layers=1, num_heads=4,
        positions="relative", norm="rmsnorm", relative_buckets=8, relative_distance=10,
    )  # fmt: skip
    batch = {name: jax.ShapeDtypeStruct((4, n), jnp.int32) for name, n in (("source", 8), ("target", 9))}
    subject = Subject(
        model=lambda remat: convert_model(apply_remat(config, remat)),
        loss=translation_loss,
        optimizer=optax.adamw(1e-3),
        batch={**batch, "weights": jax.ShapeDtypeStruct((4,), jnp.float32)},
    )
    # its sequences count where axes are chosen to be searched
    assert subject.sequence == 8
    choices, refused = list_allowed_choices(subject, 2, Space(layout=Layout(mesh={"context": 2})))
    assert {choice.layout.context_attention for choice in choices} == {"all-to-all"}
    assert "attention by ring over context has no relative positions" in refused["--mesh context=2"]
