"""The forms of a model for one CPU: the same loss and gradients, and the program that XLA compiles well."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bare_models import make_loss
from flax import nnx

import shardtrain as st
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.ops import GpuOps, Ops
from shardtrain.models.ops.cpus import OneCpuOps
from shardtrain.models.ops.kernel_product import kernel_product
from shardtrain.models.transformer import exact_gelu
from shardtrain.plan.compile import compile_step
from shardtrain.system.xla_flags import step_options

CONFIG = DecoderConfig(vocab=16, seq=6, embed=8, num_layers=2, num_heads=2, activation="gelu_erf", bias=False)
TOKENS = jnp.asarray(np.arange(12).reshape(2, 6) % 7)


def loss_of(config, ops=None):
    """A loss of a model under the rules of one device, and its parameters."""
    return make_loss(config, TOKENS, ops)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"scan": False}, marks=pytest.mark.full), {"scan": False, "remat": "full"}],
    ids=["scanned", "unrolled", "full"],
)
def test_loss_and_gradients_are_those_of_the_plain_form(options):
    loss, params = loss_of(CONFIG, Ops())
    plain = jax.jit(jax.value_and_grad(loss))(params)
    loss, _ = loss_of(DecoderConfig(**{**vars(CONFIG), **options}))
    found = jax.jit(jax.value_and_grad(loss))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, plain)


def test_models_have_derivatives_forward_and_of_many():
    loss, params = loss_of(CONFIG)
    loss = jax.jit(loss)
    _, along = jax.jvp(loss, (params,), (params,))
    gradient = jax.grad(loss)(params)
    products = jax.tree.map(lambda x, g: jnp.vdot(x, g), params, gradient)
    np.testing.assert_allclose(along, sum(jax.tree.leaves(products)), rtol=1e-4)
    several = jax.vmap(lambda factor: loss(jax.tree.map(lambda x: x * factor, params)))(jnp.ones(2))
    np.testing.assert_allclose(several, loss(params), rtol=1e-5)


def test_the_form_is_for_one_cpu_alone():
    loss, params = loss_of(CONFIG)
    here = str(jax.make_jaxpr(jax.grad(loss))(params))
    # two barriers of a block forward, two of the gradient
    assert here.count("optimization_barrier") >= 4
    assert f"unroll={CONFIG.num_layers}" in here
    elsewhere = str(jax.make_jaxpr(jax.grad(loss_of(CONFIG, GpuOps())[0]))(params))
    assert "optimization_barrier" not in elsewhere
    assert "unroll=1" in elsewhere
    # outside of a run: for any of the simulated devices
    graph, _ = nnx.split(CONFIG(nnx.Rngs(0)), nnx.Param)
    assert "optimization_barrier" not in str(jax.make_jaxpr(lambda p: nnx.merge(graph, p)(TOKENS))(params))


def test_many_blocks_stay_a_loop_and_what_is_recomputed_too():
    many, params = loss_of(DecoderConfig(**{**vars(CONFIG), "num_layers": OneCpuOps.most_unrolled + 1}))
    assert "unroll=1" in str(jax.make_jaxpr(many)(params))
    full, params = loss_of(DecoderConfig(**{**vars(CONFIG), "remat": "full"}))
    assert "unroll=1" in str(jax.make_jaxpr(full)(params))


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_compiled_step_keeps_the_barriers(num_devices):
    model, layout = st.from_nnx(CONFIG), st.Layout()
    mesh = st.make_mesh(layout, jax.devices()[:num_devices])
    optimizer = optax.sgd(0.1)
    placement = st.make_placement(model, optimizer, layout, mesh)
    batch = {
        "tokens": jax.ShapeDtypeStruct((2, 6), jnp.int32),
        "weights": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    text = compile_step(model, st.next_token_loss, optimizer, placement, batch).as_text() or ""
    # of each half of a block, forward and backward; of a jaxlib that was not tried nothing is asked
    kept = 4 * CONFIG.num_layers - 2 if step_options("cpu") else 0
    assert text.count(" opt-barrier(") >= kept
    assert " while(" not in text.split("ENTRY")[1]


def sine_of_product(product):
    return lambda x, kernel: jnp.sin(product(x, kernel)).sum()


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: jax.grad(f, (0, 1)),
        lambda f: jax.jit(jax.hessian(f, (0, 1))),
        lambda f: jax.jit(lambda x, kernel: jax.jvp(f, (x, kernel), (x, kernel))),
        lambda f: lambda x, kernel: jax.vmap(jax.grad(f, 1), (None, 0))(x, jnp.stack([kernel, 2 * kernel])),
        lambda f: jax.vmap(lambda x, kernel: jax.jvp(partial(f, x), (kernel,), (kernel,)), (0, None)),
        lambda f: jax.grad(jax.checkpoint(f), 1),
    ],
    ids=["reverse", "hessian", "forward", "reverse of many", "forward of many", "recomputed"],
)
def test_derivatives_of_the_product_with_a_kernel(derivative):
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 2, 3)
    kernel = np.linspace(-2, 1, 12, dtype=np.float32).reshape(3, 4)
    found, expected = (derivative(sine_of_product(each))(x, kernel) for each in (kernel_product, jnp.matmul))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_the_gradient_of_a_kernel_is_one_product_of_two_matrices():
    x, kernel = jnp.ones((2, 2, 3)), jnp.ones((3, 4))
    text = str(jax.make_jaxpr(jax.grad(sine_of_product(kernel_product), 1))(x, kernel))
    # a product forward and one for the kernel; none for the activations, which have no tangent
    assert text.count("dot_general[") == 2
    assert "transpose" not in text
    assert "product_with_tangent" not in text


def test_exact_gelu():
    x = jnp.linspace(-9, 9, 1001)
    expected = jax.nn.gelu(x, approximate=False)
    np.testing.assert_allclose(exact_gelu(x), expected, rtol=1e-6, atol=1e-6)
    slope = jax.grad(lambda x: exact_gelu(x).sum())(x)
    slope_expected = jax.grad(lambda x: jax.nn.gelu(x, approximate=False).sum())(x)
    np.testing.assert_allclose(slope, slope_expected, atol=1e-6)
    half = jnp.asarray(x, jnp.bfloat16)
    assert (exact_gelu(half) == jax.nn.gelu(half, approximate=False)).all()
