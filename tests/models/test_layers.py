"""The layers shared by the models, against their definitions in numpy."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from shardtrain.models.layers import Norm
from shardtrain.models.ops import find_devices
from shardtrain.models.rotary import compute_frequencies, rotate
from shardtrain.models.transformer import FeedForward
from shardtrain.models.transformer_options import BlockOptions

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def turned(x, theta):
    return rotate(x, compute_frequencies(theta, x.shape[-1])[0])


def test_angles_are_float32_also_in_bfloat16():
    x = jnp.ones((1, 300, 1, 2))
    exact, rounded = turned(x, 100.0), turned(x.astype(jnp.bfloat16), 100.0)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=6e-3)


H100, V100 = (SimpleNamespace(device_kind=kind) for kind in ("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB"))


def test_the_devices_are_those_of_the_mesh_that_is_compiled_for(monkeypatch):
    mesh = Mesh(np.array(jax.devices()), ("data",)).abstract_mesh
    cpus = jax.local_devices()
    monkeypatch.setattr(jax, "local_devices", lambda: [H100, V100, *cpus])
    assert find_devices() == [H100, V100, *cpus]
    with jax.sharding.use_abstract_mesh(mesh):
        assert find_devices() == cpus


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_is_float32_inside(kind):
    norm = Norm(kind, 16, eps=1e-5, bias=True, dtype="bfloat16")
    norm.scale[...] = normal(16)
    x = normal(4, 16) * 300 + 1000
    centred = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(norm.scale[...])
    y = norm(jnp.asarray(x))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=1e-2, atol=1e-2)
    assert (norm.bias is not None) == (kind == "layernorm")


def test_a_gated_feed_forward_has_a_bias_of_each_projection():
    options = BlockOptions(vocab=4, seq=4, embed=6, num_heads=2, num_layers=1, mlp=8, activation="swiglu")
    layer: Any = FeedForward(options, rngs=nnx.Rngs(0))
    for number, linear in enumerate((layer.up, layer.gate, layer.down), 1):
        linear.bias[...] += number * jnp.arange(len(linear.bias[...]))
    x = jnp.asarray(normal(2, 4, 6))
    hidden = layer.up(x) * jax.nn.silu(layer.gate(x))
    np.testing.assert_allclose(layer(x), layer.down(hidden), rtol=1e-5, atol=1e-6)
