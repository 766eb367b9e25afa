"""The linen decoder is the nnx decoder: the same tree, dims, initial scale and numbers."""

import functools
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.linen_decoder import LinenDecoder

CONFIG = DecoderConfig(vocab=32, seq=8, embed=16, num_layers=2, num_heads=4)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 8), dtype=np.int32)


def is_boxed(x):
    return isinstance(x, nn.Partitioned)


@pytest.fixture(scope="module")
def boxed(quick_jit) -> Any:
    return quick_jit(LinenDecoder(CONFIG).init)(jax.random.key(1), TOKENS)["params"]


def test_same_names_shapes_and_dims(pure, boxed):
    assert jax.tree.map(lambda x: x.names, boxed, is_leaf=is_boxed) == pure(CONFIG).dims
    assert jax.tree.map(jnp.shape, nn.unbox(boxed)) == jax.tree.map(np.shape, pure(CONFIG).params)


def test_same_initial_spread(boxed, quick_jit):
    theirs = quick_jit(lambda: nnx.state(CONFIG(nnx.Rngs(0))))()
    spread, expected = (
        jax.tree.map(lambda x: float(x.std()), tree) for tree in (nn.unbox(boxed), nnx.to_pure_dict(theirs))
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0.25), spread, expected)


def test_same_logits_and_gradients(pure, quick_jit):
    linen = LinenDecoder(CONFIG)

    def compute(apply):
        def loss(params):
            logits = apply(params, TOKENS)
            return jnp.square(logits).mean(), logits

        return quick_jit(jax.value_and_grad(loss, has_aux=True))(pure(CONFIG).params)

    ours = compute(lambda params, x: linen.apply({"params": params}, x))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, compute(pure(CONFIG).apply)
    )


@pytest.mark.parametrize(("changes", "atol"), [({"scan": False}, 1e-5), ({"dtype": "bfloat16"}, 0.05)])
def test_same_logits_with_other_options(changes, atol, pure, quick_jit):
    config = replace(CONFIG, **changes)
    ours = quick_jit(LinenDecoder(config).apply)({"params": pure(CONFIG).params}, TOKENS)
    np.testing.assert_allclose(
        ours, quick_jit(pure(config).apply)(pure(CONFIG).params, TOKENS), rtol=0, atol=atol
    )


def test_remat_keeps_less(pure):
    def count_kept(remat):
        apply = LinenDecoder(replace(CONFIG, remat=remat)).apply

        def loss(params):
            return jnp.square(jnp.asarray(apply({"params": params}, TOKENS))).mean()

        kept = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], pure(CONFIG).params)
        return sum(x.size for x in jax.tree.leaves(kept))

    assert count_kept("outputs") < count_kept("none") / 2


def test_dropout_follows_train(pure, quick_jit):
    def logits(rate, **options) -> Any:
        apply = LinenDecoder(replace(CONFIG, dropout=rate)).apply
        return quick_jit(functools.partial(apply, **options))({"params": pure(CONFIG).params}, TOKENS)

    off = logits(0.5)
    on = [logits(0.5, train=True, rngs={"dropout": jax.random.key(i)}) for i in range(2)]
    np.testing.assert_array_equal(off, logits(0.0))
    assert not np.allclose(on[0], off)
    assert not np.allclose(on[0], on[1])


def test_refuses_options_it_does_not_have():
    module = LinenDecoder(replace(CONFIG, norm="rmsnorm", num_kv_heads=2))
    with pytest.raises(ValueError, match="LinenDecoder") as error:
        jax.eval_shape(module.init, jax.random.key(0), TOKENS)
    assert str(error.value).splitlines() == [
        "LinenDecoder:",
        "  - norm is 'rmsnorm'; the linen model has 'layernorm' only. Use norm='layernorm', or Decoder.",
        "  - num_kv_heads is 2; the linen model has 4 only. Use num_kv_heads=4, or Decoder.",
    ]


@pytest.mark.parametrize(
    "change",
    [
        *({"window": 4}, {"embed_scale": 2.0}, {"soft_cap": 2.0}, {"qkv_bias": False}),
        *({"logits_soft_cap": 1.0}, {"post_norm": True}, {"query_scale": 2.0}),
    ],
)
def test_refuses_what_only_the_other_decoder_has(change):
    module = LinenDecoder(replace(CONFIG, **change))
    with pytest.raises(ValueError, match=f"{next(iter(change))} is .*; the linen model has"):
        jax.eval_shape(module.init, jax.random.key(0), TOKENS)


def test_refuses_tokens_longer_than_seq():
    with pytest.raises(ValueError, match="tokens of length 9 were given to a decoder of seq=8"):
        jax.eval_shape(LinenDecoder(CONFIG).init, jax.random.key(0), jnp.zeros((1, 9), jnp.int32))
