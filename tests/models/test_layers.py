"""The layers shared by the models, against their definitions in numpy."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from shardtrain.models.attention import attend, has_flash
from shardtrain.models.device_forms import target_devices
from shardtrain.models.layers import Linear, Norm
from shardtrain.models.rotary import compute_frequencies, rotate
from shardtrain.models.transformer import FeedForward
from shardtrain.models.transformer_options import BlockOptions

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def turned(x, theta):
    return rotate(x, compute_frequencies(theta, x.shape[-1])[0])


def test_rotation_turns_each_pair_by_its_frequency():
    x = np.zeros((1, 3, 1, 4), np.float32)
    x[..., 1], x[..., 3] = 1.0, 2.0
    y = np.asarray(turned(jnp.asarray(x), 16.0))[0, :, 0]
    angle = np.arange(3) * 16.0**-0.5
    cos, sin = np.cos(angle), np.sin(angle)
    expected = np.stack([0 * angle, cos - 2 * sin, 0 * angle, sin + 2 * cos], axis=1)
    np.testing.assert_allclose(y, expected, atol=1e-6)


def test_angles_are_float32_also_in_bfloat16():
    x = jnp.ones((1, 300, 1, 2))
    exact, rounded = turned(x, 100.0), turned(x.astype(jnp.bfloat16), 100.0)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=6e-3)


def by_definition(q, k, v, seen, soft_cap=None):
    """Attention with the keys that `seen` (B, T, S) lets a query see."""
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(seen[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshk->bthk", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    ("window", "soft_cap", "packed"),
    [(None, None, False), (1, 0.5, True), (3, None, True), (40, 0.5, False)],
)
def test_attention_with_windows_soft_caps_and_segments(window, soft_cap, packed):
    q, k, v = normal(2, 7, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 8)
    segments = np.array([[0, 0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0]])
    distance = np.arange(7)[:, None] - np.arange(7)
    seen = np.broadcast_to((distance >= 0) & (distance < (window or 7)), (2, 7, 7))
    options: dict[str, Any] = {"soft_cap": soft_cap}
    if packed:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
        options["segments_BT"] = jnp.asarray(segments)
    expected = by_definition(q, k, v, seen, soft_cap)
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    np.testing.assert_allclose(attend(q, k, v, "auto", window=window, **options), expected, 1e-5, 1e-6)
    # a window that differs from block to block is traced
    compute = jax.jit(lambda window: attend(q, k, v, "auto", window=window, **options))
    np.testing.assert_allclose(compute(window), expected, 1e-5, 1e-6)


def test_without_cudnn_its_attention_is_refused_with_what_to_use(monkeypatch):
    def without_cudnn(*_, implementation, **__):
        assert implementation == "cudnn"
        raise RuntimeError("cuDNN is not detected.")

    # as jax does without its plugin for CUDA
    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)
    x = jnp.zeros((1, 4, 1, 64), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"^attention 'cudnn' cannot be traced here: cuDNN is not .* use 'auto', which"
    ):
        attend(x, x, x, "cudnn")


def test_flash_attention_has_windows_that_are_known_and_no_soft_cap(monkeypatch):
    chosen = []
    monkeypatch.setattr(jax, "local_devices", lambda: [H100])

    def attention(q, k, v, *, implementation, local_window_size, mask, **_):
        chosen.append((implementation, local_window_size, mask is None))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    x = jnp.zeros((1, 4, 1, 64), jnp.bfloat16)
    attend(x, x, x, "auto", window=3)
    attend(x, x, x, "auto", window=jnp.asarray(3))
    attend(x, x, x, "cudnn", window=jnp.asarray(3))
    attend(x, x, x, "auto", soft_cap=5.0)
    assert chosen == [("cudnn", (2, 0), True), ("xla", None, False), ("cudnn", None, False)]
    with pytest.raises(
        ValueError, match=r"^attention 'cudnn' has no soft cap, and soft_cap is 5\.0; use 'xla'$"
    ):
        attend(x, x, x, "cudnn", soft_cap=5.0)


def device(kind, capability=None):
    """What jax tells of a device; a CPU has no compute capability, and a GPU of AMD one such as gfx90a."""
    return SimpleNamespace(
        device_kind=kind, **({} if capability is None else {"compute_capability": capability})
    )


H100, V100 = device("NVIDIA H100 80GB HBM3", "9.0"), device("Tesla V100-SXM2-16GB", "7.0")


@pytest.mark.parametrize(
    ("here", "dtype", "head_dim", "expected"),
    [
        (H100, jnp.bfloat16, 64, "cudnn"),
        (H100, jnp.float16, 128, "cudnn"),
        (device("NVIDIA B300 SXM6 AC", "10.3"), jnp.bfloat16, 64, "cudnn"),
        (device("NVIDIA A100-SXM4-40GB", "8.0"), jnp.bfloat16, 64, "cudnn"),
        (device("NVIDIA L40S", "8.9"), jnp.bfloat16, 64, "cudnn"),
        (H100, jnp.bfloat16, 60, "xla"),
        (V100, jnp.float16, 64, "xla"),
        (device("AMD Instinct MI250X", "gfx90a"), jnp.bfloat16, 64, "xla"),
        (device("cpu"), jnp.bfloat16, 64, "xla"),
    ],
)
def test_auto_attention_follows_device_and_dtype(monkeypatch, here, dtype, head_dim, expected):
    chosen = []
    monkeypatch.setattr(jax, "local_devices", lambda: [here])

    def attention(q, k, v, *, implementation, **_):
        chosen.append(implementation)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    x = jnp.zeros((1, 2, 1, head_dim), dtype)
    assert attend(x, x, x, "auto").dtype == dtype
    attend(x, x, x, "cudnn")
    assert chosen == [expected, "cudnn"]


def test_attention_in_float16_on_a_cpu_is_that_of_float32():
    x = jax.random.normal(jax.random.key(0), (2, 5, 2, 8))
    found = jax.jit(attend, static_argnums=3)(*[x.astype(jnp.float16)] * 3, "auto")
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, attend(x, x, x, "auto"), 1e-2, 2e-3)


def test_the_devices_are_those_of_the_mesh_that_is_compiled_for(monkeypatch):
    mesh = Mesh(np.array(jax.devices()), ("data",)).abstract_mesh
    cpus = jax.local_devices()
    monkeypatch.setattr(jax, "local_devices", lambda: [H100, V100, *cpus])
    assert target_devices() == [H100, V100, *cpus]
    with jax.sharding.use_abstract_mesh(mesh):
        assert target_devices() == cpus
    assert [has_flash(found) for found in ([H100, H100], [H100, V100], cpus, [])] == [
        True,
        False,
        False,
        False,
    ]


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


def test_linear_contracts_its_dims_in_the_compute_dtype():
    sizes = {"heads": 2, "head_dim": 3, "embed": 5}
    linear = Linear(
        ("heads", "head_dim"), ("embed",), sizes=sizes, std=1.0, bias=True, dtype="bfloat16", rngs=nnx.Rngs(0)
    )
    assert linear.bias is not None
    linear.bias[...] = normal(5)
    x = normal(4, 2, 3)
    y = linear(jnp.asarray(x, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert linear.kernel[...].dtype == jnp.float32
    expected = np.einsum("bhk,hkd->bd", x, linear.kernel[...]) + np.asarray(linear.bias[...])
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=0.05, atol=0.05)


def test_a_gated_feed_forward_has_a_bias_of_each_projection():
    options = BlockOptions(vocab=4, seq=4, embed=6, num_heads=2, num_layers=1, mlp=8, activation="swiglu")
    layer: Any = FeedForward(options, rngs=nnx.Rngs(0))
    for number, linear in enumerate((layer.up, layer.gate, layer.down), 1):
        linear.bias[...] += number * jnp.arange(len(linear.bias[...]))
    x = jnp.asarray(normal(2, 4, 6))
    hidden = layer.up(x) * jax.nn.silu(layer.gate(x))
    np.testing.assert_allclose(layer(x), layer.down(hidden), rtol=1e-5, atol=1e-6)
