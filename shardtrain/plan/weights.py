"""Sizes and shardings of a model's parameters, as formulas of traffic and memory take them. No jax."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtrain import axes
from shardtrain.sharding.array_dims import Named
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
      num_gradients: how many are added to that of a microbatch; of an embedding that is the head too 2.
    """

    num_elements: int
    axes: frozenset[str]
    in_blocks: bool
    num_gradients: int = 1


def weights(
    arrays: Mapping[str, Named], rules: Rules, num_gradients: Sequence[int] = ()
) -> tuple[Weight, ...]:
    """Return size and sharding of the parameters of a model.

    Args:
      arrays: path -> dims and shape; those with the dim `layers` are in the blocks.
      rules: dim -> axes, `Layout.sharded_rules`. Dims without a name are not sharded.
      num_gradients: of each parameter, in their order; (): 1 of each.

    >>> weights({"up": Named(dims=("layers", "embed"), shape=(2, 8))}, {"layers": (), "embed": ("fsdp",)})
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
