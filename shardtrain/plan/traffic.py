"""Compute in theory the bytes that a step sends, by collective and mesh axes, from sizes. No jax.

The bytes are those of parameters and gradients, by data parallelism and ZeRO (Rajbhandari et al. 2020); a
trace of the model has those of its activations. `plan/hlo/collectives.py` reads the bytes of a compiled
program.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from shardtrain import axes
from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from shardtrain.sharding.array_dims import NamedArray
from shardtrain.sharding.rules import Rules

GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced, and parameters updated, in float32."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Size and sharding of a parameter.

    Args:
      num_elements: number of elements of the unsharded array, with all stacked blocks.
      axes: the axes that shard it when fully sharded (`Layout.sharded_rules`).
      in_blocks: whether it is stacked over the blocks.
      num_gradients: number of gradients that are added up in a microbatch: 2 for an embedding that is also
        the head.
    """

    num_elements: int
    axes: frozenset[str]
    in_blocks: bool
    num_gradients: int = 1


def weights(
    arrays: Mapping[str, NamedArray], rules: Rules, num_gradients: Sequence[int] = ()
) -> tuple[Weight, ...]:
    """Return size and sharding of the parameters of a model.

    Args:
      arrays: path -> dims and shape; arrays with the dim `layers` are in the blocks.
      rules: dim -> axes, `Layout.sharded_rules`. Dims without a name are not sharded.
      num_gradients: see `Weight`, for each parameter; () means 1 for all.

    >>> arrays = {"up": NamedArray(dims=("layers", "embed"), shape=(2, 8))}
    >>> weights(arrays, {"layers": (), "embed": ("fsdp",)})
    (Weight(num_elements=16, axes=frozenset({'fsdp'}), in_blocks=True, num_gradients=1),)
    """
    return tuple(
        Weight(
            num_elements=math.prod(named.shape),
            axes=frozenset(axis for dim in named.dims or () for axis in rules.get(dim or "", ())),
            in_blocks=axes.LAYERS in (named.dims or ()),
            num_gradients=number,
        )
        for named, number in zip(arrays.values(), num_gradients or [1] * len(arrays), strict=True)
    )


Flows = Iterator[tuple[str, tuple[str, ...], bool, float]]
"""Collective, axes, whether it is in the blocks, and bytes of the unsharded array over all runs."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes of a training step.

    Args:
      weights: the parameters.
      microbatches: number of microbatches that a step accumulates.
      compute_bytes: bytes of an element in computations: 4, or 2 for bfloat16.
      block_gathers: all-gathers of a block's weight per microbatch: 2 (forward and backward), or 1 if it is
        stored in between (remat "none").
      sums_apart: whether several gradients of a weight are all-reduced separately over fsdp or expert, as by
        XLA for CPU, and not their sum.
    """

    weights: tuple[Weight, ...]
    microbatches: int = 1
    compute_bytes: int = 4
    block_gathers: float = 2
    sums_apart: bool = False


def list_parameter_flows(work: StepSizes, zero: int, sizes: Mapping[str, int]) -> Flows:
    """Yield the flows of parameters and their gradients.

    Args:
      work: sizes of the step.
      zero: as `Layout.zero`.
      sizes: axis -> size.
    """
    for weight in work.weights:
        yield from (_gather_weight(weight, work, sizes) if zero == 3 else _replicate_weight(weight, sizes))
        # each device of context has gradients of its part of the sequences, in every microbatch
        used = weight.num_elements / _multiply_sizes(sizes, weight.axes - {axes.FSDP})
        used_bytes = work.microbatches * used * work.compute_bytes
        yield ALL_REDUCE, (axes.CONTEXT,), weight.in_blocks, used_bytes
        # and each device of expert has gradients of its own examples, except for weights of experts; if fsdp
        # also splits examples, one collective is over both
        if axes.EXPERT not in weight.axes and not _is_with_expert(weight, zero, sizes):
            yield ALL_REDUCE, (axes.EXPERT,), weight.in_blocks, _count_apart(weight, work, sizes) * used_bytes
        if not weight.in_blocks:  # replicated over pipeline stages, each of which adds to its gradient
            stored = weight.num_elements / _multiply_sizes(sizes, weight.axes)
            yield ALL_REDUCE, (axes.PIPELINE,), False, stored * GRADIENT_BYTES


def _gather_weight(weight: Weight, work: StepSizes, sizes: Mapping[str, int]) -> Flows:
    """ZeRO-3: all-gather over fsdp at each use, reduce-scatter of gradients, all-reduce over data."""
    # for computation a weight is gathered over fsdp, and still split over tensor
    local = weight.num_elements / _multiply_sizes(sizes, weight.axes - {axes.FSDP})
    used_bytes = work.microbatches * local * work.compute_bytes
    # every microbatch gathers the weight and scatters its gradient; a weight that fsdp does not shard is only
    # reduced
    if axes.FSDP in weight.axes:
        gathers = work.block_gathers if weight.in_blocks else 1
        yield ALL_GATHER, (axes.FSDP,), weight.in_blocks, gathers * used_bytes
        if _is_with_expert(weight, 3, sizes):
            over = (axes.FSDP, axes.EXPERT)
            yield ALL_REDUCE, over, weight.in_blocks, _count_apart(weight, work, sizes) * used_bytes
        elif _count_apart(weight, work, sizes) > 1:
            yield ALL_REDUCE, (axes.FSDP,), weight.in_blocks, _count_apart(weight, work, sizes) * used_bytes
        else:
            yield REDUCE_SCATTER, (axes.FSDP,), weight.in_blocks, used_bytes
    else:
        over = (axes.FSDP, axes.EXPERT) if _is_with_expert(weight, 3, sizes) else (axes.FSDP,)
        yield ALL_REDUCE, over, weight.in_blocks, used_bytes
    # once a step the shards of the gradient are summed over data
    stored = weight.num_elements / _multiply_sizes(sizes, weight.axes)
    yield ALL_REDUCE, (axes.DATA,), False, stored * GRADIENT_BYTES


def _is_with_expert(weight: Weight, zero: int, sizes: Mapping[str, int]) -> bool:
    """Return whether one collective sums a gradient over the examples of fsdp and expert, as at ZeRO-3."""
    is_both = sizes.get(axes.FSDP, 1) > 1 and sizes.get(axes.EXPERT, 1) > 1
    return zero == 3 and is_both and axes.EXPERT not in weight.axes


def _count_apart(weight: Weight, work: StepSizes, sizes: Mapping[str, int]) -> int:
    """Return how many gradients of a weight are reduced separately."""
    apart = work.sums_apart and sizes.get(axes.PIPELINE, 1) == 1
    return weight.num_gradients if apart else 1


def _replicate_weight(weight: Weight, sizes: Mapping[str, int]) -> Flows:
    """ZeRO-1 and 2: reduce-scatter of the gradient and all-gather of the parameter over fsdp in each step."""
    stored_bytes = GRADIENT_BYTES * weight.num_elements / _multiply_sizes(sizes, weight.axes - {axes.FSDP})
    # a weight that fsdp does not shard has its whole gradient reduced over both axes
    if axes.FSDP not in weight.axes:
        yield ALL_REDUCE, (axes.FSDP,), False, stored_bytes
        yield ALL_REDUCE, (axes.DATA,), False, stored_bytes
        return
    # each device reduces and updates its shard, then all gather the new parameter
    yield REDUCE_SCATTER, (axes.FSDP,), False, stored_bytes
    yield ALL_REDUCE, (axes.DATA,), False, stored_bytes / sizes.get(axes.FSDP, 1)
    yield ALL_GATHER, (axes.FSDP,), False, stored_bytes


def _multiply_sizes(sizes: Mapping[str, int], over: frozenset[str] | tuple[str, ...]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in over)


class Key(NamedTuple):
    """Which traffic: collective, mesh axes, and whether it belongs to the blocks."""

    kind: str
    """As in `collectives.KINDS`."""
    axes: tuple[str, ...]
    """The mesh axes it runs over, slowest first."""
    in_blocks: bool
    """Whether it occurs in each block, or outside of them: embedding, head, update."""


Traffic = Mapping[Key, float]
"""Bytes that each device sends per step, with ring algorithms."""


def count_sent_bytes(kind: str, num_devices: int, payload_bytes: float) -> float:
    """Return the bytes that each of n devices sends: (n - 1) / n of the array in a ring, or twice as much.

    >>> count_sent_bytes("all-gather", 8, 800), count_sent_bytes("all-reduce", 8, 800)
    (700.0, 1400.0)
    """
    if kind == PERMUTE:
        return payload_bytes
    passes = 2 if kind == ALL_REDUCE else 1
    return passes * (num_devices - 1) / num_devices * payload_bytes


def parameter_traffic(work: StepSizes, zero: int, sizes: Mapping[str, int]) -> Traffic:
    """Return the bytes that each device has to send for parameters and gradients in one step of any model.

    They depend on the layout only, not on the model's computation.

    Args:
      work: sizes of the step.
      zero: as `Layout.zero`.
      sizes: axis -> size.

    Returns:
      Bytes per device by collective, axes and whether in the blocks, without entries of 0.

    >>> work = StepSizes(weights=(Weight(num_elements=100, axes=frozenset({"fsdp"}), in_blocks=False),))
    >>> for key, num_bytes in parameter_traffic(work, 3, {"fsdp": 2}).items():
    ...     print(key.kind, key.axes, num_bytes)
    all-gather ('fsdp',) 200.0
    reduce-scatter ('fsdp',) 200.0
    """
    return _parameter_traffic(work, zero, tuple(sizes.items()))


@lru_cache(maxsize=4096)
def _parameter_traffic(work: StepSizes, zero: int, sizes: tuple[tuple[str, int], ...]) -> Traffic:
    return MappingProxyType(_sum_flows(list_parameter_flows(work, zero, dict(sizes)), dict(sizes)))


def _sum_flows(flows: Flows, sizes: Mapping[str, int]) -> dict[Key, float]:
    """Return the sent bytes of all flows by key, without axes of size 1."""
    sums: dict[Key, float] = defaultdict(float)
    for kind, over, in_blocks, payload_bytes in flows:
        # an axis of size 1 has no traffic: traffic over (data, fsdp=1) is that over data
        present = tuple(axis for axis in over if sizes.get(axis, 1) > 1)
        num_devices = math.prod(sizes[axis] for axis in present)
        sums[Key(kind, present, in_blocks)] += count_sent_bytes(kind, num_devices, payload_bytes)
    return {key: num_bytes for key, num_bytes in sums.items() if num_bytes}
