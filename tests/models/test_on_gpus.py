"""The forms of models for GPUs, traced on a CPU: the same loss and gradients, and what their program is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_models import make_loss

from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder import EncoderConfig
from shardtrain.models.layers import Norm, lookup
from shardtrain.models.lora import Lora
from shardtrain.models.ops import GpuOps, OneGpuOps, Ops, set_ops
from shardtrain.models.vit import VitConfig

SIZES: Any = {"vocab": 16, "seq": 6, "embed": 8, "num_layers": 2, "num_heads": 2}
GPT = DecoderConfig(**SIZES)
LLAMA = DecoderConfig(
    **{**SIZES, "num_heads": 4}, num_kv_heads=2, positions="rotary", norm="rmsnorm", activation="swiglu",
    bias=False, qk_norm=True,
)  # fmt: skip
ONE_GPU, GPUS = OneGpuOps(), GpuOps()
TOKENS = jnp.asarray(np.arange(12).reshape(2, 6) % 7)


def loss_of(config, inputs=TOKENS, *, ops: Ops = ONE_GPU):
    """A loss of a model with these operations, under rules of one device or of two, and its parameters."""
    return make_loss(config, inputs, ops, 1 if ops == ONE_GPU else 2)


def program(loss, params):
    return str(jax.make_jaxpr(jax.grad(loss))(params))


IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 3)), jnp.float32)


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        pytest.param(GPT, TOKENS, marks=pytest.mark.full),
        pytest.param(LLAMA, TOKENS, marks=pytest.mark.full),
        pytest.param(DecoderConfig(**SIZES, remat="outputs"), TOKENS, marks=pytest.mark.full),
        (DecoderConfig(**{**SIZES, "num_layers": 1}, lora=Lora(rank=2), activation="geglu"), TOKENS),
        pytest.param(EncoderConfig(**SIZES), TOKENS, marks=pytest.mark.full),
        pytest.param(
            VitConfig(height=8, width=8, patch=4, classes=4, embed=8, num_layers=2, num_heads=2),
            IMAGES,
            marks=pytest.mark.full,
        ),
    ],
    ids=["gpt", "llama", "outputs", "lora", "encoder", "vit"],
)
def test_loss_and_gradients_are_those_of_the_plain_form(config, inputs):
    loss, params = loss_of(config, inputs, ops=Ops())
    plain = jax.jit(jax.value_and_grad(loss))(params)
    assert "layout_constraint" not in program(loss, params)
    loss, params = loss_of(config, inputs)
    found = jax.jit(jax.value_and_grad(loss))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, plain)
    _, along = jax.jvp(jax.jit(loss), (params,), (params,))
    products = jax.tree.map(lambda x, g: jnp.vdot(x, g), params, found[1])
    np.testing.assert_allclose(along, sum(jax.tree.leaves(products)), rtol=1e-4)


def test_the_residual_stream_keeps_its_layout_and_blocks_of_one_gpu_are_plain_code():
    text = program(*loss_of(GPT))
    # of the stream, and of its gradient
    assert text.count("layout_constraint") == 2
    assert "unroll=2" in text
    assert "unroll=1" in program(
        *loss_of(DecoderConfig(**{**SIZES, "num_layers": ONE_GPU.most_unrolled + 1}))
    )
    assert "unroll=1" in program(*loss_of(GPT, ops=GPUS))


def test_queries_keys_and_values_of_one_gpu_are_joined_in_blocks():
    # all heads of 4 queries, 2 keys and 2 values of 2 features; else groups of 2 queries, a key and a value
    assert "8,1,8,2]" in program(*loss_of(LLAMA))
    assert "8,2,4,2]" in program(*loss_of(LLAMA, ops=GPUS))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "rmsnorm_plus_one"])
def test_a_norm_far_from_0_has_the_gradient_of_the_plain_form(kind):
    norm = Norm(kind, 8, eps=1e-5, bias=True, dtype="bfloat16")
    x = (1000 + 100 * jax.random.normal(jax.random.key(0), (3, 8))).astype(jnp.bfloat16)
    weights = jnp.sin(jnp.arange(24.0)).reshape(3, 8)

    def gradient(x, ops: Ops = GPUS):
        set_ops(norm, ops)
        found = jax.grad(lambda x: (norm(x).astype(jnp.float32) * weights).sum())
        return found(x).astype(jnp.float32), str(jax.make_jaxpr(found)(x)).count("optimization_barrier")

    found, num_barriers = gradient(x)
    assert num_barriers > 0
    # in float32 the derivative is that of the plain form, in which no digit is lost
    assert gradient(x.astype(jnp.float32))[1] == 0
    plain, num_barriers = gradient(x, Ops())
    assert num_barriers == 0
    np.testing.assert_allclose(found, plain, rtol=2**-7, atol=1e-5)


def test_gelu_in_16_bits_is_the_tanh_approximation_rounded_once():
    tanh_gelu = GPUS.tanh_gelu
    x = jnp.linspace(-8, 8, 999).astype(jnp.bfloat16)
    exact = jax.nn.gelu(x.astype(jnp.float32), approximate=True)
    np.testing.assert_allclose(tanh_gelu(x).astype(jnp.float32), exact, rtol=2**-8, atol=2e-5)
    by_jax = jnp.abs(jax.nn.gelu(x, approximate=True).astype(jnp.float32) - exact)
    assert jnp.abs(tanh_gelu(x).astype(jnp.float32) - exact).mean() < 0.7 * by_jax.mean()
    wide = x.astype(jnp.float32)
    np.testing.assert_array_equal(tanh_gelu(wide), jax.nn.gelu(wide, approximate=True))


def test_a_row_that_is_looked_up_often_gets_its_whole_gradient():
    table, indices = jnp.ones((3, 2), jnp.bfloat16), jnp.zeros(4096, jnp.int32).at[7].set(2)
    gradient = jax.grad(lambda table: lookup(table, indices).astype(jnp.float32).sum())(table)
    # in 16 bits a sum of ones ends at 256
    np.testing.assert_array_equal(gradient, jnp.asarray([[4096, 4096], [0, 0], [1, 1]], jnp.bfloat16))
    assert jnp.isnan(lookup(table, jnp.asarray([3]))).all()


def stacked_elements(loss, params):
    """The elements that the scan over blocks stores for its backward pass."""
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    forward = next(each for each in jaxpr.eqns if each.primitive.name == "scan")
    return sum(v.aval.size for v in forward.outvars if v.aval.shape[:1] == (GPT.num_layers,))


def test_one_gpu_stores_what_norms_and_activations_read_alone():
    config = DecoderConfig(**{**SIZES, "remat": "none"})
    stored = stacked_elements(*loss_of(config, ops=Ops()))
    assert stacked_elements(*loss_of(config)) < 0.8 * stored


def test_a_scan_on_several_gpus_stores_products_and_no_elementwise_results():
    loss, params = loss_of(GPT, ops=Ops())
    plain = jax.jit(jax.value_and_grad(loss))(params)
    stored = stacked_elements(loss, params)
    loss, _ = loss_of(GPT, ops=GPUS)
    assert stacked_elements(loss, params) < 0.6 * stored
    found = jax.jit(jax.value_and_grad(loss))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, plain)
