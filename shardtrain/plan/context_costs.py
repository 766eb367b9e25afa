"""What attention over the mesh axis context sends and computes, by its kind. No jax.

The formulas are those of `docs/context.md`: ring attention (Liu et al. 2023), all-gather, and all-to-all
(Jacobs et al. 2023). Next: `stage_runs.py`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from shardtrain import axes
from shardtrain.plan.cost import Cost, Sent
from shardtrain.plan.hlo.collectives import PERMUTE
from shardtrain.plan.prediction import Choice

RECOMPUTED = 0.9
"""The part of the flops of attention from which on a program is taken to compute it again."""


class ContextCost(NamedTuple):
    """What attention over context costs a device, for each microbatch.

    Args:
      forward_bytes, backward_bytes: sent.
      again_bytes: sent where the backward computes attention again.
      messages: of a forward.
      flops: computed beside those of the traced program, forward and backward; negative where a ring leaves
        out what a causal mask hides.
    """

    forward_bytes: float
    backward_bytes: float
    again_bytes: float
    messages: float
    flops: float


def moved_part(num: int) -> float:
    """Return the part of the positions that a causal ring moves to be balanced.

    Of 2N halves device i has 2i and 2i + 1, and in the ring i and 2N - 1 - i.

    >>> moved_part(2), moved_part(4)
    (0.5, 0.75)
    """
    balanced = [min(half, 2 * num - 1 - half) for half in range(2 * num)]
    return sum(half // 2 != device for half, device in enumerate(balanced)) / (2 * num)


def context_cost(found: Cost, alone: Cost, sizes: Mapping[str, int], kind: str) -> ContextCost:
    """Return what the attention of a microbatch costs beside the traced program.

    Windows, which a ring may stop at, are not known here.

    Args:
      found: the cost of loss and gradient.
      alone: of the loss alone, with its attention.
      sizes: axis -> size.
      kind: as `Layout.context_attention`.
    """
    num, total = sizes[axes.CONTEXT], ContextCost(0.0, 0.0, 0.0, 0.0, 0.0)
    flops = sum(each.flops for each in alone.attended)
    # a backward costs twice its forward: what is more is computed again
    again = found.flops - 3 * alone.flops >= RECOMPUTED * flops
    for each in alone.attended:
        whole, keys = 2 * each.q_bytes + each.kv_bytes, (num - 1) * each.kv_bytes
        # the scores are computed again in the backward: 5 products beside the 2 of the forward
        products, part = 3.5 + 0.5 * again, 1.0
        if kind == "all-to-all":
            moved = (num - 1) / num * whole
            one = ContextCost(moved, moved, moved, 4 * each.calls, 0.0)
        elif kind == "all-gather":
            one = ContextCost(keys, 2 * keys, 0.0, 2 * (num - 1) * each.calls, 0.0)
        else:
            moved = moved_part(num) * whole * each.causal
            part = (2 * num + 1) / (4 * num) if each.causal else 1.0
            messages = (2 * (num - 1) + 4 * each.causal) * each.calls
            one = ContextCost(keys + moved, 2 * keys + moved, moved, messages, 0.0)
        if kind != "all-to-all":
            one = one._replace(flops=each.flops * (products * part - 3 - again))
        total = ContextCost(*(a + b for a, b in zip(total, one, strict=True)))
    return total if again else total._replace(again_bytes=0.0)


def more_flops(found: Cost, alone: Cost | None, sizes: Mapping[str, int], choice: Choice) -> float:
    """Return the flops of attention over context beside those of the traced program, of a microbatch."""
    if alone is None or sizes.get(axes.CONTEXT, 1) == 1:
        return 0.0
    return context_cost(found, alone, sizes, choice.layout.context_attention).flops


def sent_by_attention(
    found: Cost, alone: Cost | None, sizes: Mapping[str, int], choice: Choice, backwards: int
) -> tuple[Sent, ...]:
    """Return what attention over context sends in a step, of a stage on average; () without the axis.

    Args:
      found, alone, sizes: as in `context_cost`, of a microbatch of a chunk.
      choice: the layout and the rest.
      backwards: kinds of backward tasks of a pipeline, each of which computes the forward again.
    """
    if alone is None or sizes.get(axes.CONTEXT, 1) == 1:
        return ()
    cost = context_cost(found, alone, sizes, choice.layout.context_attention)
    runs, parts = choice.accumulate * choice.virtual_stages, sizes[axes.PIPELINE] * choice.virtual_stages
    forwards = 1.0 if sizes[axes.PIPELINE] == 1 else (parts - 1) / parts + backwards
    num_bytes = forwards * cost.forward_bytes + cost.again_bytes + cost.backward_bytes
    times = (forwards + 2) * cost.messages
    return (Sent(PERMUTE, (axes.CONTEXT,), runs * num_bytes, runs * times),)
