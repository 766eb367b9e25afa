"""Products in 8 bits: their numbers by hand, the same on any mesh, and a model that learns with them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from shardtrain.functional.loss import next_token_loss
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder import EncoderConfig
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.experts_options import Experts
from shardtrain.models.float8 import LARGEST, multiply, round_values
from shardtrain.models.ops import PLAIN

RANDOM = np.random.default_rng(0)
X_BTD: Any = RANDOM.standard_normal((2, 6, 16)).astype(np.float32)
KERNEL: Any = RANDOM.standard_normal((16, 3, 5)).astype(np.float32)
DY = RANDOM.standard_normal((2, 6, 3, 5)).astype(np.float32)
SIZES: dict[str, Any] = {"vocab": 32, "seq": 8, "embed": 16, "num_heads": 4}
DIMS = (None, None, None)
LLAMA = DecoderConfig(
    vocab=32, seq=8, embed=32, num_layers=2, num_heads=8, num_kv_heads=4, mlp=64, positions="rotary",
    norm="rmsnorm", activation="swiglu", bias=False, products="float8",
)  # fmt: skip


def by_hand(x, axes):
    """Values that went through 8 bits, with one scale along the axes."""
    scale = np.abs(x).max(axes, keepdims=True) / np.float32(LARGEST)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def test_products_and_the_gradient_of_the_input_are_those_of_rounded_operands():
    y, pull = jax.vjp(lambda x, kernel: multiply(PLAIN, x, kernel, DIMS, 1, "float8"), X_BTD, KERNEL)
    dx, dkernel = pull(DY)
    x, kernel, dy = by_hand(X_BTD, -1), by_hand(KERNEL, (0, 1, 2)), by_hand(DY, (-2, -1))
    np.testing.assert_allclose(y, np.tensordot(x, kernel, 1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum("BTHK,DHK->BTD", dy, kernel), rtol=1e-5, atol=1e-5)
    # a sum over tokens, which have a scale each: not rounded
    np.testing.assert_allclose(dkernel, np.einsum("BTD,BTHK->DHK", X_BTD, DY), rtol=1e-5, atol=1e-5)
    # and rounding does something, but little
    exact = np.tensordot(X_BTD, KERNEL, 1)
    assert 0.005 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.05


def test_several_dims_go_in():
    x, kernel = X_BTD.reshape(2, 6, 4, 4), KERNEL.reshape(4, 4, 15)
    one = multiply(PLAIN, X_BTD, KERNEL.reshape(16, 15), (None, None), 1, "float8")
    np.testing.assert_array_equal(multiply(PLAIN, x, kernel, DIMS, 2, "float8"), one)


def test_a_row_is_the_same_whatever_stands_beside_it():
    beside = np.concatenate([X_BTD, 1e4 * X_BTD])
    product = jax.jit(lambda x: multiply(PLAIN, x, KERNEL, DIMS, 1, "float8"))
    alone, together = product(X_BTD), product(beside)
    np.testing.assert_allclose(together[:2], alone, rtol=1e-6)


def test_zeros_stay_zeros_and_what_is_not_finite_shows():
    x: Any = np.stack([np.zeros(16), np.full(16, np.inf), np.full(16, np.nan)]).astype(np.float32)[None]
    y = np.asarray(multiply(PLAIN, x, KERNEL, DIMS, 1, "float8"))
    assert not y[0, 0].any()
    assert np.isnan(y[0, 1:]).all()


def loss_of(config, pure, params=None):
    model = pure(config)
    tokens = np.arange(9)[None] * np.arange(1, 5)[:, None] % 32
    batch = {"tokens": tokens.astype(np.int32), "weights": np.ones(4, np.float32)}

    def loss(params):
        total, count = next_token_loss(lambda *inputs: model.apply(params, *inputs), batch)
        return total / count

    return loss, model.params if params is None else params


@pytest.mark.parametrize("scan", [True, False])
def test_two_of_three_products_of_a_block_are_in_8_bits(scan, pure):
    """Of queries, keys and values; of the output; of up and gate; of down: forward and for their input."""
    loss, params = loss_of(replace(LLAMA, scan=scan, remat="none"), pure)
    lines = jax.jit(jax.grad(loss)).lower(params).as_text().splitlines()
    in_8_bits = [line for line in lines if "dot_general" in line and line.count("f8E4M3FN>") == 2]
    assert len(in_8_bits) == 2 * 4 * (1 if scan else LLAMA.num_layers)


@pytest.mark.parametrize(
    ("config", "num_inputs"),
    [
        (EncoderConfig(**SIZES, num_layers=1), 1),
        pytest.param(
            EncoderDecoderConfig(**SIZES, num_encoder_layers=1, num_decoder_layers=1),
            2,
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_other_transformers_have_them_too(config, num_inputs, pure):
    tokens = [jnp.ones((2, 8), jnp.int32)] * num_inputs
    plain = pure(config)
    exact = plain.apply(plain.params, *tokens)
    found = pure(replace(config, products="float8")).apply(plain.params, *tokens)
    difference = np.abs(np.asarray(found) - np.asarray(exact)).max()
    assert 0 < difference < 0.1 * np.abs(np.asarray(exact)).max()


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="products is 'int8'"):
        replace(LLAMA, products="int8")


def test_values_too_small_for_a_scale_are_rounded_to_numbers_and_those_not_finite_still_show():
    values, scale = round_values(jnp.array([[3e-36, 0.0], [0.0, 0.0], [jnp.inf, 1.0], [jnp.nan, 1.0]]), 1)
    found = np.asarray(values.astype(jnp.float32) * scale)
    assert np.isfinite(found[:2]).all()
    assert not found[1].any()
    assert np.isnan(found[2:]).any(1).all()


def test_experts_and_products_in_8_bits_are_refused_together():
    with pytest.raises(ValueError, match="experts compute in dtype, and products is 'float8'"):
        replace(LLAMA, experts=Experts(num=4))
