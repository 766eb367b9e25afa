"""Attention of queries to keys and values: the registry of its forms, and the choice of one.

A new one is a file here and an entry of `ATTENTIONS`; tests/models/test_attention.py checks every entry.
Next: `options.py` (the contract), `xla.py`, `blockwise.py`. `transformer.py` has the layer around attention.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.errors.messages import refuse
from shardtrain.models import checks
from shardtrain.models.attention.blockwise import BLOCKWISE
from shardtrain.models.attention.cudnn import CUDNN, describe_device
from shardtrain.models.attention.options import Attention, ScoreOptions
from shardtrain.models.attention.xla import XLA
from shardtrain.models.ops import PLAIN, Ops

__all__ = ["ATTENTIONS", "Attention", "ScoreOptions", "attend", "attend_whole"]

ATTENTIONS: dict[str, Attention] = {"cudnn": CUDNN, "xla": XLA, "blockwise": BLOCKWISE}
"""Name -> attention over whole sequences, which the option `attention` of models takes."""

LONG = {"cpu": 512}
"""Kind of devices -> the number of positions from which "auto" computes scores in blocks. Measured for CPUs
(docs/benchmarks/attention.md)."""

LONG_ELSEWHERE = 4096
"""The same for other devices, where the scores of a head take 64 MiB; their time was not measured."""


def _choose(ops: Ops, kind: str, q_BTHK: jax.Array, k_BSHK: jax.Array, options: ScoreOptions) -> str:
    """Return the name of the attention to compute, and log it in a run.

    Raises:
      ValueError: the attention does not exist, or cannot compute this.
    """
    refuse("this attention cannot be computed", checks.choice("attention", kind, ("auto", *ATTENTIONS)))
    devices = ops.devices or ()
    long = LONG.get(devices[0].device_kind, LONG_ELSEWHERE) if devices else LONG_ELSEWHERE
    is_long = q_BTHK.shape[1] * k_BSHK.shape[1] >= long**2
    automatic = ("cudnn", "blockwise", "xla") if is_long else ("cudnn", "xla", "blockwise")
    lacking = []
    for name in automatic if kind == "auto" else (kind,):
        obstacles = ATTENTIONS[name].find_obstacles(q_BTHK, k_BSHK, options, devices)
        if not obstacles:
            break
        lacking.append(f"{name} needs {'; '.join(obstacles)}")
    else:
        raise ValueError(
            f"attention {kind!r} cannot be computed here: {'. '.join(lacking)}. Use 'auto'; a run that"
            " resumes also needs --allow.changed model.attention"
        )
    why = ". ".join(lacking) or f"{q_BTHK.dtype.name} on {describe_device(devices)}"
    if ops.note is not None:
        ops.note(f"attention: {name}, {'by auto' if kind == 'auto' else 'as asked for'}: {why}")
    return name


@jax.named_scope("attention")
def attend(
    ops: Ops, q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, kind: str, **options: Any
) -> jax.Array:
    """Compute attention: by `ops.attention` if a mesh shards sequences, else by `attend_whole`.

    Args:
      ops: the operations of the model.
      q_BTHK: queries, with dims (batch, seq, heads, head_dim).
      k_BSHK: keys, with dims (batch, seq, kv_heads, head_dim).
      v_BSHK: values, with the dims of the keys.
      kind: see `attend_whole`.
      options: see `ScoreOptions`.

    Returns:
      The context, shaped and typed as `q_BTHK`.

    Raises:
      ValueError: a mesh shards sequences, and there is a mask for each query; or a bias, which "ring" and
        "all-gather" do not support; or as `attend_whole`.
    """
    whole = partial(attend_whole, kind, ops=ops)
    if ops.attention is None:
        return whole(q_BTHK, k_BSHK, v_BSHK, **options)
    asked = ScoreOptions(**options)
    if asked.mask_BS is not None and asked.mask_BS.ndim == 3:
        raise ValueError(
            "attention over a mesh axis takes no cache of keys and values; use a mesh with context=1"
        )
    return ops.attention(whole, q_BTHK, k_BSHK, v_BSHK, **asked._asdict())


def attend_whole(
    kind: str, q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, *, ops: Ops = PLAIN, **options: Any
) -> jax.Array:
    """Compute scaled dot-product attention, with softmax in float32 and grouped queries.

    Args:
      kind: a name in `ATTENTIONS`; or "auto", which takes "cudnn" if nothing prevents it, else "blockwise"
        for long sequences and "xla" for short ones.
      q_BTHK: queries.
      k_BSHK: keys; their number of heads divides the number of query heads.
      v_BSHK: values, shaped as the keys.
      ops: the operations of the model.
      options: see `ScoreOptions`.

    Returns:
      The context, shaped and typed as `q_BTHK`. A query that sees no key gets the mean of all values.

    Raises:
      ValueError: no attention has this name, or it cannot compute this here; a window without causal order;
        or heads of queries that heads of keys do not divide.
    """
    asked = ScoreOptions(**options)
    if asked.window is not None and not asked.causal:
        raise ValueError("a window is of causal attention, which looks back; use causal=True or window=None")
    if q_BTHK.shape[2] % k_BSHK.shape[2]:
        raise ValueError(
            f"{q_BTHK.shape[2]} heads of queries cannot share {k_BSHK.shape[2]} heads of keys; use a number"
            " of query heads that key heads divide"
        )
    if asked.mask_BS is not None and asked.mask_BS.ndim == 3:
        # the cache of a model that may be trained with another attention
        kind = "xla"
    name, dtype = _choose(ops, kind, q_BTHK, k_BSHK, asked), q_BTHK.dtype
    attention = ATTENTIONS[name].attend
    if ops.replace_attention is not None:
        attention = ops.replace_attention(name, attention)
    # XLA has no product of float16 for CPUs that it adds up in float32
    if q_BTHK.dtype == jnp.float16 and (ops.devices is None or _has_cpu(ops.devices)):
        q_BTHK, k_BSHK, v_BSHK = (x.astype(jnp.float32) for x in (q_BTHK, k_BSHK, v_BSHK))
    return attention(q_BTHK, k_BSHK, v_BSHK, asked).astype(dtype)


def _has_cpu(devices: Iterable[Any]) -> bool:
    return any(device.device_kind == "cpu" for device in devices)
