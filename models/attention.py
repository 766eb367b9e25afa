"""Compute attention of queries to keys and values, by the run over a mesh or by the model itself.

`transformer.py` has the layer around it.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.core.spmd import get_logical_axis_rules

from shardtrain.models.device_forms import target_devices

Attentions = Literal["auto", "xla", "cudnn"]


def has_flash(devices: Sequence[Any]) -> bool:
    """Return whether cuDNN's flash attention runs on these devices: NVIDIA GPUs of capability 8.0 or more.

    Without devices it does not: jax can trace it only in a process that has such a device.
    """
    capabilities = [re.fullmatch(r"(\d+)\.\d+", getattr(d, "compute_capability", "")) for d in devices]
    return bool(capabilities) and all(found and int(found[1]) >= 8 for found in capabilities)


def flash_obstacles(
    dtype: Any,
    head_dim: int,
    devices: Sequence[Any],
    *,
    masked: bool = False,
    soft_cap: float | None = None,
    window: int | jax.Array | None = None,
    biased: bool = False,
) -> list[str]:
    """List the requirements of cuDNN's flash attention that are not met.

    Args:
      dtype: the dtype of the queries.
      head_dim: number of features of a head.
      devices: the devices that will run the program, see `target_devices`.
      masked: whether there is a mask of keys, or segments.
      soft_cap: see `attend_whole`.
      window: see `attend_whole`.
      biased: whether a bias is added to the scores.

    >>> flash_obstacles(jnp.float32, 12, [], soft_cap=30.0)[:2]
    ['16 bits, not float32', 'heads of a multiple of 8 features up to 128, not 12']
    """
    found = []
    if dtype not in (jnp.bfloat16, jnp.float16):
        found.append(f"16 bits, not {jnp.dtype(dtype).name}")
    if head_dim % 8 or head_dim > 128:
        found.append(f"heads of a multiple of 8 features up to 128, not {head_dim}")
    if masked:
        found.append("no mask and no segments")
    if soft_cap is not None:
        found.append("no soft cap")
    if biased:
        found.append("no relative positions")
    if isinstance(window, jax.Array):
        found.append("a window that is the same in all blocks")
    if not has_flash(devices):
        found.append(f"NVIDIA GPUs here from compute capability 8.0, not {_device_text(devices)}")
    return found


def _device_text(devices: Sequence[Any]) -> str:
    if not devices:
        return "devices that are not here"
    capability = getattr(devices[0], "compute_capability", None)
    return devices[0].device_kind + (f" ({capability})" if capability else "")


def _choose(
    kind: Attentions, q_BTHK: jax.Array, devices: Sequence[Any], **asked: Any
) -> Literal["xla", "cudnn"]:
    """Choose the attention for "auto", and note the choice in a run.

    Args:
      kind: the option `attention`.
      q_BTHK: queries.
      devices: the devices that compute it.
      asked: other arguments of `flash_obstacles`.
    """
    obstacles = flash_obstacles(q_BTHK.dtype, q_BTHK.shape[-1], devices, **asked) if kind == "auto" else []
    chosen = kind if kind != "auto" else "xla" if obstacles else "cudnn"
    why = f"{q_BTHK.dtype.name} on {_device_text(devices)}"
    if obstacles:
        why = f"cuDNN's flash attention needs {'; '.join(obstacles)}"
    # a run that traces the model gives it, as it gives attention over a mesh
    if (note := getattr(get_logical_axis_rules(), "note", None)) is not None:
        note(f"attention: {chosen}, {'by auto' if kind == 'auto' else 'as asked for'}: {why}")
    return chosen


@jax.named_scope("attention")
def attend(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    kind: Attentions,
    *,
    causal: bool = True,
    mask_BS: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    bias_BHTS: jax.Array | None = None,
) -> jax.Array:
    """Compute attention: by the run if a mesh shards sequences, else by `attend_whole`.

    A run gives its attention to models as the attribute `attention` of Flax's logical rules, which know the
    mesh. Its first argument is the model's own attention.

    Args:
      q_BTHK: queries, with dims (batch, seq, heads, head_dim).
      k_BSHK: keys, with dims (batch, seq, kv_heads, head_dim).
      v_BSHK: values, with the dims of the keys.
      kind: see `attend_whole`.
      causal: see `attend_whole`.
      mask_BS: see `attend_whole`.
      segments_BT: see `attend_whole`.
      window: see `attend_whole`.
      soft_cap: see `attend_whole`.
      bias_BHTS: see `attend_whole`.

    Returns:
      The context, shaped and typed as `q_BTHK`.

    Raises:
      ValueError: a mesh shards sequences, and there is a mask for each query; or a bias, which "ring" and
        "all-gather" do not support.
    """
    of_run = getattr(get_logical_axis_rules(), "attention", None)
    whole = partial(attend_whole, kind)
    seen = {"causal": causal, "mask_BS": mask_BS, "segments_BT": segments_BT, "window": window}
    seen["soft_cap"] = soft_cap
    if of_run is None:
        return whole(q_BTHK, k_BSHK, v_BSHK, **seen, bias_BHTS=bias_BHTS)
    if bias_BHTS is not None:
        seen["bias_BHTS"] = bias_BHTS
    if mask_BS is not None and mask_BS.ndim == 3:
        raise ValueError(
            "attention over a mesh axis takes no cache of keys and values; use a mesh with context=1"
        )
    return of_run(whole, q_BTHK, k_BSHK, v_BSHK, **seen)


def attend_whole(
    kind: Attentions,
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    *,
    causal: bool = True,
    mask_BS: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    bias_BHTS: jax.Array | None = None,
) -> jax.Array:
    """Compute scaled dot-product attention, with softmax in float32 and grouped queries.

    Args:
      kind: "xla"; "cudnn" (flash attention, on NVIDIA GPUs); or "auto", which takes "cudnn" if
        `flash_obstacles` finds none, else "xla".
      q_BTHK: queries.
      k_BSHK: keys; their number of heads divides the number of query heads.
      v_BSHK: values, shaped as the keys.
      causal: whether a query sees only keys up to its own position; otherwise it sees all keys (in an
        encoder, or of another sequence, whose length may differ).
      mask_BS: 0 for keys that no query sees, such as padding; or (batch, seq, keys), 0 for keys that a query
        does not see; by default all are seen.
      segments_BT: for self-attention, the number of each token's segment; a query sees only keys of its own
        segment. By default there is one segment.
      window: for causal attention, the largest number of keys that a query sees: its own and those just
        before it. A traced int scalar may differ from block to block. None means all keys.
      soft_cap: replaces scores x by soft_cap * tanh(x / soft_cap); "cudnn" does not support it. None disables
        it.
      bias_BHTS: added to the scaled scores; only for "xla", without a soft cap.

    Returns:
      The context, shaped and typed as `q_BTHK`.

    Raises:
      ValueError: "cudnn" with a soft cap or a bias, or without cuDNN, or a bias with a soft cap.
    """
    seen = None if mask_BS is None else (mask_BS if mask_BS.ndim == 3 else mask_BS[:, None])[:, None] != 0
    if segments_BT is not None:
        seen = _combine_masks(segments_BT[:, None, :, None] == segments_BT[:, None, None, :], seen)
    # flash attention where it can run; it takes no mask here, and has a window of its own. For a plan jax
    # cannot trace it: the plan says which devices it is for, and has a call in its place
    planned = getattr(get_logical_axis_rules(), "flash", None)
    devices = target_devices() if planned is None else [planned]
    biased = bias_BHTS is not None
    kind = _choose(
        kind, q_BTHK, devices, masked=seen is not None, soft_cap=soft_cap, window=window, biased=biased
    )
    if bias_BHTS is not None and (kind == "cudnn" or soft_cap is not None):
        raise ValueError(f"attention {kind!r} with soft_cap {soft_cap} has no bias; use 'xla' without one")
    flash_window = None
    if kind == "cudnn" and isinstance(window, int):
        flash_window = (window - 1, 0)
    elif window is not None:
        query, key = jnp.arange(q_BTHK.shape[1])[:, None], jnp.arange(k_BSHK.shape[1])
        seen = _combine_masks((query - key < window)[None, None], seen)
    dtype = q_BTHK.dtype
    if dtype == jnp.float16 and any(d.device_kind == "cpu" for d in devices):
        # XLA has no product of float16 there that it adds up in float32, which jax's attention asks for
        q_BTHK, k_BSHK, v_BSHK = (x.astype(jnp.float32) for x in (q_BTHK, k_BSHK, v_BSHK))
    if soft_cap is not None:
        if kind == "cudnn":
            raise ValueError(f"attention 'cudnn' has no soft cap, and soft_cap is {soft_cap}; use 'xla'")
        return _attend_capped(q_BTHK, k_BSHK, v_BSHK, causal, seen, soft_cap).astype(dtype)
    if kind == "cudnn" and planned is not None:
        return planned(q_BTHK, k_BSHK, v_BSHK, causal=causal, window=window)
    options = {"bias": bias_BHTS, "mask": seen, "is_causal": causal, "local_window_size": flash_window}
    return _attend_by_jax(kind, q_BTHK, k_BSHK, v_BSHK, options).astype(dtype)


def _attend_by_jax(
    kind: Literal["xla", "cudnn"],
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    options: Mapping[str, Any],
) -> jax.Array:
    try:
        return jax.nn.dot_product_attention(q_BTHK, k_BSHK, v_BSHK, implementation=kind, **options)
    except RuntimeError as error:
        if kind != "cudnn":
            raise
        # a plan too asks for what a loss counts before it says which devices it is for
        raise ValueError(
            f"attention 'cudnn' cannot be traced here: {error} It needs an NVIDIA GPU of this process; use"
            " 'auto', which takes it where such GPUs are, and counts it in plans for them"
        ) from error


def _combine_masks(first: jax.Array, second: jax.Array | None) -> jax.Array:
    return first if second is None else first & second


def _attend_capped(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    causal: bool,
    seen: jax.Array | None,
    soft_cap: float,
) -> jax.Array:
    """Compute attention with float32 scores between -soft_cap and soft_cap; `seen` is a mask (B, 1, T, S).

    References:
      Gemma 2, https://arxiv.org/abs/2408.00118, section 2.
    """
    # query heads next to the key head that they share: B T N G K, and N key heads
    q = q_BTHK.reshape(*q_BTHK.shape[:2], k_BSHK.shape[2], -1, q_BTHK.shape[3])
    scores = jnp.einsum("BTNGK,BSNK->BNGTS", q, k_BSHK, preferred_element_type=jnp.float32)
    scores = soft_cap * jnp.tanh(scores * (q.shape[-1] ** -0.5 / soft_cap))
    if causal:
        seen = _combine_masks(jnp.tri(q.shape[1], k_BSHK.shape[1], dtype=bool)[None, None], seen)
    if seen is not None:
        scores = jnp.where(seen[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSHK.dtype)
    return jnp.einsum("BNGTS,BSNK->BTNGK", weights, v_BSHK).reshape(q_BTHK.shape)
