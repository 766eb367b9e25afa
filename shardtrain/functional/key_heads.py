"""Split the heads and positions of attention over the mesh axis context, or say what cannot be split.

Next: `context_attention.py`, which computes it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain import axes
from shardtrain.errors.messages import refuse
from shardtrain.functional.mesh_axes import num_devices


@dataclass(frozen=True)
class KeyHeads:
    """The key heads that a device's queries need, where keys are sharded over fewer devices than queries.

    Args:
      axes_of_q: mesh axes that shard the heads of queries.
      axes_of_k: mesh axes that shard the heads of keys, the first ones of `axes_of_q`.
      devices_of_q: number of devices of `axes_of_q`.
      devices_of_k: number of devices of `axes_of_k`.
    """

    axes_of_q: tuple[str, ...]
    axes_of_k: tuple[str, ...]
    devices_of_q: int
    devices_of_k: int

    def problems(self, q: Any, k: Any) -> list[str]:
        """List the heads of shapes (B, T, heads, K) that cannot be split."""
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
        """Return the numbers of query heads and of key heads of a device."""
        heads = q[2] // self.devices_of_q
        return heads, heads // math.gcd(heads, q[2] // k[2])

    def of(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Return the key heads of this device's queries, in their order, each as often as its group needs it.

        Args:
          q: queries of this device, (B, T, H, K).
          k: keys of this device, (B, S, kv_heads, K).
        """
        if self.axes_of_k == self.axes_of_q:
            return k
        heads, kv_heads = q.shape[2] * self.devices_of_q, k.shape[2] * self.devices_of_k
        group = math.gcd(q.shape[2], heads // kv_heads)
        first = lax.axis_index(self.axes_of_q) * q.shape[2]
        at = (first + jnp.arange(0, q.shape[2], group)) * kv_heads // heads
        return k[:, :, at % k.shape[2]]


def key_heads(heads: tuple[str, ...], kv_heads: tuple[str, ...], sizes: Mapping[str, int]) -> KeyHeads:
    """Return how key heads are split; they are gathered unless they are sharded like the heads of queries.

    Args:
      heads: mesh axes that shard the heads of queries.
      kv_heads: mesh axes that shard the heads of keys.
      sizes: axis -> size.
    """
    kv_heads = kv_heads if kv_heads == heads[: len(kv_heads)] else ()
    return KeyHeads(heads, kv_heads, num_devices(heads, sizes), num_devices(kv_heads, sizes))


def check_split(
    kind: str, q: tuple[int, ...], k: tuple[int, ...], num: int, own: KeyHeads, causal: bool
) -> None:
    """Check that attention can be split over context.

    Args:
      kind: as in `ContextAttention`.
      q: shape of the queries, (B, T, H, K).
      k: shape of the keys, (B, S, kv_heads, K).
      num: devices of context.
      own: how heads are split.
      causal: as for `ContextAttention`.

    Raises:
      ValueError: lists every size that cannot be split.
    """
    problems = _problems(kind, q, k, num, own, causal)
    refuse(f"attention by {kind} over context={num} cannot split this", problems)


def check_layout(
    kind: str,
    q: tuple[int, ...],
    k: tuple[int, ...],
    causal: bool,
    rules: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, int],
) -> None:
    """Check that a layout can split attention, before anything is traced on its mesh.

    Args:
      kind, q, k, causal: as in `check_split`.
      rules: dim -> axes of activations.
      sizes: axis -> size.

    Raises:
      ValueError: lists every size that cannot be split.
    """
    num = sizes.get(axes.CONTEXT, 1)
    if num > 1 and tuple(rules.get(axes.SEQ, ())) == (axes.CONTEXT,):
        heads, kv_heads = (
            tuple(axis for axis in rules.get(dim, ()) if sizes.get(axis, 1) > 1)
            for dim in (axes.HEADS, axes.KV_HEADS)
        )
        check_split(kind, q, k, num, key_heads(heads, kv_heads, sizes), causal)


def _problems(kind: str, q: Any, k: Any, num: int, own: KeyHeads, causal: bool) -> list[str]:
    parts = 2 * num if kind == "ring" and causal else num
    lengths = {"queries": q[1], "keys": k[1]}
    found = [
        f"{length} {name} cannot be split into {parts} parts: {length} % {parts} = {length % parts}."
        f" Use {length - length % parts or parts} or {length - length % parts + parts}"
        for name, length in lengths.items()
        if length % parts
    ]
    of_heads = own.problems(q, k)
    if kind == "all-to-all" and not of_heads:
        of_heads = [
            f"{heads} {name} of a device cannot be split over {num}; use a context that divides"
            f" them, or --context-attention ring"
            for name, heads in zip(("heads", "kv_heads"), own.counts(q, k), strict=True)
            if heads % num
        ]
    return [*found, *of_heads]
