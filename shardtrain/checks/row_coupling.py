"""Find the lines of a user's loss or model that make rows of a batch depend on each other.

Replicas, microbatches and islands each have a part of the rows. A number computed from several rows then
differs from one device, unless it is a sum that the loss returns. Next: `loss_program.py`, which traces it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.errors.user_code import FOLDER, is_users
from shardtrain.functional.float_gradients import value_and_grad
from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key, row_key
from shardtrain.functional.traced_loss import ONE, trace_loss
from shardtrain.jaxpr.dims import find_mixed
from shardtrain.jaxpr.equations import TracedEquation, find_runs
from shardtrain.jaxpr.forward import evaluate, forward
from shardtrain.system.xla_flags import quick_options

REDUCING = ("reduce_", "arg", "dot_general")
EXTREMES = {"reduce_max": "largest", "reduce_min": "smallest", "reduce_prod": "product"}
KINKED = ("abs", "clamp", "max", "min", "sign", *EXTREMES)
"""Operations that keep or scale some numbers, so that a computation with these numbers shows no coupling."""
LINEAR = (
    "add", "add_any", "broadcast_in_dim", "complex", "concatenate", "conj", "convert_element_type",
    "copy", "copy_p", "cumsum", "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather", "imag",
    "name", "neg", "optimization_barrier", "pad", "real", "reduce_precision", "reduce_sum", "reshape",
    "rev", "scatter-add", "sharding_constraint", "slice", "split", "squeeze", "stop_gradient", "sub",
    "transpose",
)  # fmt: skip
"""Operations after which the parts still add up to the batch."""
BILINEAR = ("conv_general_dilated", "dot_general", "mul")
NUMBERING = (
    "add", "broadcast_in_dim", "convert_element_type", "div", "eq", "ge", "gt", "le", "lt", "mul", "ne",
    "rem", "reshape", "sub",
)  # fmt: skip
"""Operations that turn indices of rows into others."""
EPSILON = 1e-2
MEAN = "takes a mean over rows, and means of parts are added up"
ALONE = (
    "adds a number that no row contributes to a sum over rows, once for each part (multiply it by the count"
    " of the loss)"
)
COUNTED = "computes with the number of rows, which is smaller in each part"
SUMS = (MEAN, ALONE)
"""Weak findings about a sum; a later finding on the same line replaces them."""
SUMMED, NUMBERED, NUMBER = 1, 2, 4
"""Bits about an array: computed from sums over rows, computed from indices of rows, or such indices."""

NORMALIZATION = "normalization.py"
"""Flax's file of batch norms, whose statistics are documented as those of a replica."""


class Coupling(NamedTuple):
    """An operation that makes rows depend on each other.

    Args:
      what: a description of the operation.
      is_certain: whether it couples rows for certain; otherwise later operations may undo it.
    """

    what: str
    is_certain: bool


class Couplings(NamedTuple):
    """The lines at which rows depend on each other.

    Args:
      lines: line of a user -> coupling.
      in_library: whether this library or a batch norm of Flax couples rows too, as documented.
    """

    lines: dict[str, Coupling]
    in_library: bool


def find_couplings(traced: Any, prime: int) -> Couplings:
    """Find the lines of a user at which rows depend on each other.

    Args:
      traced: the program of a loss for `2 * prime` rows, a ClosedJaxpr; other dims are no multiples of it.
      prime: a prime.
    """
    found = _Walk(prime)
    found.walk(traced, [0] * len(traced.in_avals), ())
    return Couplings(found.lines, found.in_library)


def coupling_text(what: str, num_parts: int) -> str:
    """Return the warning about rows that depend on each other.

    Args:
      what: the line and its operation, or the difference of the loss.
      num_parts: parts into which a batch is split, over replicas, microbatches and islands.
    """
    return (
        f"WARNING: {what}; a batch is split into {num_parts} parts, over replicas, microbatches and"
        " islands, and each part has only its own rows, so losses differ from one device: compute it for each"
        " row, or do not split batches (one island, no axis data, no ZeRO stage 1 or 2, --accumulate 1)"
    )


class _Walk:
    """A walk through a program that collects couplings of rows by line."""

    def __init__(self, prime: int):
        self.prime = prime
        self.lines: dict[str, Coupling] = {}
        self.in_library = False

    def rows_of(self, variable: Any) -> list[int]:
        """Return the dims that count rows."""
        shape = getattr(variable.aval, "shape", ())
        return [dim for dim, size in enumerate(shape) if size and size % self.prime == 0]

    def walk(self, program: Any, inputs: Iterable[int], outer: tuple[Any, ...]) -> list[int]:
        """Walk through a program, and return the bits of its outputs.

        Args:
          program: a jaxpr, closed or not.
          inputs: the bits of its inputs.
          outer: the equations that contain it.
        """
        return forward(program, inputs, partial(self._follow, outer), lambda _: 0)

    def _follow(self, outer: tuple[Any, ...], equation: Any, given: list[int]) -> list[int]:
        """Note how an equation couples rows, and return the bits of its outputs."""
        if what := self._find_call_coupling(equation, given):
            self._note(TracedEquation(equation, [], outer), what)
        runs = find_runs(equation, given) if equation.primitive.name != "while" else []
        if runs:
            found = [self.walk(*run, (*outer, equation)) for run in runs]
            return [reduce(or_, each) for each in zip(*found, strict=True)]
        if not equation.outvars:
            return []
        is_number = self._is_number(equation, given)
        status = (NUMBERED | NUMBER) * is_number | SUMMED * self._sums(equation, given)
        for each in given:
            status |= each & ~NUMBER
        if coupling := self._coupling(equation, given, is_number):
            self._note(TracedEquation(equation, [], outer), coupling)
            # report it once, and not again for later operations
            status &= ~(SUMMED * (coupling.what not in SUMS))
        return [status] * len(equation.outvars)

    def _find_call_coupling(self, equation: Any, given: list[int]) -> Coupling | None:
        """Return how an operation that calls a program may couple rows."""
        name, params = equation.primitive.name, equation.params
        if name == "scan" and params["length"] % self.prime == 0:
            return Coupling("loops over rows", False)
        if name == "cond" and given[0] & SUMMED:
            return Coupling("chooses a branch by a number that is computed from all rows", True)
        if name.startswith("custom_vjp"):
            return Coupling("has a derivative of its own, which depends on several rows", False)
        return None

    def _is_number(self, equation: Any, given: list[int]) -> bool:
        """Return whether the result of an operation consists of indices of rows."""
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
        """Return whether an operation writes or adds rows to other rows' positions."""
        dims, updates = equation.params["dimension_numbers"], equation.invars[2]
        return not given[1] & NUMBERED and any(
            dim not in dims.update_window_dims and not dims.operand_batching_dims
            for dim in self.rows_of(updates)
        )

    def _coupling(self, equation: Any, given: list[int], is_number: bool) -> Coupling | None:
        """Return how an operation couples rows; None if it does not."""
        name, params, output = equation.primitive.name, equation.params, equation.outvars[0]
        if self._mixes(equation, given):
            return Coupling(f"mixes rows or moves them to other positions ({name})", False)
        rows, summed = self.rows_of(output), [bool(each & SUMMED) for each in given]
        if len(rows) > 1 and all(len(self.rows_of(v)) < 2 for v in equation.invars):
            return Coupling("computes something for each pair of rows", False)
        if not jnp.issubdtype(output.aval.dtype, jnp.floating):
            return None
        if is_number:
            return Coupling("computes with the indices of rows, which begin at 0 in each part", False)
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
        """Return how an operation uses a sum over rows in a way that sums of parts do not allow."""
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

    def _mixes(self, equation: Any, given: list[int]) -> bool:
        """Return whether an operation mixes rows, or reads or writes them at other rows' positions."""
        if not equation.invars:
            return False
        name, params, output = equation.primitive.name, equation.params, equation.outvars[0]
        before, after, whole = self.rows_of(equation.invars[0]), self.rows_of(output), 2 * self.prime
        shape = getattr(output.aval, "shape", ())
        if name == "concatenate":
            dim = params["dimension"]
            return dim in after and any(v.aval.shape[dim] % self.prime for v in equation.invars)
        if name == "reshape":
            return any(shape[dim] % whole for dim in after)
        if name.startswith("scatter"):
            return self._scatters(equation, given) and not (name == "scatter-add" and not after)
        if name == "split":
            return params["axis"] in before and any(size % whole for size in params["sizes"])
        if name in ("slice", "dynamic_slice"):
            return any(shape[dim] % whole for dim in before)
        if name == "gather":
            own = params["dimension_numbers"].operand_batching_dims if not given[1] & NUMBERED else before
            return any(params["slice_sizes"][dim] % whole and dim not in own for dim in before)
        return bool(set(before) & find_mixed(equation))

    def _note(self, at: TracedEquation, found: Coupling) -> None:
        traces = [each.source_info.traceback for each in (at.equation, *reversed(at.outer))]
        files = [frame.file_name for trace in traces for frame in (trace.frames if trace else ())]
        # a user who calls a loss or a model of this library did not write its operations
        own = next((file for file in files if is_users(file) or _is_library(file)), FOLDER)
        if at.line == "?" or own.startswith(FOLDER) or any(file.endswith(NORMALIZATION) for file in files):
            self.in_library = True
            return
        before = self.lines.get(at.line, found)
        what = found.what if before.what in SUMS else before.what
        self.lines[at.line] = Coupling(what, before.is_certain or found.is_certain)


def _is_library(file: str) -> bool:
    """Return whether a file computes something itself, and does not only wrap a function that users call."""
    return file.startswith(FOLDER) and not file.endswith("per_device.py")


ROWS, PARTS, TRIALS = 9, 3, 5

MOST_BYTES = 256 << 20
"""Largest parameters of a model that is computed on one device before the first step."""

TINY = float(np.finfo(np.float32).tiny)


def compute_row_difference(
    model: Model,
    loss: Loss,
    batch: Mapping[str, np.ndarray],
    *,
    train: bool = True,
    num_trials: int = TRIALS,
    most_flops: float = math.inf,
) -> float | None:
    """Return the largest relative difference between a few rows and the sum of their parts; 1e-3 is 0.1 %.

    The sum and the count of the loss are compared, and its gradients. None for a model that is too large,
    calls Python, cannot take these numbers of rows, or gives NaN.

    Args:
      model: the whole model.
      loss: the loss function of the run.
      batch: rows of the run on the host, from which some are chosen.
      train: compute the loss of training and its gradients, or else the loss of held-out data.
      num_trials: number of choices of rows; in the first one a part has weights of 0.
      most_flops: largest program of all rows that is computed.
    """
    shapes = jax.tree.leaves(jax.eval_shape(model.init, new_key(0)))
    if sum(x.size * x.dtype.itemsize for x in shapes) > MOST_BYTES:
        return None
    options = quick_options(jax.default_backend())
    params, model_state = jax.jit(model.init, compiler_options=options)(new_key(0))
    # parameters that begin at zero would hide what they multiply
    params = jax.tree.map(_move, params)
    worst = 0.0
    with jax.sharding.use_abstract_mesh(ONE):
        try:
            whole, parts = (
                _compile(model, loss, (params, model_state, _chosen(batch, 0)), size, train, most_flops)
                for size in (ROWS, ROWS // PARTS)
            )
            # parts may be equal by chance, such as in the number of rows of each class
            for trial in range(num_trials):
                # a model may behave differently once it has counted its steps
                state = jax.tree.map(partial(_count, 1000 * trial), model_state)
                rows = _chosen(batch, trial)
                both = zip(whole(params, state, rows), map(np.array, parts(params, state, rows)), strict=True)
                for (total,), each in both:
                    size = np.abs(each).sum(0).max()
                    worst = np.maximum(worst, np.abs(total - each.sum(0)).max() / np.maximum(size, TINY))
        except Exception:  # of any code of the model: then it is not known
            return None
    return float(worst) if np.isfinite(worst) else None


def _chosen(batch: Mapping[str, np.ndarray], trial: int) -> dict[str, np.ndarray]:
    """Return some rows of a batch; in the first trial a part of them has weights of 0, as padding has."""
    random, size = np.random.default_rng(trial), len(next(iter(batch.values())))
    chosen = random.choice(size, ROWS, replace=size < ROWS)
    rows = {name: np.asarray(x)[chosen] for name, x in batch.items()}
    if trial == 0 and "weights" in rows:
        rows["weights"][: ROWS // PARTS] = 0
    return rows


def _compile(
    model: Model, loss: Loss, example: tuple[Any, Any, Any], size: int, train: bool, most_flops: float
) -> Callable[..., Any]:
    """Return (params, model state, rows) -> sums, counts and gradients of the parts of `size` rows.

    Raises:
      ValueError: the program calls Python, or takes more than `most_flops`.
    """
    program = trace_loss(model, loss, example[2], size, train)
    if program.effects:
        raise ValueError("it calls Python, which may count its calls")

    def sums(params: Any, state: Any, key: jax.Array, part: Any) -> Any:
        total, count, *_ = evaluate(program, jax.tree.leaves((key, params, state, part)))
        return total, count

    def inputs(params: Any, state: Any, rows: Mapping[str, np.ndarray], start: int = 0) -> Any:
        part = {name: x[start : start + size] for name, x in rows.items()}
        return params, state, row_key(new_key(0), start, size, model.draws), part

    compute = value_and_grad(sums) if train else lambda *given: (sums(*given), ())
    lowered = jax.jit(compute, compiler_options=quick_options(jax.default_backend())).lower(
        *inputs(*example, 0)
    )
    if (lowered.cost_analysis() or {}).get("flops", 0) > most_flops:
        raise ValueError("it takes too long")
    compiled = lowered.compile()

    def of_parts(*given: Any) -> Any:
        found = []
        for start in range(0, ROWS, size):
            (total, count), grads = compiled(*inputs(*given, start=start))
            entries = [np.ravel(x) for x in jax.tree.leaves(grads) if jnp.issubdtype(x.dtype, jnp.floating)]
            found.append((np.float64(total), np.float64(count), np.concatenate([[0.0], *entries])))
        return zip(*found, strict=True)

    return of_parts


def _count(steps: int, x: jax.Array) -> jax.Array:
    """Return an array of a model's state after some steps, if it counts them."""
    return x + steps if jnp.issubdtype(x.dtype, jnp.signedinteger) else x


def _move(x: jax.Array) -> jax.Array:
    """Change each entry of an array a little, each by another number."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x + 0.05 * jnp.sin(1 + 1.37 * jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)
