"""The option `compute_dtype` of a strategy: what is computed in it, and what stays float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_language_model import TinyConfig

from shardtrain.functional.compute_dtype import set_compute_dtype
from shardtrain.functional.nnx_model import convert_model
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.resnet import ResNetConfig

KEY, TOKENS = jax.random.key(0), np.arange(16, dtype=np.int32).reshape(2, 8)


class Normed(nnx.Module):
    """A layer with batch statistics; inputs are floats."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


def products(model, *inputs):
    """The dtypes of matrix products in a loss and its gradient."""
    params, state = model.init(KEY)

    def loss(params):
        outputs, after = model.apply(params, state, KEY, True, *inputs)
        assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]
        assert outputs.dtype == jnp.float32
        return outputs.sum()

    program = jax.make_jaxpr(jax.grad(loss))(params)
    assert all(x.dtype == jnp.float32 for x in program.out_avals)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    return {
        each.outvars[0].aval.dtype.name for each in program.jaxpr.eqns if each.primitive.name == "dot_general"
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("model", "inputs"),
    [(TinyConfig(num_layers=1), TOKENS), (Normed, np.ones((2, 4), np.float32))],
    ids=["a config without a dtype", "a module with statistics"],
)
def test_any_model_computes_in_it_and_its_parameters_stay(model, inputs, dtype):
    assert products(set_compute_dtype(model, dtype), inputs) == {dtype}


def test_its_parts_in_a_pipeline_are_those_of_a_call():
    dtype = "bfloat16"
    model = set_compute_dtype(TinyConfig(num_layers=2), dtype)
    params, state = model.init(KEY)
    expected, _ = model.apply(params, state, KEY, False, TOKENS)
    assert model.chain is not None
    x, _ = model.chain.first(params, state, KEY, False, TOKENS)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(x)} == {dtype}
    x, _ = model.chain.run(params, state, KEY, False, 0, 2, x)
    got, _ = model.chain.last(params, state, KEY, False, x)
    np.testing.assert_allclose(got, expected, 1e-2, 1e-3)


def test_a_config_with_a_dtype_is_given_it():
    sizes: dict[str, Any] = {"vocab": 8, "seq": 4, "embed": 4, "num_layers": 1, "num_heads": 1}
    changed = set_compute_dtype(DecoderConfig(**sizes, dtype="bfloat16"), "float16")
    assert changed == DecoderConfig(**sizes, dtype="float16")
    assert set_compute_dtype(ResNetConfig(), None) == ResNetConfig()
    assert convert_model(changed)
