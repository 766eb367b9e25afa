"""The law: any mesh, accumulation and framework gives the loss and gradients of the plain one-device step."""

import itertools
import math
import os
import subprocess
import sys
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardtrain.functional.linen_model import from_linen
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.functional.rng import step_key
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.linen_decoder import LinenDecoder
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.placement import make_placement
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


def half(grid) -> list[Any]:
    """Cases of a grid: every second one is marked `full`; the others have every pair of two values."""
    cases = []
    for numbers in itertools.product(*(range(len(values)) for values in grid)):
        case = [values[number] for values, number in zip(grid, numbers, strict=True)]
        name = "-".join("x".join(map(str, v.values())) if isinstance(v, dict) else str(v) for v in case)
        cases.append(pytest.param(*case, marks=[pytest.mark.full] * (sum(numbers) % 2), id=name))
    return cases


@pytest.mark.parametrize(("mesh", "microbatches", "framework"), half((MESHES, (1, 4), ("nnx", "linen"))))
def test_every_mesh_gives_the_plain_step(mesh, microbatches, framework, assert_same):
    got = sharded(models(CONFIG)[framework], Layout(mesh=mesh), microbatches=microbatches)
    assert_same(got, plain(framework))


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_every_zero_stage_gives_the_plain_step(zero, microbatches, assert_same):
    layout = Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2}, zero=zero)
    assert_same(sharded(models(CONFIG)["nnx"], layout, microbatches=microbatches), plain("nnx"))


@pytest.mark.parametrize("mesh", [{"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["8", "2-2-2"])
def test_sequence_sharded_activations_give_the_plain_step(mesh, assert_same):
    got = sharded(models(CONFIG)["nnx"], Layout(mesh=mesh, sequence_sharded=True))
    assert_same(got, plain("nnx"))


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_dropout_is_the_same_on_any_mesh(framework, assert_same):
    model = models(DROPOUT)[framework]
    one_device = sharded(model, Layout(mesh={"data": 1}), num_devices=1)
    assert abs(one_device["loss"] - plain(framework)["loss"]) > 1e-3  # it did drop something
    got = sharded(model, Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2}), microbatches=4)
    assert_same(got, one_device)


def test_the_law_holds_at_the_default_optimization_level_of_xla(pytestconfig):
    """All other tests compile at level 0; one central test compiles here as a run does, `--full`: all."""
    chosen, passed = ("not default", 48) if pytestconfig.getoption("--full") else ("2x2x2-4-nnx", 1)
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=0", __file__, "-k", chosen]
    command += ["--full"] * (passed > 1)
    environment = {**os.environ, "DEFAULT_OPTIMIZATION": "1", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert f" {passed} passed" in f" {done.stdout.splitlines()[-1]}", done.stdout
