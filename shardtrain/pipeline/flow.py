"""Trace the parts of a model to find the values that are sent between them.

A value that a part returns unchanged is sent directly from the part that computes it to the parts that read
it, and its cotangents return the same way. So a model with skip connections or several values at a boundary
needs no declarations. Next: `train_step/stage_compute.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardtrain.jaxpr.forward import find_read


class Value(NamedTuple):
    """An array sent between parts: leaf number `leaf` of the activations that part `part` returns."""

    part: int
    leaf: int


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The values between the parts of a model.

    Args:
      activations: part -> shapes of the activations that enter it; () for the first part.
      sources: part -> the value that each leaf of these activations is.
      reads: part -> the values that it reads.
      writes: part -> the values that it computes and a later part reads.
      shapes: the shape of each value that is read, for all rows of a microbatch.
    """

    activations: tuple[Any, ...]
    sources: tuple[tuple[Value, ...], ...]
    reads: tuple[tuple[Value, ...], ...]
    writes: tuple[tuple[Value, ...], ...]
    shapes: Mapping[Value, jax.ShapeDtypeStruct]

    def readers(self, value: Value) -> list[int]:
        """Return the parts that read a value, in order."""
        return [part for part, values in enumerate(self.reads) if value in values]

    def has_cotangent(self, value: Value) -> bool:
        """Return whether a value has cotangents; masks and integers have none."""
        return jnp.issubdtype(self.shapes[value].dtype, jnp.inexact)


def find_flow(parts: Sequence[Callable[[Any, Any], Any]], params: Any, num_rows: int) -> Flow:
    """Trace parts one after the other and return the values between them; computes nothing.

    Args:
      parts: each a function (params, activations) -> activations; the first gets (), the last returns
        anything.
      params: shapes.
      num_rows: number of rows of a microbatch.

    Raises:
      ValueError: activations have no arrays, or an array whose first dim is not the rows.
    """
    activations: list[Any] = [()]
    sources: list[tuple[Value, ...]] = [()]
    reads: list[tuple[Value, ...]] = []
    for number, part in enumerate(parts):
        # trace the part with the shapes of the activations that enter it
        traced, shapes = jax.make_jaxpr(part, return_shape=True)(params, activations[-1])
        jaxpr, before = traced.jaxpr, sources[-1]
        # the last inputs of the traced program are the leaves of the activations
        given = jaxpr.invars[len(jaxpr.invars) - len(before) :]
        # it reads the leaves that one of its operations uses; the last part also those that it returns
        is_last = number == len(parts) - 1
        is_read = find_read(traced, by_outputs=is_last)[len(jaxpr.invars) - len(before) :]
        reads.append(tuple(dict.fromkeys(compress(before, is_read))))
        if is_last:
            break
        # an output that is an input unchanged stays the value of the part that computed it
        through = {id(v): source for source, v in zip(before, given, strict=True)}
        sources.append(tuple(through.get(id(v), Value(number, i)) for i, v in enumerate(jaxpr.outvars)))
        activations.append(shapes)
        if problem := _find_activations_problem(number, shapes, num_rows):
            raise ValueError(problem)
    # only values that a later part reads are sent
    read = sorted({value for values in reads for value in values})
    return Flow(
        activations=tuple(activations),
        sources=tuple(sources),
        reads=tuple(reads),
        writes=tuple(tuple(v for v in read if v.part == part) for part in range(len(parts))),
        shapes={v: jax.tree.leaves(activations[v.part + 1])[v.leaf] for v in read},
    )


def _find_activations_problem(part: int, activations: Any, num_rows: int) -> str:
    """Describe why the activations of a part cannot be sent; "" if they can."""
    leaves = jax.tree.leaves_with_path(activations)
    if not leaves:
        return (
            f"part {part} of the model returns activations without arrays; return what the next block reads"
        )
    if any(x.shape[:1] != (num_rows,) for _, x in leaves):
        shapes = ", ".join(f"{jax.tree_util.keystr(path)} {list(x.shape)}" for path, x in leaves)
        return (
            f"part {part} of the model returns arrays whose first dims are not the {num_rows} rows: {shapes};"
            " every array of the activations has the rows of the batch first"
        )
    return ""
