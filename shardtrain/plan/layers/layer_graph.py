"""The layers of a model and the tensors between them, as values. No jax.

`trace_layers.py` makes graphs of models. Next: `partition.py`, the ways to partition a layer.
"""

import math
from dataclasses import dataclass

CONVOLUTION, PRODUCT, LOOKUP = "convolution", "product", "lookup"
"""Layers with weights: a convolution, a matrix product, rows of a table by their numbers."""

JOIN, UNWEIGHTED_PRODUCT = "join", "product of activations"
"""Layers without weights: where paths join, such as a residual sum; a product of two activations."""


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
      kind: one of the above.
      sources: the tensors that it reads from layers before it, each of another; none if it reads the batch.
      flops: of the forward.
      weight_bytes: of its weights, and of their gradient.
      output_bytes: of its result, and of that one's gradient.
      rows: of the batch.
      size_in: sum over the input features, the second dim of its input; 1: it cannot be split.
      size_out: output features, the second dim of its result; of a layer without weights the size of the dim
        that its input and its result have in common.
      dims_in: the names of the input features' dims, as the weights have them.
      dims_out: the names of the output features' dims.
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
