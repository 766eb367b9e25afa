"""The layers of a model and the tensors between them, as values. No jax.

`trace_layers.py` makes graphs of models. Next: `partition.py`, the ways to partition a layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.errors.messages import problems_error

CONVOLUTION, PRODUCT, LOOKUP = "convolution", "product", "lookup"
"""Layers with weights: a convolution, a matrix product, rows of a table by their numbers."""

JOIN, UNWEIGHTED_PRODUCT = "join", "product of activations"
"""Layers without weights: where paths join, such as a residual sum; a product of two activations."""

KINDS = (CONVOLUTION, PRODUCT, LOOKUP, JOIN, UNWEIGHTED_PRODUCT)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A tensor that a layer reads from another layer.

    Args:
      layer: the number of the layer that computes it.
      num_bytes: of the tensor as it is read; its gradient, which goes the other way, has as many.
    """

    layer: int
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, for the whole batch.

    Args:
      name: the path of its weights, or of what joins.
      kind: one of `KINDS`.
      sources: the tensors that it reads from other layers; none if it reads the batch.
      flops: of the forward.
      weight_bytes: of its weights, and of their gradient.
      output_bytes: of its result, and of that one's gradient.
      rows: of the batch.
      size_in: sum over the input features, the second dim of its input; 1: it cannot be split.
      size_out: output features, the second dim of its result; of a layer without weights the size of the dim
        that its input and its result have in common.
      dims_in: the names of the input features' dims, as the weights have them.
      dims_out: the names of the output features' dims.

    Raises:
      ValueError: lists every field that is out of range.
    """

    name: str
    kind: str
    sources: tuple[Source, ...] = ()
    flops: float = 0.0
    weight_bytes: float = 0.0
    output_bytes: float = 0.0
    rows: float = math.inf
    size_in: float = math.inf
    size_out: float = math.inf
    dims_in: tuple[str, ...] = ()
    dims_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = ("flops", "weight_bytes", "output_bytes", "rows", "size_in", "size_out")
        problems = [
            f"{name} is {getattr(self, name)}; give a number from 0"
            for name in numbers
            if not getattr(self, name) >= 0
        ]
        problems += [
            f"a source has {source.num_bytes} bytes; give a number from 0"
            for source in self.sources
            if not source.num_bytes >= 0
        ]
        if len({source.layer for source in self.sources}) < len(self.sources):
            problems.append("two sources are one layer; give one with the bytes of both")
        if self.kind not in KINDS:
            problems.append(f"kind is {self.kind!r}; use one of {', '.join(KINDS)}")
        if problems:
            raise problems_error(f"layer {self.name!r} cannot be partitioned", problems)

    @property
    def has_weights(self) -> bool:
        """Whether it has weights, and so the three partition types."""
        return self.kind not in (JOIN, UNWEIGHTED_PRODUCT)

    @property
    def input_bytes(self) -> float:
        """Bytes of what it reads from other layers; their gradient has as many."""
        return sum(source.num_bytes for source in self.sources)

    @property
    def step_flops(self) -> float:
        """Flops of forward and backward: each of two gradients costs a forward; the batch needs none."""
        return self.flops * (2 + bool(self.sources))


def check_order(layers: Sequence[Layer]) -> None:
    """Refuse layers that read later ones.

    Raises:
      ValueError: lists all of them.
    """
    problems = [
        f"layer {i} ({layer.name}) reads layer {source.layer}; put that one before it, at 0 to {i - 1}"
        for i, layer in enumerate(layers)
        for source in layer.sources
        if not 0 <= source.layer < i
    ]
    if problems:
        raise problems_error(f"{len(layers)} layers are not in an order to compute them", problems)
