"""The law: any mesh, accumulation and framework gives the loss and gradients of the plain one-device step."""

import dataclasses
import itertools
import math
import os
import subprocess
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_language_model import TinyConfig

from shardtrain.functional.linen_model import from_linen
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.functional.rng import step_key
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.linen_decoder import LinenDecoder
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.step import make_gradients

ROWS, SEQ, VOCAB = 32, 8, 32
CONFIG = DecoderConfig(vocab=VOCAB, seq=SEQ, embed=32, num_layers=2, num_heads=8, mlp=64)
DROPOUT = DecoderConfig(**{**vars(CONFIG), "dropout": 0.3})
MESHES = [
    dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
    for sizes in itertools.product((1, 2, 4, 8), repeat=3)
    if math.prod(sizes) == 8
]


@cache
def models(config):
    tokens = jax.ShapeDtypeStruct((1, SEQ), jnp.int32)
    return {"nnx": from_nnx(config), "linen": from_linen(LinenDecoder(config), tokens)}


@cache
def rows():
    random = np.random.default_rng(0)
    weights = np.ones(ROWS, np.float32)
    weights[-5:] = 0  # the last short batch: some shares of it are all padding
    return {"tokens": random.integers(0, VOCAB, (ROWS, SEQ + 1), np.int32), "weights": weights}


@cache
def initial(model):
    """The state before the first step, made once (`test_state.py` shows that it is the same on any mesh)."""
    layout = Layout(mesh={"data": 1})
    placement = make_placement(model, optax.identity(), layout, make_mesh(layout, jax.devices()[:1]))
    return jax.tree.map(np.asarray, init_state(model, optax.identity(), placement, seed=7))


def sharded(model, layout, num_devices=8, microbatches=1):
    """Loss and gradients through the toolkit."""
    mesh = make_mesh(layout, jax.devices()[:num_devices])
    placement = make_placement(model, optax.identity(), layout, mesh)
    state = jax.device_put(initial(model), placement.state)
    shape = (microbatches, ROWS // microbatches)
    batch = {k: jax.device_put(v.reshape(*shape, *v.shape[1:]), placement.batch) for k, v in rows().items()}
    gradients = jax.jit(make_gradients(model, next_token_loss, placement))
    result = gradients(state.params, state.model_state, step_key(state.seed, state.step), batch)
    return jax.tree.map(np.asarray, {"loss": result.loss_sum / result.count, **result.grads})


@cache
def plain(framework):
    """Loss and gradients by plain jax and Flax, nothing of the toolkit but its initial parameters."""
    model = models(CONFIG)[framework]
    params = jax.tree.map(jnp.asarray, initial(model).params)
    tokens, weights = (jnp.asarray(rows()[name]) for name in ("tokens", "weights"))

    def forward(params, inputs):
        if framework == "linen":
            return LinenDecoder(CONFIG).apply({"params": params}, inputs)
        graph, state = nnx.split(CONFIG(nnx.Rngs(0)))
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(inputs)

    def loss(params):
        logits: Any = forward(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return (losses * weights[:, None]).sum() / (weights.sum() * SEQ)

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return jax.tree.map(np.asarray, {"loss": value, **grads})


# each axis, in use or not, each number of microbatches and each framework once or more; --full has every pair
ALWAYS = ["1x1x8-1-linen", "2x2x2-4-nnx", "4x2x1-1-nnx"]


def cases() -> list[Any]:
    """A mesh, a number of microbatches and a framework each; what adds no value is marked `full`."""
    found = []
    for mesh, microbatches, framework in itertools.product(MESHES, (1, 4), ("nnx", "linen")):
        name = f"{'x'.join(map(str, mesh.values()))}-{microbatches}-{framework}"
        marks = [] if name in ALWAYS else [pytest.mark.full]
        found.append(pytest.param(mesh, microbatches, framework, marks=marks, id=name))
    return found


def test_the_cases_have_every_pair():
    """Those that always run have every value."""
    for names, number in (([case.id for case in cases()], 2), (ALWAYS, 1)):
        found = [name.split("-") for name in names]
        choices = [(*(size != "1" for size in mesh.split("x")), *others) for mesh, *others in found]
        for some in itertools.combinations(range(5), number):
            assert len({tuple(choice[i] for i in some) for choice in choices}) == 2**number


@pytest.mark.parametrize(("mesh", "microbatches", "framework"), cases())
def test_every_mesh_gives_the_plain_step(mesh, microbatches, framework, assert_same):
    got = sharded(models(CONFIG)[framework], Layout(mesh=mesh), microbatches=microbatches)
    assert_same(got, plain(framework))


@pytest.mark.parametrize("zero", [1, 2])
def test_every_zero_stage_gives_the_plain_step(zero, assert_same):
    """One with more microbatches than one, the other with sharded sequences."""
    layout = Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2}, zero=zero, sequence_sharded=zero == 2)
    assert_same(sharded(models(CONFIG)["nnx"], layout, microbatches=4 // zero**2), plain("nnx"))


COLLECTIVE_MATMULS = {
    "2-2-2": ({"data": 2, "fsdp": 2, "tensor": 2}, "linen", 4),
    "with context": ({"context": 2, "tensor": 4}, "nnx", 4),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.full] * ("context" in case)) for case in COLLECTIVE_MATMULS],
)
def test_products_beside_the_exchange_of_their_parts_give_the_plain_step(case, assert_same):
    mesh, framework, microbatches = COLLECTIVE_MATMULS[case]
    layout = Layout(mesh=mesh, sequence_sharded=True, collective_matmul=True)
    got = sharded(models(CONFIG)[framework], layout, microbatches=microbatches)
    assert_same(got, plain(framework))


# test_packed_rows.py has a ring
CONTEXTS = {
    "ring, sequence": ({"context": 2, "tensor": 4}, "ring", "nnx", 1, {"sequence_sharded": True}),
    "all-to-all, 2-2-2": ({"data": 2, "context": 2, "tensor": 2}, "all-to-all", "linen", 4, {}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case == "ring, sequence")) for case in CONTEXTS]
)
def test_sharded_sequences_give_the_plain_step(case, assert_same):
    """Those of linen sum their loss in chunks."""
    mesh, kind, framework, microbatches, options = CONTEXTS[case]
    config = dataclasses.replace(CONFIG, loss_chunk=6) if framework == "linen" else CONFIG
    layout = Layout(mesh=mesh, context_attention=kind, **options)
    got = sharded(models(config)[framework], layout, microbatches=microbatches)
    assert_same(got, plain(framework))


def test_sharded_sequences_drop_out_and_sum_their_loss_in_chunks_alike(assert_same):
    layout = Layout(mesh={"fsdp": 2, "context": 2, "tensor": 2}, context_attention="all-gather")
    config = dataclasses.replace(DROPOUT, loss_chunk=6)
    one_device = sharded(models(DROPOUT)["nnx"], Layout(mesh={"data": 1}), num_devices=1)
    assert_same(sharded(models(config)["nnx"], layout, microbatches=2), one_device)


EXPERTS = {
    "dropless, 2-2-2": ({"fsdp": 2, "expert": 2, "tensor": 2}, "num=8,top=2,z=0.001", 4, {}),
    "dropless, none": ({"data": 2, "fsdp": 2, "tensor": 2}, "num=8,top=2,z=0.001", 1, {"zero": 1}),
    "capacity, 2-2-2 with context": ({"expert": 2, "context": 2, "fsdp": 2}, "CAPACITY", 1, {}),
    "capacity, sequence": ({"expert": 4, "tensor": 2}, "CAPACITY", 1, {"sequence_sharded": True}),
    "over the batch": ({"data": 2, "fsdp": 2, "expert": 2}, "BATCH", 1, {}),
}
MIXTURES = {
    "CAPACITY": "num=8,top=2,capacity=1.0,shared=1,shared_gate=sigmoid,scores=sigmoid,scale=2.0,balance=0.1",
    "BATCH": "num=8,top=2,over=batch,balance=0.5,bias=0.01",
}


@cache
def mixture(text):
    """A decoder with experts, and its loss and gradients on one device."""
    text = MIXTURES.get(text, text)
    model = from_nnx(dataclasses.replace(CONFIG, activation="swiglu", bias=False, experts=text))
    return model, sharded(model, Layout(mesh={"data": 1}), num_devices=1)


# test_central_meshes.py has experts with a capacity, and context
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case != "dropless, 2-2-2")) for case in EXPERTS]
)
def test_sharded_experts_give_the_step_of_one_device(case, assert_same):
    mesh, text, microbatches, options = EXPERTS[case]
    model, one_device = mixture(text)
    assert_same(sharded(model, Layout(mesh=mesh, **options), microbatches=microbatches), one_device)


def test_a_model_with_attention_of_its_own_has_its_sequences_sharded_by_the_compiler(assert_same):
    model = from_nnx(TinyConfig(vocab=VOCAB, num_layers=2))
    got = sharded(model, Layout(mesh={"data": 2, "context": 2, "tensor": 2}))
    assert_same(got, sharded(model, Layout(mesh={"data": 1}), num_devices=1))


def test_products_in_8_bits_are_the_same_on_any_mesh(assert_same):
    model = from_nnx(dataclasses.replace(CONFIG, products="float8"))
    one_device = sharded(model, Layout(mesh={"data": 1}), num_devices=1)
    assert abs(one_device["loss"] - plain("nnx")["loss"]) > 1e-6
    layout = Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2})
    assert_same(sharded(model, layout, microbatches=4), one_device)


@pytest.mark.parametrize("framework", ["nnx", pytest.param("linen", marks=pytest.mark.full)])
def test_dropout_is_the_same_on_any_mesh(framework, assert_same):
    """Of a small nnx model, and of the linen decoder."""
    if framework == "linen":
        model, still = models(DROPOUT)["linen"], models(CONFIG)["linen"]
    else:
        config = TinyConfig(vocab=VOCAB, num_layers=2, dropout=0.3)
        model, still = from_nnx(config), from_nnx(dataclasses.replace(config, dropout=0.0))
    one_device = sharded(model, Layout(mesh={"data": 1}), num_devices=1)
    # it did drop something
    assert abs(one_device["loss"] - loss_of(still)) > 1e-4
    got = sharded(model, Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2}), microbatches=4)
    assert_same(got, one_device)


def loss_of(model):
    """The mean loss on one device at the initial parameters, without a gradient."""

    def loss(params, state, batch):
        apply = lambda x: model.apply(params, state, jax.random.key(0), True, x)[0]  # noqa: E731
        total, count, *_ = next_token_loss(apply, batch)
        return total / count

    state = initial(model)
    return jax.jit(loss)(state.params, state.model_state, jax.tree.map(jnp.asarray, rows()))


def test_the_law_holds_at_the_default_optimization_level_of_xla(pytestconfig, warm_python):
    """All other tests compile at level 0; one central test compiles here as a run does, `--full`: all."""
    chosen, passed = ("not default", 57) if pytestconfig.getoption("--full") else ("dropout and nnx", 1)
    command = [*warm_python, "-m", "pytest", "-q", "--numprocesses=0", __file__, "-k", chosen]
    command += ["--full"] * (passed > 1)
    environment = {**os.environ, "DEFAULT_OPTIMIZATION": "1", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert f" {passed} passed" in f" {done.stdout.splitlines()[-1]}", done.stdout
