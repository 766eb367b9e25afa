"""Communication of a training step by theory: bytes by collective and axes, from sizes alone. No jax.

For decoder-like models; the formulas are those of data parallelism, ZeRO (Rajbhandari et al. 2020),
Megatron's tensor split (Shoeybi et al. 2019) and sequence sharding (Korthikanti et al. 2022). Of a compiled
program: `plan/hlo/collectives.py`.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from shardtrain import axes
from shardtrain.plan.flows import Flows, StepSizes, of_activations, of_parameters, of_sequence
from shardtrain.plan.hlo.collectives import ALL_REDUCE, PERMUTE
from shardtrain.plan.weights import Weight
from shardtrain.sharding.layout import Layout


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


def sent_bytes(kind: str, num_devices: int, payload_bytes: float) -> float:
    """Return the bytes that each of n devices sends: in a ring (n - 1) / n of the array, or twice that.

    >>> sent_bytes("all-gather", 8, 800), sent_bytes("all-reduce", 8, 800)
    (700.0, 1400.0)
    """
    if kind == PERMUTE:
        return payload_bytes
    passes = 2 if kind == ALL_REDUCE else 1
    return passes * (num_devices - 1) / num_devices * payload_bytes


def step_traffic(work: StepSizes, layout: Layout, sizes: Mapping[str, int]) -> Traffic:
    """Return the bytes that each device has to send in one step.

    Ignores scalars (loss, gradient norm) and that norms are computed in float32. The gradient of an embedding
    that is also the head counts once, as if its two parts were added before the reduction. Gathers outside
    the blocks count for each microbatch, though a compiler may keep the result. Recomputation repeats no
    reduction, as with remat "none", "weights" or "outputs".

    Args:
      work: sizes of the step.
      layout: for `zero` and `sequence_sharded`; its rules are already in the weights.
      sizes: axis -> size, see `axis_sizes`.

    Returns:
      Bytes per device by collective, axes and whether in the blocks; entries of 0 are left out.

    >>> work = StepSizes(weights=(Weight(num_elements=100, axes=frozenset(), in_blocks=True),),
    ...             num_tokens=1, embed=1, num_blocks=1)
    >>> step_traffic(work, Layout(mesh={"data": 2}), {"data": 2, "fsdp": 1, "tensor": 1})
    {Key(kind='all-reduce', axes=('data',), in_blocks=False): 400.0}
    """
    # three sources: parameters and their gradients, activations of tensor parallelism, and, with a sharded
    # sequence, one more
    parameters = of_parameters(work, layout.zero, sizes)
    # with a sharded sequence, weights that tensor does not shard get partial gradients
    sequence = [of_sequence(weight, work) for weight in work.weights if axes.TENSOR not in weight.axes]
    parts = [of_activations(work, layout, sizes), parameters, *(sequence if layout.sequence_sharded else [])]
    return _summed((flow for part in parts for flow in part), sizes)


def parameter_traffic(
    weights: tuple[Weight, ...],
    layout: Layout,
    sizes: Mapping[str, int],
    microbatches: int,
    compute_bytes: int = 4,
    block_gathers: float = 2,
    *,
    sums_apart: bool = False,
) -> Traffic:
    """Return the bytes that each device has to send for parameters and gradients in one step of any model.

    They depend on the layout only, not on the model's computation.

    Args:
      weights: the parameters.
      layout, sizes: as in `step_traffic`.
      microbatches: number of microbatches that a step accumulates.
      compute_bytes, block_gathers: as in `StepSizes`.
      sums_apart: whether gradients that are added to one over fsdp or expert are all-reduced one by one (and
        then cut), as programs of XLA for CPU do; others reduce their sum.

    Returns:
      Bytes per device by collective, axes and whether in the blocks; entries of 0 are left out.

    >>> weights = (Weight(num_elements=100, axes=frozenset({"fsdp"}), in_blocks=False),)
    >>> for key, num_bytes in parameter_traffic(weights, Layout(mesh={"fsdp": 2}), {"fsdp": 2}, 4).items():
    ...     print(key.kind, key.axes, num_bytes)
    all-gather ('fsdp',) 800.0
    reduce-scatter ('fsdp',) 800.0
    """
    return _parameter_traffic(
        weights, layout.zero, tuple(sizes.items()), microbatches, compute_bytes, block_gathers, sums_apart
    )


@lru_cache(maxsize=4096)
def _parameter_traffic(
    weights: tuple[Weight, ...],
    zero: int,
    sizes: tuple[tuple[str, int], ...],
    microbatches: int,
    compute_bytes: int,
    block_gathers: float,
    sums_apart: bool,
) -> Traffic:
    """Return the same, kept: a search asks for each schedule and each way to recompute."""
    work = StepSizes(
        weights=weights,
        num_tokens=0,
        embed=0,
        num_blocks=0,
        microbatches=microbatches,
        compute_bytes=compute_bytes,
        block_gathers=block_gathers,
        sums_apart=sums_apart,
    )
    return MappingProxyType(_summed(of_parameters(work, zero, dict(sizes)), dict(sizes)))


def _summed(flows: Flows, sizes: Mapping[str, int]) -> dict[Key, float]:
    """Return the sent bytes of all flows by key, without axes of size 1."""
    sums: dict[Key, float] = defaultdict(float)
    for kind, over, in_blocks, payload_bytes in flows:
        # an axis of size 1 has no traffic: traffic over (data, fsdp=1) is that over data
        present = tuple(axis for axis in over if sizes.get(axis, 1) > 1)
        num_devices = math.prod(sizes[axis] for axis in present)
        sums[Key(kind, present, in_blocks)] += sent_bytes(kind, num_devices, payload_bytes)
    return {key: num_bytes for key, num_bytes in sums.items() if num_bytes}
