"""Attention over sequences that are sharded over the mesh axis context, for models that know no mesh.

A run hands it to the models' attention with the rules of their constraints (docs/decisions/0035); outside a
run, and with context=1, a model computes its attention itself. Next: `ring_attention.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.spmd import logical_to_mesh_axes
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from shardtrain import axes
from shardtrain.errors.messages import problems_error
from shardtrain.functional.ring_attention import Ring, balanced_exchange, gathered_attention, ring_attention

Whole = Callable[..., jax.Array]
"""(q, k, v, causal=, mask_BS=) -> attention over whole sequences, as the model computes it."""


@dataclass(frozen=True)
class ContextAttention:
    """Attention whose queries, keys and values are sharded over context along the sequence.

    Args:
      kind: "ring", "all-gather" or "all-to-all", see `Layout.context_attention`.
    """

    kind: str

    def __call__(
        self, whole: Whole, q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, mask_BS: Any = None
    ) -> jax.Array:
        """Compute the attention of arrays that are named (batch, seq, heads, head_dim).

        Args:
          whole: the model's own attention over whole sequences.
          q: (B, T, H, K).
          k: (B, S, kv_heads, K).
          v: (B, S, kv_heads, K).
          causal: queries see keys of positions up to their own; T is S.
          mask_BS: 0 for keys that are not seen; None: all are.

        Returns:
          Shaped and typed as q.

        Raises:
          ValueError: lists every size that cannot be split.
        """
        mesh = jax.sharding.get_abstract_mesh()
        rows, seq, heads = _axes_of(axes.BATCH, axes.SEQ, axes.HEADS)
        *_, kv_heads = _axes_of(axes.BATCH, axes.SEQ, axes.KV_HEADS)
        num = mesh.shape.get(axes.CONTEXT, 1)
        # a layout may leave sequences whole
        if num == 1 or seq != (axes.CONTEXT,):
            return whole(q, k, v, causal=causal, mask_BS=mask_BS)
        # key heads that are sharded otherwise than those of queries are gathered
        kv_heads = kv_heads if kv_heads == heads[: len(kv_heads)] else ()
        own = _KeyHeads(heads, kv_heads, _size(heads, mesh.shape), _size(kv_heads, mesh.shape))
        if problems := self._problems(q.shape, k.shape, num, own, causal):
            raise problems_error(f"attention by {self.kind} over context={num} cannot split this", problems)
        # a few rows that are only traced need not divide
        rows = rows if q.shape[0] % _size(rows, mesh.shape) == 0 else ()
        mask = jnp.ones(k.shape[:2], bool) if mask_BS is None else mask_BS != 0
        split = PartitionSpec(rows or None, seq, heads or None)
        of_keys = PartitionSpec(rows or None, seq, kv_heads or None)
        # manual over every axis: collectives over one would gather what the others shard
        free = {
            name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Auto
        }
        compute = {"ring": _ring, "all-gather": _all_gather, "all-to-all": _all_to_all}[self.kind]
        call = _Call(partial(whole, causal=causal), num, causal, mask_BS is not None)

        def of_device(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
            return compute(call, q, own.of(q, k), own.of(q, v), mask)

        return jax.shard_map(
            of_device,
            in_specs=(split, of_keys, of_keys, PartitionSpec(rows or None, seq)),
            out_specs=split,
            axis_names=free,
            check_vma=False,
        )(q, k, v, mask)

    def _problems(self, q: Any, k: Any, num: int, own: "_KeyHeads", causal: bool) -> list[str]:
        parts = 2 * num if self.kind == "ring" and causal else num
        lengths = {"queries": q[1], "keys": k[1]}
        found = [
            f"{length} {name} cannot be split into {parts} parts: {length} % {parts} = {length % parts}."
            f" Use {length - length % parts or parts} or {length - length % parts + parts}"
            for name, length in lengths.items()
            if length % parts
        ]
        of_heads = own.problems(q, k)
        if self.kind == "all-to-all" and not of_heads:
            of_heads = [
                f"{heads} {name} of a device cannot be split over {num}; use a context that divides"
                f" them, or --context-attention ring"
                for name, heads in zip(("heads", "kv_heads"), own.counts(q, k), strict=True)
                if heads % num
            ]
        return [*found, *of_heads]


@dataclass(frozen=True)
class _KeyHeads:
    """Which key heads the queries of a device need, where keys are sharded over fewer devices than queries.

    Args:
      axes_of_q: mesh axes that shard the heads of queries.
      axes_of_k: those that shard the heads of keys, the first ones of `axes_of_q`.
      devices_of_q: product of their sizes.
      devices_of_k: likewise.
    """

    axes_of_q: tuple[str, ...]
    axes_of_k: tuple[str, ...]
    devices_of_q: int
    devices_of_k: int

    def problems(self, q: Any, k: Any) -> list[str]:
        """List what of the shapes (B, T, heads, K) cannot be split."""
        found = [
            f"{heads} {name} cannot be split over {list(names)} of total size {devices}:"
            f" {heads} % {devices} = {heads % devices}. Use another mesh, or the rule activations.{name} = []"
            for name, heads, names, devices in (
                ("heads", q[2], self.axes_of_q, self.devices_of_q),
                ("kv_heads", k[2], self.axes_of_k, self.devices_of_k),
            )
            if heads % devices
        ]
        return found or [f"{q[2]} heads are no multiple of {k[2]} kv_heads"] * (q[2] % k[2] != 0)

    def counts(self, q: Any, k: Any) -> tuple[int, int]:
        """Return the heads of a device: of queries, and those that `of` returns."""
        heads = q[2] // self.devices_of_q
        return heads, heads // math.gcd(heads, q[2] // k[2])

    def of(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Return the key heads of this device's queries, in their order; k is (B, S, heads of it, K).

        Each is there once, or as often as groups of equally many queries need it.
        """
        if self.axes_of_k == self.axes_of_q:
            return k
        heads, kv_heads = q.shape[2] * self.devices_of_q, k.shape[2] * self.devices_of_k
        group = math.gcd(q.shape[2], heads // kv_heads)
        first = lax.axis_index(self.axes_of_q) * q.shape[2]
        at = (first + jnp.arange(0, q.shape[2], group)) * kv_heads // heads
        return k[:, :, at % k.shape[2]]


@dataclass(frozen=True)
class _Call:
    """What a call has beside its arrays: the model's own attention, devices of context, options."""

    whole: Whole
    num: int
    causal: bool
    has_mask: bool


def _ring(call: _Call, q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Send keys and values round; causal ones in an order by which all devices compute as much."""
    ring = Ring(axes.CONTEXT, call.num, "balanced" if call.causal else "no")
    if not call.causal:
        return _grouped(q, k, v, lambda *arrays: ring_attention(*arrays, mask, ring))
    exchange = partial(balanced_exchange, axis=axes.CONTEXT, num=call.num)
    mask = exchange(mask) if call.has_mask else mask
    # one exchange for all three
    heads = (q.shape[2], q.shape[2] + k.shape[2])
    q, k, v = jnp.split(exchange(jnp.concatenate([q, k, v], 2)), heads, 2)
    return exchange(_grouped(q, k, v, lambda *arrays: ring_attention(*arrays, mask, ring)), inverse=True)


def _all_gather(call: _Call, q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Gather keys and values; each device computes the scores of its queries to all of them."""
    ones = jnp.ones((k.shape[0], call.num * k.shape[1]), bool)
    mask = lax.all_gather(mask, axes.CONTEXT, axis=1, tiled=True) if call.has_mask else ones
    return _grouped(q, k, v, lambda *arrays: gathered_attention(*arrays, mask, axes.CONTEXT, call.causal))


def _all_to_all(call: _Call, q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Exchange sequences for heads: each device computes whole sequences of some heads."""
    q, k, v = (lax.all_to_all(x, axes.CONTEXT, 2, 1, tiled=True) for x in (q, k, v))
    mask = lax.all_gather(mask, axes.CONTEXT, axis=1, tiled=True) if call.has_mask else None
    return lax.all_to_all(call.whole(q, k, v, mask_BS=mask), axes.CONTEXT, 1, 2, tiled=True)


def _grouped(q: Any, k: Any, v: Any, attention: Callable[..., jax.Array]) -> jax.Array:
    """Call an attention with queries grouped by the key head that they share, and scaled."""
    dtype = q.dtype
    if dtype == jnp.float16:
        # not every device has products of float16 that add up in float32
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3]) * jnp.asarray(q.shape[3] ** -0.5, q.dtype)
    out = attention(q, k, v)
    return out.reshape(*out.shape[:2], -1, out.shape[4]).astype(dtype)


def _axes_of(*dims: str) -> list[tuple[str, ...]]:
    """Return the mesh axes that shard each dim of an activation."""
    spec = logical_to_mesh_axes((*dims, axes.HEAD_DIM)) or ()
    return [_names(entry) for entry in (*spec, *(None,) * len(dims))][: len(dims)]


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _size(names: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(name, 1) for name in names)
