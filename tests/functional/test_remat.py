"""The option `remat` of a strategy: the same gradients, and less kept for the backward pass."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_language_model import TinyConfig

from shardtrain.functional.nnx_model import convert_model
from shardtrain.functional.remat import apply_remat
from shardtrain.functional.remat_counts import RematCounts
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.resnet import ResNetConfig
from shardtrain.trainer.config import Run, make_model
from shardtrain.trainer.strategy import Strategy


class Deep(nnx.Module):
    """Layers whose elementwise results a backward pass may compute again."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.sin(jnp.tanh(self.dropout(layer(x))))
        return x


X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)


def loss(model):
    params, state = model.init(jax.random.key(0))
    return params, lambda params: (model.apply(params, state, jax.random.key(1), True, X)[0] ** 2).sum()


def kept_bytes(model):
    params, of = loss(model)
    kept = jax.eval_shape(lambda params: jax.vjp(of, params)[1], params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))


def test_any_model_keeps_less_and_has_the_same_gradients():
    plain, changed = convert_model(Deep), apply_remat(Deep, "dots")
    params, of = loss(plain)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-6),
        jax.grad(loss(changed)[1])(params),
        jax.grad(of)(params),
    )
    assert kept_bytes(changed) < kept_bytes(plain)
    # evaluation, and the names of dims, are as they were
    assert changed.apply(params, {}, jax.random.key(1), False, X)[0].shape == X.shape
    assert changed.dims == plain.dims


def test_the_parts_of_a_pipeline_are_recomputed_and_inputs_that_are_no_arrays_stay():
    def kept(model):
        params, state = model.init(jax.random.key(0))
        tokens = jnp.zeros((2, 4), jnp.int32)
        key = jax.random.key(0)
        shapes = jax.eval_shape(lambda p: model.chain.first(p, state, key, True, tokens)[0], params)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        blocks = {"blocks": params["blocks"]}

        def run(blocks):
            return model.chain.run(blocks, state, key, True, 0, 3, zeros)[0]

        return str(jax.make_jaxpr(run)(blocks))

    plain = convert_model(TinyConfig(num_layers=3, seq=4))
    # the policy is an object of a class Dots or, in jax 0.12, a function dots_...
    assert "dots" in kept(apply_remat(plain, "dots")).lower()
    assert "dots" not in kept(plain).lower()

    class Flagged(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x, twice, name):
            x = self.layer(x)
            return 2 * x if twice and name == "double" else x

    model = apply_remat(Flagged, "dots")
    params, state = model.init(jax.random.key(0))
    for twice in (True, False):
        found, _ = model.apply(params, state, jax.random.key(1), True, X, twice, "double")
        np.testing.assert_allclose(
            found,
            (1 + twice)
            * convert_model(Flagged).apply(params, state, jax.random.key(1), True, X, False, "")[0],
        )


def test_a_model_with_the_option_is_given_it():
    sizes: Any = {"vocab": 8, "seq": 4, "embed": 8, "num_layers": 2, "num_heads": 2}
    assert apply_remat(DecoderConfig(**sizes), "full") == DecoderConfig(**sizes, remat="full")
    assert apply_remat(DecoderConfig(**sizes, remat="dots"), None) == DecoderConfig(**sizes, remat="dots")
    assert apply_remat(ResNetConfig(), "full").remat
    assert not apply_remat(ResNetConfig(remat=True), "none").remat


def test_the_strategy_of_a_run_says_it():
    data = SimpleNamespace(train=list, heldout=list)
    plain, changed = (
        make_model(Run(model=Deep, data=data, strategy=Strategy(remat=remat))) for remat in (None, "dots")
    )
    assert kept_bytes(changed) < kept_bytes(plain)


@dataclass(frozen=True)
class OnePolicy:
    remat: str = "none"


@pytest.mark.parametrize(
    ("model", "remat", "words"),
    [
        (Deep, "full", "no field remat to recompute its blocks by; use none, weights, dots"),
        (ResNetConfig(), "dots", "is on or off; use none or full"),
        (Deep, RematCounts(full=1, none=2), "remat is 'full=1,none=2', and this model has no field remat"),
        (OnePolicy(), RematCounts(full=1, none=2), "and this model has one policy for all its blocks"),
    ],
    ids=["no blocks", "on or off", "counts of no blocks", "counts of blocks that are alike"],
)
def test_what_a_model_cannot_recompute_is_refused(model, remat, words):
    with pytest.raises(ValueError, match=words):
        apply_remat(model, remat)
