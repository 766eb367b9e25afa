"""Trace the loss of any Flax model into a graph of layers, without devices.

A layer is a convolution, matrix product or lookup with weights, a product of activations, or a join of paths.
Other operations, such as norms and activation functions, belong to the layer before them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from shardtrain.functional.model import path_text
from shardtrain.functional.rng import new_key
from shardtrain.jaxpr.cost import count_flops
from shardtrain.jaxpr.equations import find_largest_run, split_operands
from shardtrain.jaxpr.forward import forward
from shardtrain.plan.fusion import ALIASES
from shardtrain.plan.layers.layer_graph import (
    CONVOLUTION,
    JOIN,
    LOOKUP,
    PRODUCT,
    UNWEIGHTED_PRODUCT,
    Layer,
    Source,
)
from shardtrain.plan.named_dims import find_names
from shardtrain.plan.program import Dims
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import is_dims, make_loss

MULTIPLIES = {"dot_general": PRODUCT, "ragged_dot_general": PRODUCT, "conv_general_dilated": CONVOLUTION}
SAME_TENSOR = ALIASES | {"convert_element_type", "transpose"}
"""Operations whose result is the same tensor in another form."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Value:
    """An array of the traced loss.

    Args:
      active: whether it depends on the batch.
      layer: number of the layer that computed it, if one did.
      path: path of the parameter that it is a form of, if it is one.
      dims: its dim names, if it is a form of a parameter.
      item_bytes: bytes of an element of that parameter.
      first: the value that it is another form of.
    """

    active: bool = False
    layer: int | None = None
    path: str | None = None
    dims: Dims = ()
    item_bytes: int = 4
    first: "Value | None" = None

    @property
    def root(self) -> "Value":
        """The value that this is a form of, or itself."""
        return self.first or self


def trace_layers(subject: Subject) -> tuple[Layer, ...]:
    """Return the layers of a model in training, for the whole batch, in order.

    Stacked blocks are separate layers. Matrix products that read one tensor, such as the query, key and value
    of an attention, are one layer.

    Args:
      subject: the model, its loss and its batch.
    """
    model, rows = subject.find_model(None), subject.batch_rows
    params, model_state = jax.eval_shape(model.init, new_key(0))
    key = jax.eval_shape(lambda: new_key(0))
    traced = jax.make_jaxpr(make_loss(model, subject.loss, rows))(
        params, model_state, key, dict(subject.batch)
    )
    names = jax.tree.leaves(model.dims, is_leaf=is_dims)
    inputs = [
        Value(path=path_text(path), dims=dims or (None,) * len(leaf.shape), item_bytes=leaf.dtype.itemsize)
        for (path, leaf), dims in zip(jax.tree.leaves_with_path(params), names, strict=True)
    ]
    inputs += [Value() for _ in jax.tree.leaves((model_state, key))]
    inputs += [Value(active=True) for _ in jax.tree.leaves(dict(subject.batch))]
    walk = _Walk(rows=rows)
    walk.run(traced, inputs)
    return tuple(walk.layers)


@dataclass(kw_only=True)
class _Walk:
    """The layers that a walk has found so far.

    Args:
      rows: rows of the batch.
      layers: the layers.
      reads: the tensor that each layer of matrix products reads; None for other layers.
      trips: number of trips of the loops around.
    """

    rows: int
    layers: list[Layer] = field(default_factory=list)
    reads: list[Value | None] = field(default_factory=list)
    trips: int = 1

    def run(self, program: Any, inputs: Sequence[Value]) -> list[Value]:
        """Add the layers of a program; return its results."""
        return forward(program, inputs, self._add_equation, lambda _: Value())

    def _add_equation(self, equation: Any, reads: list[Value]) -> list[Value]:
        if equation.primitive.name == "scan":
            return self._scan(equation, reads)
        inner = find_largest_run(equation, reads)
        return self._operation(equation, reads) if inner is None else self.run(*inner)

    def _scan(self, equation: Any, reads: list[Value]) -> list[Value]:
        """Add each block of a loop over stacked parameters, or the body of any other loop once."""
        jaxpr, length = equation.params["jaxpr"], equation.params["length"]
        fixed, carry, stacked = split_operands(equation, reads)
        outputs: list[Value] = []
        if any(each.path is not None for each in stacked):
            for i in range(length):
                outputs = self.run(jaxpr, [*fixed, *carry, *(_take_row(each, str(i)) for each in stacked)])
                carry = outputs[: len(carry)]
            return outputs
        self.trips *= length
        outputs = self.run(jaxpr, [*fixed, *carry, *(_take_row(each) for each in stacked)])
        self.trips //= length
        return outputs

    def _operation(self, equation: Any, reads: list[Value]) -> list[Value]:
        primitive = equation.primitive.name
        active = [
            (value, atom.aval) for value, atom in zip(reads, equation.invars, strict=True) if value.active
        ]
        if not active:
            return self._follow_parameters(equation, reads)
        layers = dict.fromkeys(value.layer for value, _ in active if value.layer is not None)
        weight = next((value for value in reads if value.path is not None), None)
        if primitive in MULTIPLIES:
            has_weight = len(active) == 1 and weight is not None
            number = (
                self._add_weighted(equation, reads) if has_weight else self._add_product(equation, active)
            )
        elif primitive == "gather" and not reads[0].active and reads[0].path is not None:
            number = self._add_lookup(equation, reads[0])
        elif len(layers) > 1:
            number = self._add(self._make_layer(equation, JOIN, active))
        else:
            number = next(iter(layers), None)
            first = active[0][0].root if primitive in SAME_TENSOR else None
            return [Value(active=True, layer=number, first=first) for _ in equation.outvars]
        return [Value(active=True, layer=number) for _ in equation.outvars]

    def _follow_parameters(self, equation: Any, reads: list[Value]) -> list[Value]:
        """Return the results of an operation on parameters, which are forms of the first one."""
        source = next((value for value in reads if value.path is not None), None)
        if source is None:
            return [Value() for _ in equation.outvars]
        given = [
            value.dims if value.path is not None else (None,) * len(atom.aval.shape)
            for value, atom in zip(reads, equation.invars, strict=True)
        ]
        dims = find_names(equation, given).outputs
        return [replace(source, dims=each, first=None) for each in dims]

    def _make_layer(self, equation: Any, kind: str, active: Sequence[tuple[Value, Any]]) -> Layer:
        out = equation.outvars[0].aval
        # a layer may read several results of another, such as query and key
        read = {(value.layer, value.root): _bytes(aval) for value, aval in active if value.layer is not None}
        sources: dict[int, float] = {}
        for (number, _), size in read.items():
            sources[number] = sources.get(number, 0.0) + self.trips * size
        return Layer(
            name=equation.primitive.name,
            kind=kind,
            sources=tuple(Source(layer=n, num_bytes=size) for n, size in sources.items()),
            output_bytes=self.trips * _bytes(out),
            rows=self.rows,
            size_in=1.0,
            size_out=out.shape[-1] if len(out.shape) > 1 else 1.0,
        )

    def _add(self, layer: Layer, reads: Value | None = None) -> int:
        self.layers.append(layer)
        self.reads.append(reads)
        return len(self.layers) - 1

    def _add_product(self, equation: Any, active: Sequence[tuple[Value, Any]]) -> int:
        """Add a product of activations, which can be split by the dims that both share, such as heads."""
        layer = self._make_layer(equation, UNWEIGHTED_PRODUCT, active)
        shared = 1
        if equation.primitive.name == "dot_general":
            _, (batch, _) = equation.params["dimension_numbers"]
            shared = math.prod(equation.invars[0].aval.shape[i] for i in batch) // self.rows
        return self._add(replace(layer, flops=self.trips * count_flops(equation), size_out=max(shared, 1)))

    def _add_weighted(self, equation: Any, reads: list[Value]) -> int:
        at = next(i for i, value in enumerate(reads[:2]) if value.path is not None)
        weight, aval = reads[at], equation.invars[at].aval
        value, other = reads[1 - at], equation.invars[1 - at].aval
        into, out = _features(equation, at)
        layer = replace(
            self._make_layer(equation, MULTIPLIES[equation.primitive.name], [(value, other)]),
            name=weight.path,
            flops=self.trips * count_flops(equation),
            weight_bytes=aval.size * weight.item_bytes,
            size_in=math.prod(aval.shape[i] for i in into),
            size_out=math.prod(aval.shape[i] for i in out),
            dims_in=_select_names(weight, into),
            dims_out=_select_names(weight, out),
        )
        same = next(
            (n for n, each in enumerate(self.reads) if each is value.root and layer.kind == PRODUCT), None
        )
        if same is None:
            return self._add(layer, value.root if layer.kind == PRODUCT else None)
        before = self.layers[same]
        self.layers[same] = replace(
            before,
            name=f"{before.name} + {layer.name}",
            flops=before.flops + layer.flops,
            weight_bytes=before.weight_bytes + layer.weight_bytes,
            output_bytes=before.output_bytes + layer.output_bytes,
            size_out=min(before.size_out, layer.size_out),
            dims_out=tuple(dict.fromkeys((*before.dims_out, *layer.dims_out))),
        )
        return same

    def _add_lookup(self, equation: Any, table: Value) -> int:
        aval, numbers = equation.invars[0].aval, equation.params["dimension_numbers"]
        into = numbers.collapsed_slice_dims
        out = [i for i in range(len(aval.shape)) if i not in into]
        layer = replace(
            self._make_layer(equation, LOOKUP, []),
            name=table.path,
            weight_bytes=aval.size * table.item_bytes,
            size_in=math.prod(aval.shape[i] for i in into),
            size_out=math.prod(aval.shape[i] for i in out),
            dims_in=_select_names(table, into),
            dims_out=_select_names(table, out),
        )
        return self._add(layer)


def _take_row(value: Value, number: str = "") -> Value:
    """Return one row of a stacked value."""
    if value.path is None:
        return replace(value, first=None)
    return replace(value, path=f"{value.path}[{number}]", dims=value.dims[1:], first=None)


def _features(equation: Any, at: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the dims of a weight that are input features, and the ones that are output features."""
    numbers = equation.params.get("dimension_numbers")
    if equation.primitive.name == "conv_general_dilated":
        return (numbers.rhs_spec[1],), (numbers.rhs_spec[0],)
    rank = len(equation.invars[at].aval.shape)
    if equation.primitive.name == "ragged_dot_general":
        return (rank - 2,), (rank - 1,)
    contracted, batch = (each[at] for each in numbers)
    return contracted, [i for i in range(rank) if i not in (*contracted, *batch)]


def _select_names(value: Value, dims: Sequence[int]) -> tuple[str, ...]:
    return tuple(name for i in dims if (name := value.dims[i]))


def _bytes(aval: Any) -> float:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)
