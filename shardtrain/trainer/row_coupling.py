"""Find where rows of a batch depend on each other in the traced program of a loss, before the first step.

Replicas, microbatches and islands have rows of their own. What is computed from several rows, but for the
sums that a loss returns, is then not what one device computes. Next: `loss_trace.py`, which traces it.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardtrain.errors.user_code import FOLDER, is_users
from shardtrain.functional.jaxprs import CALLED, TracedEquation

REDUCING = ("reduce_", "arg", "dot_general")
EXTREMES = {"reduce_max": "largest", "reduce_min": "smallest", "reduce_prod": "product"}
KINKED = ("abs", "clamp", "max", "min", "sign", *EXTREMES)
"""Operations that some numbers pass unchanged, or only scaled: no such numbers show that they do more."""
LINEAR = (
    "add", "add_any", "broadcast_in_dim", "complex", "concatenate", "conj", "convert_element_type",
    "copy", "copy_p", "cumsum", "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather", "imag",
    "name", "neg", "optimization_barrier", "pad", "real", "reduce_precision", "reduce_sum", "reshape",
    "rev", "scatter-add", "sharding_constraint", "slice", "split", "squeeze", "stop_gradient", "sub",
    "transpose",
)  # fmt: skip
"""Operations after which numbers of parts still add up to those of the batch."""
BILINEAR = ("conv_general_dilated", "dot_general", "mul")
NUMBERING = (
    "add", "broadcast_in_dim", "convert_element_type", "div", "eq", "ge", "gt", "le", "lt", "mul", "ne",
    "rem", "reshape", "sub",
)  # fmt: skip
"""Operations whose results say which row it is, as the numbers of rows that they read."""
EPSILON = 1e-2
MEAN = "takes a mean over rows, and means of parts are added up"
ALONE = (
    "adds a number that no row contributes to a sum over rows, once for each part (multiply it by the count"
    " of the loss)"
)
COUNTED = "computes with the number of rows, which is that of a part"
SUMS = (MEAN, ALONE)
"""What may be said of a sum that is a sum still; what is done with it on the same line says more."""
SUMMED, NUMBERED, NUMBER = 1, 2, 4
"""What is known of an array, as bits: made of sums over rows, made of numbers of rows, or such numbers."""

NORMALIZATION = "normalization.py"
"""Flax's file of batch norms, whose statistics are those of a replica, as the documents say."""


class Coupling(NamedTuple):
    """Rows that depend on each other.

    Args:
      what: how.
      is_certain: whether it stands whatever the numbers are; otherwise what follows may undo it.
    """

    what: str
    is_certain: bool


class Couplings(NamedTuple):
    """Where rows depend on each other.

    Args:
      lines: line of a user -> how.
      in_library: whether they also do in this library or in a batch norm of Flax, as the documents say.
    """

    lines: dict[str, Coupling]
    in_library: bool


def find_couplings(traced: Any, prime: int) -> Couplings:
    """Return the lines of a user at which rows depend on each other.

    Args:
      traced: the program of a loss for `2 * prime` rows, a ClosedJaxpr; other dims are no multiples of it.
      prime: a prime.
    """
    found = _Walk(prime)
    found.walk(traced.jaxpr, [0] * len(traced.jaxpr.invars), ())
    return Couplings(found.lines, found.in_library)


def coupling_text(what: str, num_parts: int) -> str:
    """Return the warning about rows that depend on each other.

    Args:
      what: the line and what it does, or what was seen of the loss.
      num_parts: parts into which a batch is split, over replicas, microbatches and islands.
    """
    return (
        f"WARNING: {what}; a batch is split into {num_parts} parts, over replicas, microbatches and"
        " islands, and each has its own rows alone, so losses are not those of one device: compute it of each"
        " row, or do not split batches (one island, no axis data, no ZeRO stage 1 or 2, --accumulate 1)"
    )


class _Walk:
    """Lines at which rows depend on each other, and how."""

    def __init__(self, prime: int):
        self.prime = prime
        self.lines: dict[str, Coupling] = {}
        self.in_library = False

    def rows_of(self, variable: Any) -> list[int]:
        """Return the dims that count rows."""
        shape = getattr(variable.aval, "shape", ())
        return [dim for dim, size in enumerate(shape) if size and size % self.prime == 0]

    def walk(self, jaxpr: Any, inputs: Iterable[int], outer: tuple[Any, ...]) -> list[int]:
        """Go through a program; return what is known of its outputs.

        Args:
          jaxpr: the program.
          inputs: what is known of its inputs.
          outer: the equations that it is in.
        """
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            # constants are no keys
            given = [0 if hasattr(v, "val") else known.get(v, 0) for v in equation.invars]
            programs = _programs(equation)
            after = [0] * len(equation.outvars)
            for program, skipped in programs:
                found = self.walk(program, given[skipped:], (*outer, equation))
                after = [a | b for a, b in zip(after, found, strict=True)]
            if what := self._find_call_coupling(equation, given):
                self._note(TracedEquation(equation, [], outer), what)
            if not programs and equation.outvars:
                is_number = self._is_number(equation, given)
                status = (NUMBERED | NUMBER) * is_number | SUMMED * self._sums(equation, given)
                for each in given:
                    status |= each & ~NUMBER
                if found := self._coupling(equation, given, is_number):
                    self._note(TracedEquation(equation, [], outer), found)
                    # it is said once, not again of what is computed from it
                    status &= ~(SUMMED * (found.what not in SUMS))
                after = [status] * len(equation.outvars)
            known.update(zip(equation.outvars, after, strict=True))
        return [0 if hasattr(v, "val") else known.get(v, 0) for v in jaxpr.outvars]

    def _find_call_coupling(self, equation: Any, given: list[int]) -> Coupling | None:
        """Return how an operation that calls a program may let rows depend on each other."""
        name, params = equation.primitive.name, equation.params
        if name == "scan" and params["length"] % self.prime == 0:
            return Coupling("loops over rows", False)
        if name == "cond" and given[0] & SUMMED:
            return Coupling("chooses what to compute by a number that is computed from all rows", True)
        if name.startswith("custom_vjp"):
            return Coupling("has a derivative of its own, which depends on several rows", False)
        return None

    def _is_number(self, equation: Any, given: list[int]) -> bool:
        """Return whether the result of an operation is the numbers of rows themselves."""
        name = equation.primitive.name
        if name == "iota":
            return equation.params["dimension"] in self.rows_of(equation.outvars[0])
        return name in NUMBERING and any(each & NUMBER for each in given)

    def _sums(self, equation: Any, given: list[int]) -> bool:
        """Return whether an operation sums over rows."""
        name = equation.primitive.name
        if name == "scatter-add":
            return self._scatters(equation, given) and not self.rows_of(equation.outvars[0])
        if name.startswith(REDUCING):
            return any(map(self.rows_of, equation.invars)) and not self.rows_of(equation.outvars[0])
        return False

    def _scatters(self, equation: Any, given: list[int]) -> bool:
        """Return whether an operation writes or adds rows to places that are not their own."""
        dims, updates = equation.params["dimension_numbers"], equation.invars[2]
        return not given[1] & NUMBERED and any(
            dim not in dims.update_window_dims and not dims.operand_batching_dims
            for dim in self.rows_of(updates)
        )

    def _coupling(self, equation: Any, given: list[int], is_number: bool) -> Coupling | None:
        """Return how rows depend on each other in an operation; None if they do not."""
        name, params, output = equation.primitive.name, equation.params, equation.outvars[0]
        if what := self._moves(equation, given):
            return Coupling(what, False)
        rows, summed = self.rows_of(output), [bool(each & SUMMED) for each in given]
        if len(rows) > 1 and all(len(self.rows_of(v)) < 2 for v in equation.invars):
            return Coupling("computes something for each pair of rows", False)
        if not jnp.issubdtype(output.aval.dtype, jnp.floating):
            return None
        if is_number:
            return Coupling("computes with the numbers of rows, which begin at 0 in each part", False)
        if name in EXTREMES and set(params["axes"]) & set(self.rows_of(equation.invars[0])):
            return Coupling(f"takes the {EXTREMES[name]} of all rows", True)
        if not any(summed):
            return Coupling(COUNTED, False) if self._reads_count(equation.invars) else None
        if rows:
            return Coupling(
                "gives each row a number that is computed from all rows, such as their mean", False
            )
        return self._find_coupling_after_sum(equation, summed)

    def _reads_count(self, operands: Any) -> bool:
        """Return whether an operand is the number of rows, or 1 divided by it, as a constant."""
        values = [float(v.val) for v in operands if hasattr(v, "val") and np.ndim(v.val) == 0]
        counts = [abs(x) if abs(x) > 1 else 1 / abs(x) for x in values if x and np.isfinite(x)]
        return any(abs(x / self.prime - round(x / self.prime)) < 1e-4 and x < 1e6 for x in counts)

    def _find_coupling_after_sum(self, equation: Any, summed: list[bool]) -> Coupling | None:
        """Return what an operation does with a sum over rows that sums of parts do not do."""
        name, operands = equation.primitive.name, equation.invars
        if name in ("add", "add_any", "sub") and not all(summed):
            other = operands[summed.index(False)]
            return Coupling(ALONE, False) if np.max(np.abs(getattr(other, "val", 1))) > EPSILON else None
        if name == "div" and not summed[1]:
            return Coupling(MEAN, False) if self._reads_count(operands) else None
        # a count that is kept above 0 by some epsilon, to divide by it
        is_guard = name == "max" and any(0 < np.max(getattr(v, "val", 0)) < EPSILON for v in operands)
        is_linear = name in LINEAR or (name in BILINEAR and sum(summed) == 1)
        if is_linear or is_guard or (name == "select_n" and not summed[0]):
            return None
        return Coupling(
            f"takes the {name} of a sum over rows, and sums of parts are added up", name in KINKED
        )

    def _moves(self, equation: Any, given: list[int]) -> str:
        """Say how an operation moves rows to places of others; nothing if it does not."""
        name, params, output = equation.primitive.name, equation.params, equation.outvars[0]
        rows = self.rows_of(equation.invars[0] if name == "pad" else output)
        if name == "sort" and output.aval.shape[params["dimension"]] == 2 * self.prime:
            return "sorts or permutes rows"
        if name == "top_k" and self.rows_of(equation.invars[0])[-1:] == [equation.invars[0].aval.ndim - 1]:
            return "sorts or permutes rows"
        if name.startswith("cum") and params["axis"] in rows:
            return "adds up along rows"
        if name == "concatenate" and params["dimension"] in rows:
            parts = [v.aval.shape[params["dimension"]] for v in equation.invars]
            return "moves rows to the places of others" if any(size % self.prime for size in parts) else ""
        if name == "rev" and set(params["dimensions"]) & set(rows):
            return "reverses rows"
        before = self.rows_of(equation.invars[0]) if equation.invars else []
        if name == "conv_general_dilated" and set(params["dimension_numbers"].lhs_spec[2:]) & set(before):
            return "convolves along rows"
        if name.startswith("reduce_window") and any(params["window_dimensions"][dim] > 1 for dim in before):
            return "pools over rows"
        if name == "fft" and max(rows, default=-1) >= output.aval.ndim - len(params["fft_lengths"]):
            return "transforms along rows"
        if name == "pad" and any(any(params["padding_config"][dim]) for dim in before):
            return "moves rows to the places of others"
        if name == "reshape" and any(output.aval.shape[dim] % (2 * self.prime) for dim in rows):
            return "groups rows"
        if name.startswith("scatter") and self._scatters(equation, given):
            is_sum = name == "scatter-add" and not rows
            return "" if is_sum else "writes rows to the places of others"
        return "takes some of the rows" if self._takes_some(equation, given) else ""

    def _takes_some(self, equation: Any, given: list[int]) -> bool:
        """Return whether an operation reads rows at places that are not their own."""
        name, params, whole = equation.primitive.name, equation.params, 2 * self.prime
        if name in ("slice", "dynamic_slice"):
            shape = equation.outvars[0].aval.shape
            return any(shape[dim] % whole for dim in self.rows_of(equation.invars[0]))
        if name != "gather" or given[1] & NUMBERED:
            return False
        batching = params["dimension_numbers"].operand_batching_dims
        return any(
            params["slice_sizes"][dim] % whole and dim not in batching
            for dim in self.rows_of(equation.invars[0])
        )

    def _note(self, at: TracedEquation, found: Coupling) -> None:
        traces = [each.source_info.traceback for each in (at.equation, *reversed(at.outer))]
        files = [frame.file_name for trace in traces for frame in (trace.frames if trace else ())]
        # who calls a loss or a model of this library did not write what it does
        own = next((file for file in files if is_users(file) or _is_library(file)), FOLDER)
        if at.line == "?" or own.startswith(FOLDER) or any(file.endswith(NORMALIZATION) for file in files):
            self.in_library = True
            return
        before = self.lines.get(at.line, found)
        what = found.what if before.what in SUMS else before.what
        self.lines[at.line] = Coupling(what, before.is_certain or found.is_certain)


def _is_library(file: str) -> bool:
    """Return whether a file computes something itself: not only in the place of what a user calls."""
    return file.startswith(FOLDER) and not file.endswith("per_device.py")


def _programs(equation: Any) -> list[tuple[Any, int]]:
    """Return the programs of an operation that calls some, each with the number of inputs that it lacks."""
    params = equation.params
    if equation.primitive.name == "cond":
        return [(branch.jaxpr, 1) for branch in params["branches"]]
    found = next((params[each] for each in CALLED if each in params), None)
    inner = getattr(found, "jaxpr", found)
    return [] if inner is None or len(inner.invars) != len(equation.invars) else [(inner, 0)]
