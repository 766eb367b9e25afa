"""The values that are sent between the parts of a model, found by tracing: nothing is declared.

A value that a part passes through unchanged goes straight from the part that made it to those that read it,
and its cotangents come back the same way. So the model needs no code for skip edges or several values at a
boundary. Next: `train_step/stage_executor.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Value(NamedTuple):
    """An array between parts: leaf `leaf` of the stream that part `part` returns, for each microbatch."""

    part: int
    leaf: int


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The values between the parts of a model.

    Args:
      streams: part -> the stream that it is given, as shapes; () for the first part.
      sources: part -> where each leaf of that stream was made.
      reads: part -> the values that it reads.
      writes: part -> the values that it makes and a later part reads.
      shapes: of each value that is read, for all rows of a microbatch.
    """

    streams: tuple[Any, ...]
    sources: tuple[tuple[Value, ...], ...]
    reads: tuple[tuple[Value, ...], ...]
    writes: tuple[tuple[Value, ...], ...]
    shapes: Mapping[Value, jax.ShapeDtypeStruct]

    def readers(self, value: Value) -> list[int]:
        """Return the parts that read a value, in order."""
        return [part for part, values in enumerate(self.reads) if value in values]

    def has_error(self, value: Value) -> bool:
        """Whether a value has cotangents: masks and integers have none."""
        return jnp.issubdtype(self.shapes[value].dtype, jnp.inexact)

    def num_bytes(self, value: Value) -> int:
        """Return the size of one message of a value."""
        shape = self.shapes[value]
        return shape.size * shape.dtype.itemsize


def find_flow(parts: Sequence[Callable[[Any, Any], Any]], params: Any, num_rows: int) -> Flow:
    """Trace parts one after the other, without computing anything.

    Args:
      parts: each a function (params, stream) -> stream; the first is given (), the last returns anything.
      params: shapes.
      num_rows: of a microbatch.

    Raises:
      ValueError: a stream has no arrays, or one whose first dim is not that of rows.
    """
    streams: list[Any] = [()]
    sources: list[tuple[Value, ...]] = [()]
    reads: list[tuple[Value, ...]] = []
    for number, part in enumerate(parts):
        traced, shapes = jax.make_jaxpr(part, return_shape=True)(params, streams[-1])
        jaxpr, before = traced.jaxpr, sources[-1]
        given = jaxpr.invars[len(jaxpr.invars) - len(before) :]
        used = {id(v) for equation in jaxpr.eqns for v in equation.invars}
        is_last = number == len(parts) - 1
        if is_last:
            used |= {id(v) for v in jaxpr.outvars}
        reads.append(tuple(dict.fromkeys(s for s, v in zip(before, given, strict=True) if id(v) in used)))
        if is_last:
            break
        through = {id(v): source for source, v in zip(before, given, strict=True)}
        sources.append(tuple(through.get(id(v), Value(number, i)) for i, v in enumerate(jaxpr.outvars)))
        streams.append(shapes)
        if problem := _stream_problem(number, shapes, num_rows):
            raise ValueError(problem)
    read = sorted({value for values in reads for value in values})
    return Flow(
        streams=tuple(streams),
        sources=tuple(sources),
        reads=tuple(reads),
        writes=tuple(tuple(v for v in read if v.part == part) for part in range(len(parts))),
        shapes={v: jax.tree.leaves(streams[v.part + 1])[v.leaf] for v in read},
    )


def _stream_problem(part: int, stream: Any, num_rows: int) -> str:
    """Describe why the activations of a part cannot be sent; "" if they can."""
    leaves = jax.tree.leaves_with_path(stream)
    if not leaves:
        return f"part {part} of the model returns a stream without arrays; return what the next block reads"
    if any(x.shape[:1] != (num_rows,) for _, x in leaves):
        shapes = ", ".join(f"{jax.tree_util.keystr(path)} {list(x.shape)}" for path, x in leaves)
        return (
            f"part {part} of the model returns arrays whose first dims are not the {num_rows} rows: {shapes};"
            " every array of a stream has the rows of the batch first"
        )
    return ""
