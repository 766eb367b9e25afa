"""What a training step moves between devices by theory: whole arrays, by collective and axes. No jax.

`traffic.py` adds up what a device sends for it, and names the sources of the formulas.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardtrain import axes
from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from shardtrain.plan.weights import GRADIENT_BYTES, Weight
from shardtrain.sharding.layout import Layout

LOSS_SUMS = 3
"""Numbers that a softmax over a sharded vocabulary reduces per token: largest logit, sum, target's logit."""


Flows = Iterator[tuple[str, tuple[str, ...], bool, float]]
"""Collective, axes, whether in the blocks, and bytes of the unsharded array over all runs."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes of a training step.

    Args:
      weights: the parameters. One outside the blocks that tensor shards is a vocabulary.
      num_tokens: number of tokens of the global batch, over all microbatches: B T.
      embed: features of the residual stream: D.
      num_blocks: number of blocks, each with two tensor-parallel halves (attention and feed-forward).
      microbatches: number of microbatches that a step accumulates.
      compute_bytes: bytes of an element in computations: 4, or 2 for bfloat16.
      block_gathers: all-gathers of a block's weight per microbatch: 2 (forward and backward), or 1 if it is
        stored in between (remat "none").
      sums_apart: as in `parameter_traffic`.
    """

    weights: tuple[Weight, ...]
    num_tokens: int
    embed: int
    num_blocks: int
    microbatches: int = 1
    compute_bytes: int = 4
    block_gathers: float = 2
    sums_apart: bool = False


def of_parameters(work: StepSizes, zero: int, sizes: Mapping[str, int]) -> Flows:
    """Yield the flows of parameters and their gradients.

    Args:
      work: sizes of the step.
      zero: as `Layout.zero`.
      sizes: axis -> size.
    """
    for weight in work.weights:
        yield from (_gathered_weight(weight, work, sizes) if zero == 3 else _replicated_weight(weight, sizes))
        # each device of context has gradients from its part of the sequences, in every microbatch
        used = weight.num_elements / _total(sizes, weight.axes - {axes.FSDP})
        used_bytes = work.microbatches * used * work.compute_bytes
        yield ALL_REDUCE, (axes.CONTEXT,), weight.in_blocks, used_bytes
        # and each device of expert from examples of its own, but of experts, which it has for all; where fsdp
        # has examples too, one collective is over both
        if axes.EXPERT not in weight.axes and not _with_expert(weight, zero, sizes):
            yield ALL_REDUCE, (axes.EXPERT,), weight.in_blocks, _apart(weight, work, sizes) * used_bytes
        if not weight.in_blocks:  # replicated over pipeline stages, each of which adds to its gradient
            stored = weight.num_elements / _total(sizes, weight.axes)
            yield ALL_REDUCE, (axes.PIPELINE,), False, stored * GRADIENT_BYTES


def _gathered_weight(weight: Weight, work: StepSizes, sizes: Mapping[str, int]) -> Flows:
    """ZeRO-3: all-gather over fsdp at each use, reduce-scatter of gradients, all-reduce over data."""
    # what a device has while it computes: gathered over fsdp, still split over tensor
    local = weight.num_elements / _total(sizes, weight.axes - {axes.FSDP})
    used_bytes = work.microbatches * local * work.compute_bytes
    # every microbatch gathers the weight and scatters its gradient; one that fsdp does not shard is only
    # reduced
    if axes.FSDP in weight.axes:
        gathers = work.block_gathers if weight.in_blocks else 1
        yield ALL_GATHER, (axes.FSDP,), weight.in_blocks, gathers * used_bytes
        if _with_expert(weight, 3, sizes):
            over = (axes.FSDP, axes.EXPERT)
            yield ALL_REDUCE, over, weight.in_blocks, _apart(weight, work, sizes) * used_bytes
        elif _apart(weight, work, sizes) > 1:
            yield ALL_REDUCE, (axes.FSDP,), weight.in_blocks, _apart(weight, work, sizes) * used_bytes
        else:
            yield REDUCE_SCATTER, (axes.FSDP,), weight.in_blocks, used_bytes
    else:
        over = (axes.FSDP, axes.EXPERT) if _with_expert(weight, 3, sizes) else (axes.FSDP,)
        yield ALL_REDUCE, over, weight.in_blocks, used_bytes
    # once a step the shards of the gradient are summed over data
    stored = weight.num_elements / _total(sizes, weight.axes)
    yield ALL_REDUCE, (axes.DATA,), False, stored * GRADIENT_BYTES


def _with_expert(weight: Weight, zero: int, sizes: Mapping[str, int]) -> bool:
    """Whether one collective sums a gradient over the examples of fsdp and expert: it does at ZeRO-3."""
    is_both = sizes.get(axes.FSDP, 1) > 1 and sizes.get(axes.EXPERT, 1) > 1
    return zero == 3 and is_both and axes.EXPERT not in weight.axes


def _apart(weight: Weight, work: StepSizes, sizes: Mapping[str, int]) -> int:
    """Return how many gradients of a weight are reduced one by one."""
    apart = work.sums_apart and sizes.get(axes.PIPELINE, 1) == 1
    return weight.num_gradients if apart else 1


def _replicated_weight(weight: Weight, sizes: Mapping[str, int]) -> Flows:
    """ZeRO-1 and 2: reduce-scatter of the gradient and all-gather of the parameter over fsdp in each step."""
    stored_bytes = GRADIENT_BYTES * weight.num_elements / _total(sizes, weight.axes - {axes.FSDP})
    # a weight that fsdp does not shard has its whole gradient reduced over both axes
    if axes.FSDP not in weight.axes:
        yield ALL_REDUCE, (axes.FSDP,), False, stored_bytes
        yield ALL_REDUCE, (axes.DATA,), False, stored_bytes
        return
    # each device reduces and updates its shard, then all gather the new parameter
    yield REDUCE_SCATTER, (axes.FSDP,), False, stored_bytes
    yield ALL_REDUCE, (axes.DATA,), False, stored_bytes / sizes.get(axes.FSDP, 1)
    yield ALL_GATHER, (axes.FSDP,), False, stored_bytes


def of_sequence(weight: Weight, work: StepSizes) -> Flows:
    """A weight replicated over tensor, each device of which has gradients from its part of the sequence."""
    used_bytes = work.microbatches * weight.num_elements * work.compute_bytes
    yield ALL_REDUCE, (axes.TENSOR,), weight.in_blocks, used_bytes


def of_activations(work: StepSizes, layout: Layout, sizes: Mapping[str, int]) -> Flows:
    """Tensor: each half of a block, and a vocabulary, reduces a residual stream forward and backward."""
    # the residual stream of this device: its rows, and its part of their positions
    tokens = work.num_tokens / _total(sizes, (*layout.batch_axes, axes.CONTEXT))
    stream_bytes = tokens * work.embed * work.compute_bytes
    has_vocab = any(axes.TENSOR in weight.axes and not weight.in_blocks for weight in work.weights)
    # with a sharded sequence an all-reduce becomes a reduce-scatter and, before the next matrix product, an
    # all-gather
    kinds = (ALL_GATHER, REDUCE_SCATTER) if layout.sequence_sharded else (ALL_REDUCE,)
    # two halves of a block, forward and backward: 4; outside the blocks the vocabulary alone: 2
    in_blocks = 4 * work.num_blocks * stream_bytes
    for kind in kinds:
        if not layout.collective_matmul:
            yield kind, (axes.TENSOR,), True, in_blocks
        yield kind, (axes.TENSOR,), False, 2 * has_vocab * stream_bytes
    if layout.collective_matmul:
        # the same bytes, part by part
        num = sizes.get(axes.TENSOR, 1)
        yield PERMUTE, (axes.TENSOR,), True, len(kinds) * in_blocks * (num - 1) / num
    yield ALL_REDUCE, (axes.TENSOR,), False, LOSS_SUMS * has_vocab * tokens * 4


def _total(sizes: Mapping[str, int], over: frozenset[str] | tuple[str, ...]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in over)
