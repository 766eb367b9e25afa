"""Attention over sequences that are sharded over the mesh axis context, for models that know no mesh.

A run gives it to models among their operations (docs/decisions/0035); outside a
run, and with context=1, a model computes its attention itself. Next: `ring_attention.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.functional.key_heads import KeyHeads, check_split, key_heads
from shardtrain.functional.mesh_axes import find_mesh_axes, map_shards, num_devices
from shardtrain.functional.ring import Ring
from shardtrain.functional.ring_attention import attend_gathered, ring_attention
from shardtrain.functional.run_trace import note
from shardtrain.models.attention.blockwise import label_keys
from shardtrain.models.attention.options import ScoreOptions
from shardtrain.models.attention.score_blocks import VisibleKeys, group_heads, window_reach

Whole = Callable[..., jax.Array]
"""(q, k, v, causal=, mask_BS=) -> attention over whole sequences, as the model computes it."""


BIAS = "bias_BHTS"
"""The argument that is added to the scores; it is sharded over heads, not over positions."""


@dataclass(frozen=True)
class ContextAttention:
    """Attention whose queries, keys and values are sharded over context along the sequence.

    Args:
      kind: "ring", "all-gather" or "all-to-all", see `Layout.context_attention`.
    """

    kind: str

    def __call__(
        self,
        whole: Whole,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        causal: bool,
        mask_BS: Any = None,
        segments_BT: Any = None,
        window: Any = None,
        soft_cap: float | None = None,
        bias_BHTS: Any = None,
    ) -> jax.Array:
        """Compute the attention of arrays with the dims (batch, seq, heads, head_dim).

        Args:
          whole: the model's own attention over whole sequences.
          q: (B, T, H, K).
          k: (B, S, kv_heads, K).
          v: (B, S, kv_heads, K).
          causal: queries see keys of positions up to their own; T is S.
          mask_BS: 0 for keys that are hidden; None shows all keys.
          segments_BT: int; queries see keys of their own segment; T is S. None means one segment.
          window: largest number of keys that a causal query sees, its own and those just before it: a number
            or an int scalar. None disables it.
          soft_cap: scores x become soft_cap * tanh(x / soft_cap). None disables it.
          bias_BHTS: added to the scores, by "all-to-all" only. None adds nothing.

        Returns:
          Shaped and typed as q.

        Raises:
          ValueError: lists every size that cannot be split; or a bias is given to another kind.
        """
        mesh = jax.sharding.get_abstract_mesh()
        rows, seq, heads = find_mesh_axes(axes.BATCH, axes.SEQ, axes.HEADS)
        *_, kv_heads = find_mesh_axes(axes.BATCH, axes.SEQ, axes.KV_HEADS)
        num = mesh.shape.get(axes.CONTEXT, 1)
        whole = (
            partial(whole, causal=causal, soft_cap=soft_cap) if soft_cap else partial(whole, causal=causal)
        )
        mask = None if mask_BS is None else mask_BS != 0
        facts = {"mask_BS": mask, "segments_BT": segments_BT, "window": window, BIAS: bias_BHTS}
        facts = {name: fact for name, fact in facts.items() if fact is not None}
        # a layout may leave sequences whole
        if num == 1 or seq != (axes.CONTEXT,):
            return whole(q, k, v, **facts)
        if bias_BHTS is not None and self.kind != "all-to-all":
            raise ValueError(
                f"attention by {self.kind} over context={num} has no relative positions; use"
                " --context-attention all-to-all, or a mesh with context=1"
            )
        own = key_heads(heads, kv_heads, mesh.shape)
        check_split(self.kind, q.shape, k.shape, num, own, causal)
        # a few rows that are only traced need not divide
        rows = rows if q.shape[0] % num_devices(rows, mesh.shape) == 0 else ()
        # a window that is known is no argument
        known = facts.pop("window") if isinstance(window, int) else None
        in_stages = mesh.shape.get(axes.PIPELINE, 1) > 1
        call = _Call(whole, num, causal, known, soft_cap, in_stages)
        return self._attend_on_shards(call, own, (rows, seq, heads), q, k, v, facts)

    def _attend_on_shards(
        self,
        call: "_Call",
        own: KeyHeads,
        sharded: tuple[tuple[str, ...], ...],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        facts: dict[str, Any],
    ) -> jax.Array:
        """Compute the attention on the shards of each device.

        Args:
          call: the options of the call.
          own: the key heads of each device.
          sharded: the mesh axes that shard the rows, positions and heads of the queries.
          q, k, v: as for a call.
          facts: the mask, segments, window and bias that are given.
        """
        rows, seq, heads = sharded
        split = PartitionSpec(rows or None, seq, heads or None)
        of_keys = PartitionSpec(rows or None, seq, own.axes_of_k or None)
        compute = CONTEXT_ATTENTIONS[self.kind]
        if self.kind != "all-to-all":
            text = f"over context={call.num}, in plain jax: it has no kernel for any device"
            note(f"attention: {self.kind} {text}")

        def of_device(q: jax.Array, k: jax.Array, v: jax.Array, facts: dict[str, Any]) -> jax.Array:
            return compute(call, q, own.of(q, k), own.of(q, v), facts)

        by_position = PartitionSpec(rows or None, seq)
        of_facts = {name: PartitionSpec() if name == "window" else by_position for name in facts}
        if BIAS in facts:
            # of the heads that a device has once sequences are exchanged for them
            of_facts[BIAS] = PartitionSpec(rows or None, (*heads, axes.CONTEXT))
        return map_shards(of_device, (split, of_keys, of_keys, of_facts), split)(q, k, v, facts)


@dataclass(frozen=True)
class _Call:
    """The options of a call of `ContextAttention`.

    Args:
      whole: the model's own attention, with `causal` and `soft_cap`.
      num: number of devices along context.
      causal: see `ContextAttention`.
      window: see `ContextAttention`; None if it is an array.
      soft_cap: see `ContextAttention`.
      in_stages: whether the mesh has pipeline stages, which do not run the same operations together.
    """

    whole: Whole
    num: int
    causal: bool
    window: int | None
    soft_cap: float | None
    in_stages: bool


def _attend_ring(call: _Call, q: Any, k: Any, v: Any, facts: dict[str, Any]) -> Any:
    """Send keys and values around the ring; causal ones in an order that gives all devices equal work."""
    seen = _label_keys(call, facts)
    order = "balanced" if call.causal else "any"
    ring = Ring(axes.CONTEXT, call.num, order, soft_cap=call.soft_cap, in_pairs=call.in_stages)
    # contiguous shards if a window needs few of them; with a mask a query may see no key, which needs all
    if call.causal and call.window is not None and "mask_BS" not in facts:
        reach = window_reach(call.num, q.shape[1], call.window)
        ring = ring if reach is None else replace(ring, order="window", reach=reach)
    if ring.order != "balanced":
        return group_heads(q, k, v, lambda *arrays: ring_attention(*arrays, seen, ring))
    of_queries, of_keys = jax.tree.map(ring.balance_halves, (seen.of_queries, seen.of_keys))
    seen = VisibleKeys(of_queries, of_keys, seen.window)
    # one exchange for all three
    heads = (q.shape[2], q.shape[2] + k.shape[2])
    q, k, v = jnp.split(ring.balance_halves(jnp.concatenate([q, k, v], 2)), heads, 2)
    out = group_heads(q, k, v, lambda *arrays: ring_attention(*arrays, seen, ring))
    return ring.balance_halves(out, inverse=True)


def _attend_all_gather(call: _Call, q: Any, k: Any, v: Any, facts: dict[str, Any]) -> Any:
    """Gather keys and values; each device computes the scores of its queries to all of them."""
    seen = _label_keys(call, facts)
    seen = seen._replace(of_keys=jax.tree.map(_gather, seen.of_keys))
    first = lax.axis_index(axes.CONTEXT) * q.shape[1] if call.causal else None
    options = seen, first, call.soft_cap, axes.CONTEXT
    return group_heads(q, k, v, lambda *arrays: attend_gathered(*arrays, *options))


def _attend_all_to_all(call: _Call, q: Any, k: Any, v: Any, facts: dict[str, Any]) -> Any:
    """Exchange sequences for heads: each device computes whole sequences of some heads."""
    q, k, v = (lax.all_to_all(x, axes.CONTEXT, 2, 1, tiled=True) for x in (q, k, v))
    not_by_position = ("window", BIAS)
    facts = {name: fact if name in not_by_position else _gather(fact) for name, fact in facts.items()}
    if call.window is not None:
        facts["window"] = call.window
    return lax.all_to_all(call.whole(q, k, v, **facts), axes.CONTEXT, 1, 2, tiled=True)


CONTEXT_ATTENTIONS = {
    "ring": _attend_ring,
    "all-gather": _attend_all_gather,
    "all-to-all": _attend_all_to_all,
}
"""Name -> attention over the shards of sequences on each device. "all-to-all" computes whole sequences by any
entry of `models.attention.ATTENTIONS`; the others have code of their own."""


def _label_keys(call: _Call, facts: dict[str, Any]) -> VisibleKeys:
    return label_keys(ScoreOptions(**{"window": call.window, **facts}))


def _gather(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, axes.CONTEXT, axis=1, tiled=True)
