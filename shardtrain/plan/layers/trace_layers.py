"""Trace the loss of any Flax model into its layers and the tensors between them, without devices.

A layer is a convolution, matrix product or lookup with weights, a product of activations, or a join of paths;
everything between, such as norms and activation functions, belongs to the layer that it follows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from shardtrain.functional.jaxprs import scan_counts
from shardtrain.functional.model import path_text
from shardtrain.functional.rng import new_key
from shardtrain.plan.fusion import ALIASES
from shardtrain.plan.jaxpr_walk import CALLED, OPAQUE
from shardtrain.plan.layers.layer_graph import (
    CONVOLUTION,
    JOIN,
    LOOKUP,
    PRODUCT,
    UNWEIGHTED_PRODUCT,
    Layer,
    Source,
)
from shardtrain.plan.named_dims import Operands, find_names
from shardtrain.plan.program import Dims
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import make_loss

MULTIPLIES = {"dot_general": PRODUCT, "ragged_dot_general": PRODUCT, "conv_general_dilated": CONVOLUTION}
SAME_TENSOR = ALIASES | {"convert_element_type", "transpose"}
"""Operations whose result is the same tensor, in another form."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Value:
    """What is known of an array of the traced loss.

    Args:
      active: whether it depends on the batch.
      layer: the layer that computed it; None: no layer did.
      path: of the parameter that it is a form of; None: it is none.
      dims: the names of its dims, if it is a form of a parameter.
      item_bytes: of an element of that parameter.
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
        """The value that this is a form of."""
        return self.first or self


def trace_layers(subject: Subject) -> tuple[Layer, ...]:
    """Return the layers of a model in training, for the whole batch, in order.

    Stacked blocks are taken one by one; matrix products that read one tensor, such as the query, key and
    value of an attention, are one layer.

    Args:
      subject: the model, its loss and its batch.
    """
    model, rows = subject.find_model(None), subject.batch_rows
    params, model_state = jax.eval_shape(model.init, new_key(0))
    key = jax.eval_shape(lambda: new_key(0))
    traced = jax.make_jaxpr(make_loss(model, subject.loss, rows))(
        params, model_state, key, dict(subject.batch)
    )
    names = jax.tree.leaves(model.dims, is_leaf=lambda leaf: leaf is None or isinstance(leaf, tuple))
    inputs = [
        Value(path=path_text(path), dims=dims or (None,) * len(leaf.shape), item_bytes=leaf.dtype.itemsize)
        for (path, leaf), dims in zip(jax.tree.leaves_with_path(params), names, strict=True)
    ]
    inputs += [Value() for _ in jax.tree.leaves((model_state, key))]
    inputs += [Value(active=True) for _ in jax.tree.leaves(dict(subject.batch))]
    walk = _Walk(rows=rows)
    walk.run(traced.jaxpr, inputs)
    return tuple(walk.layers)


@dataclass(kw_only=True)
class _Walk:
    """The layers of a computation, found one after the other.

    Args:
      rows: of the batch.
      layers: those found so far.
      reads: for each layer of matrix products the tensor that it reads, else None.
      trips: how often the present loop runs.
    """

    rows: int
    layers: list[Layer] = field(default_factory=list)
    reads: list[Value | None] = field(default_factory=list)
    trips: int = 1

    def run(self, jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
        """Add the layers of a jaxpr; return what is known of its results."""
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))

        def value(atom: Any) -> Value:
            return Value() if hasattr(atom, "val") else known.get(atom, Value())

        for equation in jaxpr.eqns:
            found = self._equation(equation, [value(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, found, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, reads: list[Value]) -> list[Value]:
        primitive, params = equation.primitive.name, equation.params
        if primitive == "scan":
            return self._scan(equation, reads)
        if primitive == "while":
            # nobody knows how often it runs: counted once
            return self._inline(params["body_jaxpr"], reads[params["cond_nconsts"] :])
        if primitive == "cond":
            # the branch with the most operations stands for all
            return self._inline(max(params["branches"], key=lambda each: len(each.jaxpr.eqns)), reads[1:])
        inner = next((params[key] for key in CALLED if key in params), None)
        if inner is not None and primitive not in OPAQUE:
            return self._inline(inner, reads)
        return self._operation(equation, reads)

    def _inline(self, inner: Any, reads: Sequence[Value]) -> list[Value]:
        jaxpr = getattr(inner, "jaxpr", inner)
        return self.run(jaxpr, reads[len(reads) - len(jaxpr.invars) :])

    def _scan(self, equation: Any, reads: list[Value]) -> list[Value]:
        """A loop over stacked parameters is its blocks one by one; of another the body runs several times."""
        jaxpr, length = equation.params["jaxpr"].jaxpr, equation.params["length"]
        consts, carried = scan_counts(equation)
        fixed, carry, stacked = reads[:consts], reads[consts : consts + carried], reads[consts + carried :]
        outputs: list[Value] = []
        if any(each.path is not None for each in stacked):
            for i in range(length):
                outputs = self.run(jaxpr, [*fixed, *carry, *(_row(each, str(i)) for each in stacked)])
                carry = outputs[:carried]
            return outputs
        self.trips *= length
        outputs = self.run(jaxpr, [*fixed, *carry, *(_row(each) for each in stacked)])
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
            number = self._count_weighted(equation, reads) if has_weight else self._product(equation, active)
        elif primitive == "gather" and not reads[0].active and reads[0].path is not None:
            number = self._lookup(equation, reads[0])
        elif len(layers) > 1:
            number = self._add(self._layer(equation, JOIN, active))
        else:
            number = next(iter(layers), None)
            first = active[0][0].root if primitive in SAME_TENSOR else None
            return [Value(active=True, layer=number, first=first) for _ in equation.outvars]
        return [Value(active=True, layer=number) for _ in equation.outvars]

    def _follow_parameters(self, equation: Any, reads: list[Value]) -> list[Value]:
        """What is computed from one parameter is a form of it; its dims are named by `named_dims`."""
        source = next((value for value in reads if value.path is not None), None)
        if source is None:
            return [Value() for _ in equation.outvars]
        dims = find_names(
            equation.primitive.name,
            Operands(
                [
                    value.dims if value.path is not None else (None,) * len(atom.aval.shape)
                    for value, atom in zip(reads, equation.invars, strict=True)
                ],
                [atom.aval.shape for atom in equation.invars],
                equation.params,
                [tuple(out.aval.shape) for out in equation.outvars],
            ),
        ).outputs
        return [replace(source, dims=each, first=None) for each in dims]

    def _layer(self, equation: Any, kind: str, active: Sequence[tuple[Value, Any]]) -> Layer:
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

    def _product(self, equation: Any, active: Sequence[tuple[Value, Any]]) -> int:
        """A product of activations can be split by the dims that both and the result have, such as heads."""
        layer = self._layer(equation, UNWEIGHTED_PRODUCT, active)
        shared = 1
        if equation.primitive.name == "dot_general":
            _, (batch, _) = equation.params["dimension_numbers"]
            shared = math.prod(equation.invars[0].aval.shape[i] for i in batch) // self.rows
        return self._add(replace(layer, flops=self.trips * _flops(equation), size_out=max(shared, 1)))

    def _count_weighted(self, equation: Any, reads: list[Value]) -> int:
        at = next(i for i, value in enumerate(reads[:2]) if value.path is not None)
        weight, aval = reads[at], equation.invars[at].aval
        value, other = reads[1 - at], equation.invars[1 - at].aval
        into, out = _features(equation, at)
        layer = replace(
            self._layer(equation, MULTIPLIES[equation.primitive.name], [(value, other)]),
            name=weight.path,
            flops=self.trips * _flops(equation),
            weight_bytes=aval.size * weight.item_bytes,
            size_in=math.prod(aval.shape[i] for i in into),
            size_out=math.prod(aval.shape[i] for i in out),
            dims_in=tuple(name for i in into if (name := weight.dims[i])),
            dims_out=tuple(name for i in out if (name := weight.dims[i])),
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

    def _lookup(self, equation: Any, table: Value) -> int:
        aval, numbers = equation.invars[0].aval, equation.params["dimension_numbers"]
        into = numbers.collapsed_slice_dims
        out = [i for i in range(len(aval.shape)) if i not in into]
        layer = replace(
            self._layer(equation, LOOKUP, []),
            name=table.path,
            weight_bytes=aval.size * table.item_bytes,
            size_in=math.prod(aval.shape[i] for i in into),
            size_out=math.prod(aval.shape[i] for i in out),
            dims_in=tuple(name for i in into if (name := table.dims[i])),
            dims_out=tuple(name for i in out if (name := table.dims[i])),
        )
        return self._add(layer)


def _row(value: Value, number: str = "") -> Value:
    """Return what is known of one row of stacked values."""
    if value.path is None:
        return replace(value, first=None)
    return replace(value, path=f"{value.path}[{number}]", dims=value.dims[1:], first=None)


def _features(equation: Any, at: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the dims of a weight that are input features and those that are output features."""
    numbers = equation.params.get("dimension_numbers")
    if equation.primitive.name == "conv_general_dilated":
        return (numbers.rhs_spec[1],), (numbers.rhs_spec[0],)
    rank = len(equation.invars[at].aval.shape)
    if equation.primitive.name == "ragged_dot_general":
        return (rank - 2,), (rank - 1,)
    contracted, batch = (each[at] for each in numbers)
    return contracted, [i for i in range(rank) if i not in (*contracted, *batch)]


def _flops(equation: Any) -> float:
    operands = [atom.aval.shape for atom in equation.invars]
    named = Operands([(None,) * len(shape) for shape in operands], operands, equation.params, [])
    return find_names(
        equation.primitive.name, named._replace(out_shapes=[equation.outvars[0].aval.shape])
    ).flops


def _bytes(aval: Any) -> float:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)
