"""The classes of a graph: layers, and the tensors between them. No jax.

`trace_layers.py` makes graphs of models. Next: `partition.py`, which splits a layer.
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
      layer: number of the layer that computes it.
      num_bytes: bytes of the tensor as it is read, and of its gradient.
    """

    layer: int
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, for the whole batch.

    Args:
      name: path of its weights, or of the tensors that it joins.
      kind: one of the above.
      sources: tensors that it reads from earlier layers; none if it reads the batch.
      flops: flops of the forward.
      weight_bytes: bytes of its weights, and of their gradient.
      output_bytes: bytes of its result, and of the result's gradient.
      rows: rows of the batch.
      size_in: number of input features; 1 if they cannot be split.
      size_out: number of output features; for a layer without weights, the size of the dim that input and
        result share.
      dims_in: dim names of the input features in the weights.
      dims_out: dim names of the output features.
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
        """Whether it has weights, and therefore the three types of splits."""
        return self.kind not in (JOIN, UNWEIGHTED_PRODUCT)

    @property
    def input_bytes(self) -> float:
        """Bytes of the tensors that it reads from other layers, and of their gradients."""
        return sum(source.num_bytes for source in self.sources)

    @property
    def step_flops(self) -> float:
        """Flops of forward and backward: each gradient costs a forward, and the batch needs no gradient."""
        return self.flops * (2 + bool(self.sources))
