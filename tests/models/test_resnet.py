"""ResNet: published sizes, its parts, and what its norms do to a batch that is cut."""

import functools
import math
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_models import list_parameters
from flax import nnx

from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.convolution import EPS, Stack
from shardtrain.models.resnet import ResNetConfig

CONFIG = ResNetConfig(depth=20, filters=4, num_groups=2, height=8, width=6, colours=1, classes=8)
SHALLOW = replace(CONFIG, depth=11)
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(6, 8, 6, 1)).astype(np.float32)
LABELS = RNG.integers(0, 8, 6)

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def count(config, kind: Any = nnx.Param):
    return sum(math.prod(v.shape) for _, v in list_parameters(config, kind))


def test_sizes_are_those_of_keras():
    """Of trained numbers and running statistics, as Keras' summary of its CIFAR ResNet v2 has them."""
    config = ResNetConfig(depth=20, norm="batch")
    assert count(config) + count(config, nnx.BatchStat) == 574_090


def test_blocks_are_counted_and_a_list():
    module = nnx.eval_shape(lambda: ResNetConfig(depth=110)(nnx.Rngs(0)))
    assert isinstance(module.blocks, nnx.List)
    assert len(module.blocks) == ResNetConfig(depth=110).num_blocks == 36


def test_logits_are_those_of_preactivated_bottlenecks(pure, quick_jit):
    """The definition once more, as Keras writes it."""

    def convolution(p, x, window, stride=1):
        kernel = p["kernel"].reshape(window, window, -1, p["bias"].size)
        numbers = ("NHWC", "HWIO", "NHWC")
        return (
            jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, "SAME", dimension_numbers=numbers)
            + p["bias"]
        )

    def activated(p, x):
        groups = x.reshape(*x.shape[:3], 2, -1)
        mean = groups.mean((1, 2, 4), keepdims=True)
        variance = groups.var((1, 2, 4), keepdims=True)
        return jax.nn.relu(
            ((groups - mean) / jnp.sqrt(variance + EPS)).reshape(x.shape) * p["scale"] + p["bias"]
        )

    def definition(params):
        x = activated(params["stem_norm"], convolution(params["stem"], IMAGES, 3))
        for i, block in params["blocks"].items():
            stride = 2 if i in (2, 4) else 1
            norms = list(block["norms"].values())
            y = x if i == 0 else activated(norms.pop(0), x)
            y = convolution(block["convolutions"][0], y, 1, stride)
            y = convolution(block["convolutions"][1], activated(norms[0], y), 3)
            y = convolution(block["convolutions"][2], activated(norms[1], y), 1)
            x = y + (convolution(block["shortcut"], x, 1, stride) if i % 2 == 0 else x)
        x = activated(params["final_norm"], x).mean((1, 2))
        return x @ params["head"]["kernel"] + params["head"]["bias"]

    params = pure(CONFIG).params
    assert_close(quick_jit(pure(CONFIG).apply)(params, IMAGES), quick_jit(definition)(params))


FULL = pytest.mark.full


def test_scan_makes_one_loop_of_alike_blocks(pure):
    text = {
        scan: jax.jit(pure(config).apply).lower(pure(config).params, IMAGES).as_text()
        for scan, config in ((scan, replace(CONFIG, depth=29, scan=scan)) for scan in (True, False))
    }
    assert text[True].count("stablehlo.while") == 3
    assert "stablehlo.while" not in text[False]


def one_by_one(blocks) -> list[Any]:
    """The arrays of each block, those in stacks too."""
    found = []
    for _, tree in sorted(blocks.items(), key=lambda item: int(item[0])):
        if "block" not in tree:
            found.append(tree)
            continue
        rows = len(jax.tree.leaves(tree)[0])
        found += [jax.tree.map(lambda leaf, i=i: leaf[i], tree["block"]) for i in range(rows)]
    return found


@pytest.fixture(scope="module")
def first_step(quick_jit):
    """config -> initial parameters, gradient and running statistics, each block by itself, and the loss."""

    @functools.cache
    def compute(config):
        model = from_nnx(config)

        def loss(params, running):
            logits, running = model.apply(params, running, jax.random.key(0), True, jnp.asarray(IMAGES))
            return -jax.nn.log_softmax(logits)[jnp.arange(6), LABELS].mean(), running

        params, running = model.init(jax.random.key(0))
        (value, running), grads = quick_jit(jax.value_and_grad(loss, has_aux=True))(params, running)
        trees = [{**tree, "blocks": one_by_one(tree.get("blocks", {}))} for tree in (params, grads, running)]
        return float(value), trees

    return compute


STORED = {
    "remat": {"remat": True},
    "unrolled": {"scan": False},
    "remat, unrolled": {"remat": True, "scan": False},
    "stacks": {"stack": 2},
    "stacks, unrolled": {"stack": 2, "scan": False},
    "stacks, remat": {"stack": 2, "remat": True},
}


# a group norm has no statistics, which is where the two could differ
@FULL
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("how", STORED)
def test_how_blocks_are_stored_and_recomputed_changes_no_number(how, norm, first_step):
    """Three blocks that are alike, stored as two and one: initial values, loss, gradients, statistics."""
    config = replace(CONFIG, depth=38, norm=norm)
    (loss, trees), (expected_loss, expected) = first_step(replace(config, **STORED[how])), first_step(config)
    assert_close(loss, expected_loss)
    jax.tree.map(assert_close, trees, expected)
    assert [len(tree["blocks"]) for tree in trees[:2]] == [12, 12]


@FULL
def test_programs_of_stacks_do_not_grow_with_depth(pure):
    """Neither the arrays nor the operations of a backward are more, with more blocks in each stack."""

    def size(depth, stack):
        config = replace(CONFIG, depth=depth, stack=stack)
        gradient = jax.grad(lambda params: pure(config).apply(params, IMAGES).sum())
        text = jax.jit(gradient).lower(pure(config).params).as_text()
        return len(jax.tree.leaves(pure(config).params)), text.count("\n")

    shallow, deep = size(29, 2), size(110, 11)
    assert deep == shallow
    assert size(110, 1)[0] > 5 * deep[0]


def test_every_block_is_in_a_stack_of_its_group():
    module = nnx.eval_shape(lambda: ResNetConfig(depth=1001, filters=4, stack=11)(nnx.Rngs(0)))
    numbers = [block.number if isinstance(block, Stack) else 1 for block in module.blocks]
    assert numbers == [1, *[11] * 10] * 3
    kernel = cast(Any, module.blocks[1]).block.convolutions[1].kernel
    assert kernel.get_metadata()["out_sharding"] == (
        "layers", "height", "width", "channels_in", "channels_out",
    )  # fmt: skip


def test_every_parameter_has_a_gradient_and_remat_changes_none(first_step):
    jax.tree.map(assert_close, first_step(replace(SHALLOW, remat=True)), first_step(SHALLOW))
    for path, gradient in jax.tree.leaves_with_path(first_step(SHALLOW)[1][1]):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 1e-6, path


def test_running_statistics_change_in_training_alone(quick_jit):
    model = from_nnx(replace(SHALLOW, norm="batch"))
    params, before = model.init(jax.random.key(0))
    apply = quick_jit(
        lambda train: model.apply(params, before, jax.random.key(0), train, IMAGES), static_argnums=0
    )
    (logits, trained), (evaluated, untouched) = apply(True), apply(False)
    jax.tree.map(np.testing.assert_array_equal, untouched, before)
    for (path, new), old in zip(jax.tree.leaves_with_path(trained), jax.tree.leaves(before), strict=True):
        assert np.abs(new - old).min() > 0, path
    assert np.abs(logits - evaluated).max() > 0.1
