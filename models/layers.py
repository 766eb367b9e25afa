"""Layers the nnx models share: a linear map over named dims, norms, rotary positions, attention.

Parameters are float32. Each names its dims; where it is used it is cast to the compute dtype and constrained
to those dims again, so that a sharded parameter is gathered in the compute dtype instead of the activations
being reduced.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import EMBED
from shardtrain.models.lora import Lora

Dims = tuple[str, ...]
Norms = Literal["layernorm", "rmsnorm"]
Attentions = Literal["auto", "xla", "cudnn"]


def parameter(values: jax.Array, dims: tuple[str | None, ...]) -> nnx.Param:
    """Make a parameter that names its dims, with or without a mesh: its user shards it."""
    return nnx.Param(values, out_sharding=dims, eager_sharding=False)


def normal(dims: Dims, *, sizes: Mapping[str, int], std: float, rngs: nnx.Rngs) -> nnx.Param:
    """Make a float32 parameter over `dims` drawn from a normal distribution."""
    return parameter(std * jax.random.normal(rngs.params(), [sizes[dim] for dim in dims], jnp.float32), dims)


def coming_keys(stream: nnx.RngStream, num: int) -> jax.Array:
    """Return keys (num,) split from the stream's next key, without advancing the stream.

    So the parts of a model, called in any order and in programs of their own, see the same keys.
    """
    return jax.random.split(jax.random.fold_in(stream.key[...], stream.count[...]), num)


def at_use(parameter: nnx.Param | jax.Array, dims: tuple[str | None, ...], dtype: str) -> jax.Array:
    """Cast a parameter to the compute dtype and constrain it to its dims: here a sharded one is gathered."""
    return with_logical_constraint(parameter[...].astype(dtype), dims)


class Linear(nnx.Module):
    """A linear map from the last dims of its input, `into`, to `out`.

    It has a bias over `out` if asked for, and a low-rank adapter (`lora.py`) if one is given: two maps beside
    the kernel, one after the other, of which the second begins at 0.
    """

    def __init__(
        self,
        into: Dims,
        out: Dims,
        *,
        sizes: Mapping[str, int],
        std: float,
        bias: bool,
        dtype: str,
        rngs: nnx.Rngs,
        lora: Lora | None = None,
    ):
        self.into, self.out, self.dtype = into, out, dtype
        self.kernel = normal((*into, *out), sizes=sizes, std=std, rngs=rngs)
        self.bias = parameter(jnp.zeros([sizes[dim] for dim in out]), out) if bias else None
        self.lora = lora
        if lora is not None:
            shape_in, shape_out = ([sizes[dim] for dim in dims] for dims in (into, out))
            bound = 1 / math.sqrt(math.prod(shape_in))
            first = jax.random.uniform(rngs.params(), (*shape_in, lora.rank), jnp.float32, -bound, bound)
            self.lora_a = parameter(first, (*into, None))
            self.lora_b = parameter(jnp.zeros((lora.rank, *shape_out)), (None, *out))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.shifted(self.product(x))

    def product(self, x: jax.Array) -> jax.Array:
        """Apply the map without its bias."""
        kernel = at_use(self.kernel, (*self.into, *self.out), self.dtype)
        return self.adapted(jnp.tensordot(x, kernel, axes=len(self.into)), x)

    def adapted(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Add what the adapter makes of `x`, if there is one, to a product of `x` with the kernel."""
        if self.lora is None:
            return y
        first = at_use(self.lora_a, (*self.into, None), self.dtype)
        second = at_use(self.lora_b, (None, *self.out), self.dtype)
        return y + self.lora.scale * jnp.tensordot(jnp.tensordot(x, first, len(self.into)), second, 1)

    def cast(self) -> jax.Array:
        """Cast the kernel to the compute dtype, sharded as stored, for concatenation and gathering."""
        return self.kernel[...].astype(self.dtype)

    def shifted(self, y: jax.Array) -> jax.Array:
        """Add the bias, if there is one, to a product with the kernel."""
        return y if self.bias is None else y + at_use(self.bias, self.out, self.dtype)


class Norm(nnx.Module):
    """Layer or root-mean-square norm over embed, computed in float32; only a layer norm can have a bias."""

    def __init__(self, kind: Norms, embed: int, *, eps: float, bias: bool, dtype: str):
        self.kind, self.eps, self.dtype = kind, eps, dtype
        self.scale = parameter(jnp.ones(embed), (EMBED,))
        has_bias = bias and kind == "layernorm"
        self.bias = parameter(jnp.zeros(embed), (EMBED,)) if has_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        # a root-mean-square norm leaves the mean where it is
        if self.kind == "layernorm":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        x = x * at_use(self.scale, (EMBED,), "float32")
        if self.bias is not None:
            x = x + at_use(self.bias, (EMBED,), "float32")
        return x.astype(self.dtype)


def rotate(x_BTHK: jax.Array, theta: float, positions_BT: jax.Array | None = None) -> jax.Array:
    """Rotate feature pairs (k, k + K/2) by angle t * theta**(-2k/K): scores then depend on distances alone.

    Args:
      x_BTHK: queries or keys; K is even.
      theta: base of the geometric series of wavelengths.
      positions_BT: the position of each, integers; None: 0 to T-1.

    Returns:
      The rotated array, same shape and dtype; the angles are float32.

    References:
      Su et al., RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2, with the pairing that Llama uses.
    """
    # a wavelength for each pair of features; the angle grows with the position
    half = x_BTHK.shape[-1] // 2
    frequency_K = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    position = jnp.arange(x_BTHK.shape[1]) if positions_BT is None else positions_BT
    angle = (position.astype(jnp.float32)[..., None] * frequency_K)[..., None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    # a rotation of the plane (low, high), in float32
    low, high = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x_BTHK.dtype)


def restarted_positions(segments_BT: jax.Array) -> jax.Array:
    """Return the position of each token in its segment, int32 (batch, seq).

    Args:
      segments_BT: the number of each token's segment, such as a document; equal numbers stand together.

    >>> restarted_positions(jnp.array([[0, 0, 1, 1, 1, 2]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    places_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1], dtype=jnp.int32), segments_BT.shape)
    begins_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1]) != 0
    return places_BT - jax.lax.cummax(jnp.where(begins_BT, places_BT, 0), axis=1)


def target_devices() -> list[Any]:
    """The devices of this process of the kind that the program being traced will run on.

    Inside a mesh they are of its kind, so [] for a mesh of devices that are described but not here.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    devices = jax.local_devices()
    return [d for d in devices if described is None or d.device_kind == described.device_kind]


def has_flash(devices: Sequence[Any]) -> bool:
    """Whether cuDNN's flash attention runs on these devices: NVIDIA's from compute capability 8.0 (Ampere).

    False without devices: jax can trace it only where such a device is.
    """
    capabilities = [re.fullmatch(r"(\d+)\.\d+", getattr(d, "compute_capability", "")) for d in devices]
    return bool(capabilities) and all(found and int(found[1]) >= 8 for found in capabilities)


def attend(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    kind: Attentions,
    *,
    causal: bool = True,
    mask_BS: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Attention as the run computes it where a mesh shards sequences, else `whole_attention`.

    A run hands it to models as the attribute `attention` of Flax's logical rules, which know the mesh. It is
    called with the model's own attention first.

    Args:
      q_BTHK: queries, named (batch, seq, heads, head_dim).
      k_BSHK: keys, named (batch, seq, kv_heads, head_dim).
      v_BSHK: values, shaped and named as the keys.
      kind: see `whole_attention`.
      causal: likewise.
      mask_BS: likewise.
      segments_BT: likewise.

    Returns:
      The context, shaped and typed as `q_BTHK`.

    Raises:
      ValueError: a mesh shards sequences, and there are segments.
    """
    of_run = getattr(get_logical_axis_rules(), "attention", None)
    whole = partial(whole_attention, kind)
    if of_run is None:
        return whole(q_BTHK, k_BSHK, v_BSHK, causal=causal, mask_BS=mask_BS, segments_BT=segments_BT)
    if segments_BT is not None:
        raise ValueError(
            "attention over a mesh axis takes no segments (documents that do not see each other); use data"
            " with --data.packing joined, or a mesh with context=1"
        )
    return of_run(whole, q_BTHK, k_BSHK, v_BSHK, causal=causal, mask_BS=mask_BS)


def whole_attention(
    kind: Attentions,
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    *,
    causal: bool = True,
    mask_BS: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Scaled dot-product attention; softmax in float32; k and v may have fewer heads than q (grouped-query).

    Args:
      kind: "xla", "cudnn" (flash attention, on NVIDIA GPUs), or "auto": "cudnn" in 16 bits with a head_dim
        that it takes (a multiple of 8, at most 128) and neither mask nor segments, on devices that have it
        (`has_flash`), else "xla".
      q_BTHK: queries.
      k_BSHK: keys; their number of heads divides that of the queries.
      v_BSHK: values, shaped as the keys.
      causal: whether a query sees the keys up to its own position only, or all of them (of an encoder, or of
        another sequence than its own, whose length may differ).
      mask_BS: 0 for keys that no query sees, such as padding; by default all are seen.
      segments_BT: of self-attention, the number of each token's segment: a query sees the keys of its own
        only; by default there is one.

    Returns:
      The context, shaped and typed as `q_BTHK`.
    """
    mask = None if mask_BS is None else mask_BS[:, None, None, :] != 0
    if segments_BT is not None:
        same_B1TS = segments_BT[:, None, :, None] == segments_BT[:, None, None, :]
        mask = same_B1TS if mask is None else same_B1TS & mask
    # flash attention where it can run; it takes no mask here
    if kind == "auto":
        half_precision = q_BTHK.dtype in (jnp.bfloat16, jnp.float16)
        fits = q_BTHK.shape[-1] % 8 == 0 and q_BTHK.shape[-1] <= 128 and mask is None
        kind = "cudnn" if half_precision and fits and has_flash(target_devices()) else "xla"
    dtype = q_BTHK.dtype
    if dtype == jnp.float16 and any(d.device_kind == "cpu" for d in target_devices()):
        # XLA has no product of float16 there that it adds up in float32, which jax's attention asks for
        q_BTHK, k_BSHK, v_BSHK = (x.astype(jnp.float32) for x in (q_BTHK, k_BSHK, v_BSHK))
    context_BTHK = jax.nn.dot_product_attention(
        q_BTHK, k_BSHK, v_BSHK, mask=mask, is_causal=causal, implementation=kind
    )
    return context_BTHK.astype(dtype)
