"""Logits in chunks: the numbers of plain logits, for every head, and never more than a chunk of them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardtrain.functional.cross_entropy import cross_entropy
from shardtrain.functional.loss import Regularized, masked_token_loss, next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.chunked_logits import ChunkedLogits
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder import EncoderConfig
from shardtrain.plan.compile import compile_step, describe_devices, figures
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import make_placement

RANDOM = np.random.default_rng(0)
SIZES: dict[str, Any] = {"vocab": 48, "seq": 7, "embed": 16, "num_heads": 4}
GPT = DecoderConfig(**SIZES, num_layers=1)
TOKENS = RANDOM.integers(0, 48, (3, 8), dtype=np.int32)
# a row of padding; 21 targets, so that no chunk but one of 7 divides them
BATCH: dict[str, Any] = {"tokens": TOKENS, "weights": np.array([1, 1, 0], np.float32)}
MASKED = {**BATCH, "tokens": TOKENS[:, 1:], "targets": TOKENS[:, :-1], "chosen": TOKENS[:, 1:] % 2}
REGULARIZED = Regularized(next_token_loss, label_smoothing=0.2, z_loss=0.01)
HEADS = {
    "regularized": (GPT, REGULARIZED, BATCH),
    "tied": (GPT, next_token_loss, BATCH),
    "untied": (replace(GPT, tied=False), next_token_loss, BATCH),
    "bfloat16": (replace(GPT, dtype="bfloat16"), next_token_loss, BATCH),
    "encoder": (EncoderConfig(**SIZES, num_layers=1), masked_token_loss, MASKED),
}


def loss_and_gradients(config, loss, batch, pure, quick_jit):
    model = pure(replace(config, loss_chunk=None))
    apply = pure(config).apply

    def of(params):
        total, count, *_ = loss(lambda *inputs: apply(params, *inputs), batch)
        return total / count

    return quick_jit(jax.value_and_grad(of))(model.params)


@pytest.mark.parametrize(
    ("head", "chunk"),
    [
        *((head, 7 if head == "untied" else 5) for head in HEADS),
        pytest.param("tied", 1000, marks=pytest.mark.full),
    ],
)
def test_loss_and_gradients_are_those_of_plain_logits(head, chunk, pure, quick_jit):
    config, loss, batch = HEADS[head]
    plain = loss_and_gradients(config, loss, batch, pure, quick_jit)
    found = loss_and_gradients(replace(config, loss_chunk=chunk), loss, batch, pure, quick_jit)
    # in 16 bits the order of sums within a product decides how its result is rounded
    atol = 3e-3 if jax.__version_info__ >= (0, 11) else 2e-3
    near: Any = {"rtol": 2e-2, "atol": atol} if head == "bfloat16" else {"rtol": 1e-6, "atol": 1e-6}
    for (path, got), expected in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, expected, **near, err_msg=jax.tree_util.keystr(path))


def test_small_gradients_are_kept_in_float16_by_the_scale_of_the_loss():
    random = np.random.default_rng(1)
    hidden = jnp.asarray(random.normal(size=(2, 4, 8)), jnp.float16)
    kernel = jnp.asarray(4 * random.normal(size=(512, 8)), jnp.float16)
    targets = jnp.asarray(TOKENS[:2, :4])

    def gradient(dtype: Any) -> Any:
        def scaled(kernel):
            logits: Any = ChunkedLogits(
                hidden_BTD=hidden.astype(dtype),
                kernel=kernel.astype(dtype),
                bias_V=None,
                kernel_dims=("vocab", "embed"),
                chunk=3,
            )
            return 2.0**8 * cross_entropy(logits, targets)[0]

        return np.asarray(jax.jit(jax.grad(scaled))(kernel.astype(jnp.float32)))

    expected = gradient(jnp.float32)
    # without the scale float16 has 0 in their place
    small = np.abs(expected) < 2.0**8 * 2.0**-25
    assert small.mean() > 0.1
    np.testing.assert_allclose(gradient(jnp.float16)[small], expected[small], rtol=2e-2, atol=1e-6)


def test_a_target_out_of_range_gives_nan_unless_it_is_padding(pure, quick_jit):
    model, chunked = pure(GPT), pure(replace(GPT, loss_chunk=5))
    tokens: Any = TOKENS.copy()
    tokens[2, 3:] = -100

    @quick_jit
    def of(weights: Any):
        def apply(tokens):
            return chunked.apply(model.params, jnp.abs(tokens) % 48)

        return next_token_loss(apply, {"tokens": tokens, "weights": weights})[0]

    assert np.isfinite(of(BATCH["weights"]))
    assert np.isnan(of(np.ones(3, np.float32)))


def test_tokens_are_read_one_by_one_or_all(pure):
    plain = pure(GPT).apply(pure(GPT).params, TOKENS[:, 1:])
    logits = pure(replace(GPT, loss_chunk=5)).apply(pure(GPT).params, TOKENS[:, 1:])
    assert isinstance(logits, ChunkedLogits)
    assert (logits.shape, logits.dtype) == (plain.shape, plain.dtype)
    np.testing.assert_allclose(logits.whole(), plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logits[:, -1], plain[:, -1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(logits.argmax(-1), plain.argmax(-1))
    with pytest.raises(ValueError, match="allowed: rows and positions"):
        logits[:, -1, 0]
    with pytest.raises(ValueError, match="allowed: -1"):
        logits.argmax(0)


def test_a_chunk_below_one_is_refused():
    with pytest.raises(ValueError, match="loss_chunk is 0; it must be at least 1"):
        replace(GPT, loss_chunk=0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "loss"),
    [
        pytest.param({"data": 1}, next_token_loss, id="1 device"),
        pytest.param({"fsdp": 2, "tensor": 2}, REGULARIZED, id="4 devices, regularized"),
    ],
)
def test_a_step_holds_an_eighth_of_the_logits_at_most(mesh, loss):
    """The compiler's figures: 1,024 tokens a device, chunks of 16."""
    layout = Layout(mesh=mesh)
    devices = make_mesh(layout, describe_devices("cpu", 4 if "fsdp" in mesh else 1))
    rows, tensor = 128 * mesh.get("fsdp", 1), mesh.get("tensor", 1)
    batch = {
        "tokens": jax.ShapeDtypeStruct((rows, 9), jnp.int32),
        "weights": jax.ShapeDtypeStruct((rows,), jnp.float32),
    }
    config = DecoderConfig(vocab=16384, seq=8, embed=8, num_layers=1, num_heads=2, mlp=8)
    logits_bytes = 4 * 1024 * config.vocab // tensor
    found = []
    for chunk in (None, 16):
        model = from_nnx(replace(config, loss_chunk=chunk))
        placement = make_placement(model, optax.sgd(1e-3), layout, devices)
        compiled = compile_step(model, loss, optax.sgd(1e-3), placement, batch)
        found.append(figures(compiled, dict(devices.shape)).temp_bytes)
    assert found[0] >= logits_bytes
    assert found[1] <= logits_bytes / 8
