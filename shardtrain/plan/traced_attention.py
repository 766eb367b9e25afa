"""Replace the attention of models, while they are traced, by calls that devices compute.

A plan gives it to models among their operations (`models/ops`). Next: `device_calls.py`, the costs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardtrain import axes
from shardtrain.functional.context_attention import BIAS
from shardtrain.models.attention.options import ScoreOptions
from shardtrain.plan.device_calls import (
    AttentionCall,
    BlocksCall,
    FlashCall,
    MoveCall,
    bind_call,
    bind_linear_call,
)
from shardtrain.plan.devices import find_device
from shardtrain.plan.hlo.collectives import ALL_TO_ALL

QUERIES = (axes.BATCH, axes.SEQ, axes.HEADS, axes.HEAD_DIM)
KEYS = (axes.BATCH, axes.SEQ, axes.KV_HEADS, axes.HEAD_DIM)


AttentionShapes = tuple[tuple[int, ...], tuple[int, ...], bool]
"""Shapes of the queries and keys of an attention, and whether it is causal."""


class TracedAttention:
    """Attention over the mesh axis context for models that are traced; it records the shapes of all calls.

    Args:
      kind: as `Layout.context_attention`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.found: list[AttentionShapes] = []

    def __call__(
        self,
        whole: Callable[..., jax.Array],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        causal: bool,
        **seen: Any,
    ) -> jax.Array:
        """Return attention; for the arguments see `ContextAttention`.

        Raises:
          ValueError: another kind than "all-to-all" has a bias, which a run refuses too.
        """
        self.found.append((q.shape, k.shape, causal))
        seen = {name: fact for name, fact in seen.items() if fact is not None}
        if BIAS in seen and self.kind != "all-to-all":
            raise ValueError(
                f"attention by {self.kind} over context has no relative positions; use --context-attention"
                " all-to-all, or context=1"
            )
        if self.kind == "all-to-all":
            q, k, v = _exchange(q, QUERIES), _exchange(k, KEYS), _exchange(v, KEYS)
            return _exchange(whole(q, k, v, causal=causal, **seen), QUERIES)
        window = seen.get("window")
        call = AttentionCall(
            kind=self.kind,
            queries=q.shape[1],
            keys=k.shape[1],
            head_dim=q.shape[3],
            item_bytes=q.dtype.itemsize,
            causal=causal,
            window=window if isinstance(window, int) and "mask_BS" not in seen else None,
        )
        return compute_on_devices(call, q, k, v)


class PlannedDevice(NamedTuple):
    """A device that this machine need not have; models read the first two fields as of a device of jax.

    Args:
      device_kind: name of the device in jax.
      compute_capability: its compute capability by NVIDIA, such as "9.0"; "" without flash attention.
      softmax_features: see `devices.ReachedRates`.
    """

    device_kind: str
    compute_capability: str
    softmax_features: float


class PlannedAttention(NamedTuple):
    """Calls in place of attentions that no trace can enter: a kernel, and loops that skip blocks.

    Args:
      device: the device for which attention is chosen.
    """

    device: PlannedDevice

    def replace(self, name: str, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Return what is traced for an entry of `ATTENTIONS`: a call, or its own `attend`."""
        if name == "cudnn":
            make: Callable[..., Any] = partial(FlashCall, softmax_features=self.device.softmax_features)
        elif name == "blockwise":
            make = BlocksCall
        else:
            return attend

        def call(q: jax.Array, k: jax.Array, v: jax.Array, options: ScoreOptions) -> jax.Array:
            window = options.window if isinstance(options.window, int) else None
            of_call = make(
                queries=q.shape[1],
                keys=k.shape[1],
                head_dim=q.shape[3],
                item_bytes=q.dtype.itemsize,
                causal=options.causal,
                window=window,
            )
            return compute_on_devices(of_call, q, k, v)

        return call


def plan_attention(device_kind: str, *, has_flash: bool) -> PlannedAttention:
    """Return the attention for the devices of a plan, with flash attention on known NVIDIA GPUs.

    Args:
      device_kind: name of the devices in jax.
      has_flash: see `trace.Target`.
    """
    known = find_device(device_kind)
    if known is None or known.compute_capability is None or not has_flash:
        return PlannedAttention(PlannedDevice(device_kind, "", 0.0))
    features = known.reached.softmax_features
    return PlannedAttention(PlannedDevice(device_kind, known.compute_capability, features))


def _exchange(x: jax.Array, named: tuple[str, ...]) -> jax.Array:
    """Exchange sharded sequences for sharded heads, or back."""
    move = MoveCall(kind=ALL_TO_ALL, axis=axes.CONTEXT)
    return bind_linear_call(move, move, [x], named, (x.shape, x.dtype, named))


def compute_on_devices(
    call: AttentionCall | BlocksCall | FlashCall, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    """Compute attention that keeps its inputs, its output and the sums of its softmax for the backward."""
    of_q, of_k = (q.shape, q.dtype, QUERIES), (k.shape, k.dtype, KEYS)
    of_sums = (q.shape[:3], jnp.float32, QUERIES[:3])

    @jax.custom_vjp
    def attention(q: Any, k: Any, v: Any) -> Any:
        return forward(q, k, v)[0]

    def forward(q: Any, k: Any, v: Any) -> Any:
        out, sums = bind_call(call, (q, k, v), [of_q, of_sums])
        return out, (q, k, v, out, sums)

    def backward(kept: Any, cotangent: Any) -> Any:
        return tuple(bind_call(call._replace(backward=True), (*kept, cotangent), [of_q, of_k, of_k]))

    attention.defvjp(forward, backward)
    return attention(q, k, v)
