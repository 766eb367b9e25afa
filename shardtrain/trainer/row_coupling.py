"""Find where rows of a batch depend on each other in the traced program of a loss, before the first step.

Replicas, microbatches and islands have rows of their own. What is computed from several rows, but for the
sums that a loss returns, is then not what one device computes. Next: `loss_trace.py`, which traces it.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.errors.user_code import FOLDER
from shardtrain.functional.dependencies import CALLED, dependencies
from shardtrain.functional.model import path_text
from shardtrain.functional.traced_equations import TracedEquation

REDUCING = ("reduce_", "arg", "dot_general")
NONLINEAR = (
    "exp",
    "expm1",
    "integer_pow",
    "log",
    "log1p",
    "logistic",
    "pow",
    "rsqrt",
    "sqrt",
    "square",
    "tanh",
)
MOVING = ("broadcast_in_dim", "convert_element_type", "reshape")
NORMALIZATION = "normalization.py"
"""Flax's file of batch norms, whose statistics are those of a replica, as the documents say."""


def coupling_warnings(traced: Any, prime: int, num_parts: int) -> list[str]:
    """Return a warning for each line of a user at which rows depend on each other.

    Args:
      traced: the program of a loss for `2 * prime` rows, a ClosedJaxpr; other dims are no multiples of it.
      prime: a prime.
      num_parts: parts into which a batch is split, over replicas, microbatches and islands.
    """
    if num_parts == 1:
        return []
    found = _Coupling(prime)
    found.walk(traced.jaxpr, [False] * len(traced.jaxpr.invars), ())
    return [
        f"WARNING: {line} {what}; a batch is split into {num_parts} parts, over replicas, microbatches and"
        " islands, and each has its own rows alone, so losses are not those of one device: compute it of each"
        " row, or do not split batches (one island, no axis data, no ZeRO stage 1 or 2, --accumulate 1)"
        for line, what in found.lines.items()
    ]


def state_warnings(
    traced: Any, model_state: Any, num_arrays: int, num_parts: int, num_microbatches: int
) -> list[str]:
    """Return a warning about arrays of the model's state that change otherwise where a batch is split.

    Args:
      traced: the program of a loss, see `trace_loss`.
      model_state: the state, of shapes.
      num_arrays: the number of arrays of a batch.
      num_parts: see `coupling_warnings`.
      num_microbatches: parts that one replica computes one after the other.
    """
    jaxpr, paths = traced.jaxpr, [path_text(path) for path, _ in jax.tree.leaves_with_path(model_state)]
    # behind the sum, the count and metrics; a loss need not call the model
    if not paths or len(jaxpr.outvars) < 2 + len(paths):
        return []
    before = jaxpr.invars[-num_arrays - len(paths) : -num_arrays]
    groups = [int(number >= len(jaxpr.invars) - num_arrays) for number in range(len(jaxpr.invars))]
    read_rows = dependencies(jaxpr, groups)[-len(paths) :]
    names = [
        path
        for path, old, new, reads_rows in zip(
            paths, before, jaxpr.outvars[-len(paths) :], read_rows, strict=True
        )
        if new is not old and (num_parts if reads_rows else num_microbatches) > 1
        # arrays that are attributes, which are kept as their bits
        if not jnp.issubdtype(old.aval.dtype, jnp.unsignedinteger)
        # the documents say so of batch norms and of routers
        if path.split("/")[-1] not in ("mean", "var", "router_bias")
    ]
    if not names:
        return []
    return [
        f"WARNING: a call of the model changes {', '.join(names)}; each of the {num_parts} parts of a batch,"
        " over replicas, microbatches and islands, changes it by its own rows, so losses are not those of one"
        " device (docs/models.md)"
    ]


class _Coupling:
    """Lines at which rows depend on each other, and how."""

    def __init__(self, prime: int):
        self.prime = prime
        self.lines: dict[str, str] = {}

    def rows_of(self, variable: Any) -> list[int]:
        """Return the dims that count rows."""
        shape = getattr(variable.aval, "shape", ())
        return [dim for dim, size in enumerate(shape) if size and size % self.prime == 0]

    def walk(self, jaxpr: Any, summed: Iterable[bool], outer: tuple[Any, ...]) -> list[bool]:
        """Go through a program; return which outputs are computed from sums over rows.

        Args:
          jaxpr: the program.
          summed: which of its inputs are.
          outer: the equations that it is in.
        """
        known = {v for v, is_summed in zip(jaxpr.invars, summed, strict=True) if is_summed}
        numbers: set[Any] = set()
        for equation in jaxpr.eqns:
            name, outputs = equation.primitive.name, equation.outvars
            # constants are no keys
            inputs = [not hasattr(v, "val") and v in known for v in equation.invars]
            programs = _programs(equation)
            after = [False] * len(outputs)
            for program, skipped in programs:
                found = self.walk(program, inputs[skipped:], (*outer, equation))
                after = [a or b for a, b in zip(after, found, strict=True)]
            if not programs:
                is_sum = name.startswith(REDUCING) and any(map(self.rows_of, equation.invars))
                after = [not self.rows_of(v) and (is_sum or any(inputs)) for v in outputs]
            known.update(v for v, is_summed in zip(outputs, after, strict=True) if is_summed)
            counted = [v for v in equation.invars if not hasattr(v, "val") and v in numbers]
            if (name == "iota" and equation.params["dimension"] in self.rows_of(outputs[0])) or (
                name in MOVING and counted
            ):
                numbers.add(outputs[0])
            reads_sum = any(inputs) and not programs
            if what := outputs and self._what(equation, reads_sum, outputs[0] in numbers):
                self._note(TracedEquation(equation, [], outer), what)
        return [not hasattr(v, "val") and v in known for v in jaxpr.outvars]

    def _what(self, equation: Any, reads_sum: bool, is_number: bool) -> str:
        """Say how rows depend on each other in an operation; nothing if they do not."""
        name, params, output = equation.primitive.name, equation.params, equation.outvars[0]
        rows = self.rows_of(output)
        if name == "scan" and params["length"] % self.prime == 0:
            return "loops over rows"
        if name == "sort" and output.aval.shape[params["dimension"]] == 2 * self.prime:
            return "sorts or permutes rows"
        if name.startswith("cum") and params["axis"] in rows:
            return "adds up along rows"
        if name == "concatenate" and params["dimension"] in rows:
            parts = [v.aval.shape[params["dimension"]] for v in equation.invars]
            return "moves rows to the places of others" if any(size % self.prime for size in parts) else ""
        if not jnp.issubdtype(output.aval.dtype, jnp.floating):
            return ""
        if is_number:
            return "computes with the numbers of rows, which begin at 0 in each part"
        if len(rows) > 1 and all(len(self.rows_of(v)) < 2 for v in equation.invars):
            return "computes something for each pair of rows"
        if reads_sum and rows:
            return "gives each row a number that is computed from all rows, such as their mean"
        if reads_sum and name in NONLINEAR:
            return f"takes the {name} of a sum over rows, and sums of parts are added up"
        return ""

    def _note(self, at: TracedEquation, what: str) -> None:
        traces = [each.source_info.traceback for each in (*at.outer, at.equation)]
        files = {frame.file_name for trace in traces for frame in (trace.frames if trace else ())}
        is_users = at.line != "?" and not at.line.startswith(FOLDER)
        if is_users and not any(file.endswith(NORMALIZATION) for file in files):
            self.lines.setdefault(at.line, what)


def _programs(equation: Any) -> list[tuple[Any, int]]:
    """Return the programs of an operation that calls some, each with the number of inputs that it lacks."""
    params = equation.params
    if equation.primitive.name == "cond":
        return [(branch.jaxpr, 1) for branch in params["branches"]]
    found = next((params[each] for each in CALLED if each in params), None)
    inner = getattr(found, "jaxpr", found)
    return [] if inner is None or len(inner.invars) != len(equation.invars) else [(inner, 0)]
