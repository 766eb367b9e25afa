"""VGG: published sizes, its parts, dropout in its classifier, and a batch that is cut."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.models.vgg import VggConfig
from shardtrain.sharding.array_dims import Named
from shardtrain.sharding.resolve import resolve
from shardtrain.sharding.rules import PARAMETER_RULES

CONFIG = VggConfig(filters=4, num_groups=2, colours=1, hidden=16, classes=8)
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(4, 32, 32, 1)).astype(np.float32)
LABELS = RNG.integers(0, 8, 4)

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def abstract(config):
    return nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: config(nnx.Rngs(0))), nnx.Param))


@pytest.mark.parametrize(("depth", "kernels"), [(16, 14_714_688), (19, 20_024_384)])
def test_sizes_are_the_published_ones(depth, kernels):
    """Of the convolutions as Keras counts them without a top; norms add 2 a channel, then comes the head."""
    config = VggConfig(depth=depth, hidden=None)
    parameters = abstract(config)
    num_norm = 2 * sum(v.shape[-1] for path, v in parameters if path[-2:] == ("convolution", "bias"))
    num_head = 512 * 10 + 10
    assert num_norm == {16: 8_448, 19: 11_008}[depth]
    assert sum(math.prod(v.shape) for _, v in parameters) == kernels + num_norm + num_head
    hidden = abstract(replace(config, hidden=4096))
    more = 512 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 10 + 10
    assert sum(math.prod(v.shape) for _, v in hidden) == kernels + num_norm + more


@pytest.mark.parametrize(("depth", "num_blocks"), [(16, 13), (19, 16)])
def test_each_convolution_is_a_block(depth, num_blocks):
    config = replace(CONFIG, depth=depth)
    blocks = nnx.eval_shape(lambda: config(nnx.Rngs(0))).blocks
    assert isinstance(blocks, nnx.List)
    assert len(blocks) == config.num_blocks == num_blocks
    assert sum(block.pooled for block in blocks) == 5


def test_every_parameter_is_placed_by_the_default_rules():
    arrays = {
        "/".join(map(str, path)): Named(dims=v.get_metadata()["out_sharding"], shape=v.shape)
        for path, v in abstract(replace(CONFIG, colours=3))
    }
    specs = resolve(arrays, PARAMETER_RULES, {"fsdp": 2, "tensor": 2})
    assert specs["blocks/1/convolution/kernel"] == ((), (), ("fsdp",), ("tensor",))
    assert specs["classifier/1/kernel"] == (("tensor",), ("fsdp",))


@pytest.fixture(scope="module")
def logits(pure, quick_jit):
    """config -> logits of `IMAGES`."""
    return functools.cache(lambda config: quick_jit(pure(config).apply)(pure(config).params, IMAGES))


def test_the_image_is_halved_five_times(pure):
    module = nnx.eval_shape(lambda: CONFIG(nnx.Rngs(0)))
    sizes, x = [], jax.ShapeDtypeStruct((4, 32, 32, 1), jnp.float32)
    for block in module.blocks:
        x = jax.eval_shape(lambda block, x: block(x), block, x)
        sizes.append(x.shape[1:])
    assert sizes[1::2][:2] == [(16, 16, 4), (8, 8, 8)]
    assert [sizes[i] for i in (6, 9, 12)] == [(4, 4, 16), (2, 2, 32), (1, 1, 32)]


def test_the_classifier_has_two_hidden_layers(pure, quick_jit):
    params = pure(CONFIG).params
    filled = functools.partial(fill, CONFIG, params)
    x = RNG.normal(size=(4, 1, 1, 32)).astype(np.float32)
    first, second, third = params["classifier"].values()
    h = np.maximum(x[:, 0, 0] @ first["kernel"] + first["bias"], 0)
    h = np.maximum(h @ second["kernel"] + second["bias"], 0)
    assert_close(quick_jit(lambda: filled().last(x))(), h @ third["kernel"] + third["bias"])


def fill(config, params):
    graph, state = nnx.split(nnx.eval_shape(lambda: config(nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


@pytest.mark.full
def test_parts_in_any_order_have_the_masks_of_a_call(pure, seeded, quick_jit):
    """Each part in a program of its own, from the same seed; two calls of one model differ."""
    config = replace(CONFIG, dropout=0.5)
    params = pure(CONFIG).params

    def part(work):
        return quick_jit(lambda *given: work(seeded(config, params, 3), *given))

    x = part(lambda module: module.first(jnp.asarray(IMAGES)))()
    for share in (slice(0, 5), slice(5, 13)):
        x = part(lambda module, x, share=share: module.run(module.blocks[share], x, module.block_keys()))(x)
    logits = part(lambda module, x: module.last(x))(x)
    first, second = part(lambda module: (module(jnp.asarray(IMAGES)), module(jnp.asarray(IMAGES))))()
    assert_close(logits, first)
    assert not np.allclose(first, second)


def test_dropout_is_off_for_evaluation(pure, seeded, quick_jit, logits):
    config = replace(CONFIG, dropout=0.5)
    module = lambda: seeded(config, pure(CONFIG).params, 3, deterministic=True)  # noqa: E731
    assert_close(quick_jit(lambda: module()(jnp.asarray(IMAGES)))(), logits(CONFIG))


def test_group_norm_does_not_depend_on_how_a_batch_is_cut(pure, quick_jit, logits):
    apply = quick_jit(pure(CONFIG).apply)
    parts = [apply(pure(CONFIG).params, IMAGES[rows]) for rows in (slice(0, 3), slice(3, 4))]
    assert_close(jnp.concatenate(parts), logits(CONFIG))


def test_batch_norm_has_running_statistics(quick_jit):
    config = replace(CONFIG, norm="batch")

    def statistics(training):
        module = nnx.view(config(nnx.Rngs(0)), use_running_average=not training)
        before = nnx.state(module, nnx.BatchStat)
        before = jax.tree.map(jnp.copy, before)
        module(jnp.asarray(IMAGES))
        return before, nnx.state(module, nnx.BatchStat)

    for training in (True, False):
        before, after = quick_jit(statistics, static_argnums=0)(training)
        changed = [bool((x != y).any()) for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
        assert changed == [training] * 2 * 13


def test_remat_changes_no_number_and_every_parameter_has_a_gradient(pure, quick_jit):
    def loss(config, params):
        logits = pure(config).apply(params, IMAGES)
        return -jax.nn.log_softmax(logits)[jnp.arange(4), LABELS].mean()

    values = {
        remat: quick_jit(jax.value_and_grad(functools.partial(loss, replace(CONFIG, remat=remat))))(
            pure(CONFIG).params
        )
        for remat in (True, False)
    }
    jax.tree.map(assert_close, values[True], values[False])
    for path, gradient in jax.tree.leaves_with_path(values[False][1]):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 1e-7, path


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ({"depth": 17}, ["depth is 17; allowed are 16, 19. Use depth=16."]),
        (
            {"height": 8, "width": 40},
            [
                "height 8 is not a multiple of 2 ** poolings 32: 8 % 32 = 8. Use height=32.",
                "width 40 is not a multiple of 2 ** poolings 32: 40 % 32 = 8. Use width=32 or width=64.",
            ],
        ),
        (
            {"hidden": 0, "filters": 3, "dropout": 1.0},
            [
                "hidden is 0; it must be at least 1. Use hidden=1 or more.",
                "filters 3 is not a multiple of num_groups 2: 3 % 2 = 1. Use filters=2 or filters=4.",
                "dropout is 1.0; it must be at least 0 and below 1. Use dropout=0.0 to switch it off.",
            ],
        ),
        (
            {"hidden": None, "dropout": 0.5},
            ["dropout is 0.5 and there are no hidden features. Use dropout=0.0 or hidden=512."],
        ),
        (
            {"norm": "groups", "dtype": "bfloat"},
            [
                "norm is 'groups'; allowed are 'group', 'batch'. Use norm='group'.",
                "dtype is 'bfloat'; allowed are 'float32', 'bfloat16', 'float16'. Use dtype='bfloat16'.",
            ],
        ),
    ],
)
def test_every_problem_of_a_configuration_is_reported(change, problems):
    with pytest.raises(ValueError, match="VggConfig") as error:
        replace(CONFIG, **change)
    assert str(error.value).splitlines() == ["VggConfig:", *(f"  {problem}" for problem in problems)]
