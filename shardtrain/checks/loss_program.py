"""Check the traced program of a loss with its model, before the first step.

The checks find random numbers of numpy or Python, ignored weights, and rows that depend on each other. Next:
`first_batch.py`, whose checks compute the loss of two rows.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.checks.row_coupling import (
    NORMALIZATION,
    PARTS,
    ROWS,
    compute_row_difference,
    coupling_text,
    find_couplings,
)
from shardtrain.errors.user_code import FOLDER, UserCodeFailed, calling_line
from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model, path_text
from shardtrain.functional.rng import new_key
from shardtrain.functional.traced_loss import trace_loss
from shardtrain.jaxpr.equations import TracedEquation, find_difference, list_equations
from shardtrain.jaxpr.forward import dependencies
from shardtrain.system.excerpts import short

PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)
"""Twice one of these is the number of traced rows; a dim that the prime divides counts rows."""

ROUNDING = 1e-5
"""Largest difference between all rows and their parts by which an operation is excused."""

SEEN, SEEN_IN_16_BITS = 1e-3, 0.1
"""Smallest difference that is reported without an operation; in 16 bits rounding may be large."""

MOST_FLOPS = 2e9
"""Largest program that is computed without an operation that couples rows; it takes about a second."""

PROMOTED = re.compile(r"rank promotion for (\w+) on shapes (.+)\. Set the")
"""The warning of jax when it adds dims to an array to broadcast it."""


class LossFindings(NamedTuple):
    """The problems and warnings about a loss.

    Args:
      problems: why the run would learn something else than it should.
      warnings: what may be intended.
    """

    problems: list[str]
    warnings: list[str]


def check_trace(
    model: Model, loss: Loss, batch: Mapping[str, np.ndarray], num_parts: int = 1, num_microbatches: int = 1
) -> LossFindings:
    """Trace a loss and its model twice, as a step does, and check the programs.

    A model that cannot take the traced number of rows is not checked, with a warning if its rows are split.

    Args:
      model: the whole model.
      loss: the loss function of the run.
      batch: any batch of the run, for its shapes.
      num_parts: parts into which the rows of a batch are split.
      num_microbatches: parts that one replica computes one after the other.
    """
    abstract = jax.eval_shape(model.init, new_key(0))
    prime = _find_unused_prime([*jax.tree.leaves(abstract), *(x[0] for x in batch.values())])
    promoted: list[str] = []
    metrics: list[str] = []

    try:
        first = trace_loss(model, loss, batch, 2 * prime, metrics=metrics)
        # under another option jax traces inner functions again too
        with jax.numpy_rank_promotion("warn"), _promotions(2 * prime, promoted):
            second = trace_loss(model, loss, batch, 2 * prime)
    except (UserCodeFailed, TypeError, ValueError) as error:
        unchecked = (
            f"WARNING: it was not checked whether rows depend on each other, as the loss or the model cannot"
            f" take {2 * prime} rows ({short(str(error))}); a batch is split into {num_parts} parts"
        )
        return LossFindings([], [unchecked] if num_parts > 1 else [])
    once = list_equations(first)
    warned = [
        *_warn_unweighted(first, list(batch), metrics),
        *_row_constants(once, prime),
        *promoted,
    ]
    if not promoted and num_parts > 1:
        warned += _couplings(model, loss, batch, first, prime, num_parts)
    warned += _find_state_warnings(first, abstract[1], len(batch), num_parts, num_microbatches)
    return LossFindings(_find_differences(once, list_equations(second)), warned)


def _couplings(
    model: Model, loss: Loss, batch: Mapping[str, np.ndarray], traced: Any, prime: int, num_parts: int
) -> list[str]:
    """Return a warning for each line at which rows depend on each other, if that changes the loss.

    Args:
      model: the whole model.
      loss: the loss function of the run.
      batch: any batch of the run.
      traced: the program of the loss for `2 * prime` rows.
      prime: a prime.
      num_parts: parts into which the rows of a batch are split.
    """
    found, in_library = find_couplings(traced, prime)
    if found:
        # a dim inside the model may be a multiple of one prime by chance
        other = next(each for each in reversed(PRIMES) if each != prime)
        with suppress(UserCodeFailed, TypeError, ValueError):  # the model may not take so many rows
            again, _ = find_couplings(trace_loss(model, loss, batch, 2 * other), other)
            found = {line: each for line, each in found.items() if line in again}
    if found:
        certain = any(each.is_certain for each in found.values())
        difference = None if certain else compute_row_difference(model, loss, batch)
        if difference is not None and difference < ROUNDING:
            return []
        return [coupling_text(f"{line} {each.what}", num_parts) for line, each in found.items()]
    unexplained = _find_unexplained_difference(model, loss, batch, traced, prime, in_library)
    return [coupling_text(unexplained, num_parts)] if unexplained else []


def _find_unexplained_difference(
    model: Model, loss: Loss, batch: Mapping[str, np.ndarray], traced: Any, prime: int, in_library: bool
) -> str:
    """Compute a few rows with a model or loss of the user's, and describe how they differ from their parts.

    Args:
      model, loss, batch, traced, prime: as for `_couplings`.
      in_library: whether this library or a batch norm couples rows in training, as documented.
    """
    programs = list_equations(traced)
    if not any(each.line != "?" and not each.line.startswith(FOLDER) for each in programs):
        return ""
    allowed = SEEN if all(map(_is_precise, programs)) else SEEN_IN_16_BITS
    ways = [] if in_library else [(True, f"the loss and its gradient of {ROWS} rows differ")]
    with suppress(UserCodeFailed, TypeError, ValueError):  # it may not be for evaluation
        if _find_differences(programs, list_equations(trace_loss(model, loss, batch, 2 * prime, False))):
            ways.append((False, f"the loss in evaluation of {ROWS} rows differs"))
    for train, what in ways:
        found = compute_row_difference(model, loss, batch, train=train, num_trials=2, most_flops=MOST_FLOPS)
        if found is not None and found > allowed:
            return (
                f"{what} by {min(found, 99):.1%} from the sum of their {PARTS} parts, so rows depend on each"
                " other, on their number or on their positions"
            )
    return ""


def _is_precise(traced: TracedEquation) -> bool:
    """Return whether an operation has no floats of less than 32 bits, which round differently in parts."""
    dtypes = [getattr(v.aval, "dtype", np.dtype(int)) for v in traced.equation.outvars]
    return not any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 for dtype in dtypes)


def _find_unused_prime(arrays: list[Any]) -> int:
    """Return a prime that divides no dim of some arrays."""
    dims = {size for x in arrays for size in x.shape}
    return next((prime for prime in PRIMES if not any(size % prime == 0 for size in dims)), PRIMES[-1])


def _row_constants(traced: list[TracedEquation], prime: int) -> list[str]:
    """Return a warning about each constant that has its own numbers for each row, such as numpy's noise."""
    lines = []
    for each in traced:
        for constant in each.constants:
            shape, dtype = np.shape(constant), getattr(constant, "dtype", np.dtype(int))
            if not any(size % prime == 0 for size in shape) or not jnp.issubdtype(dtype, np.inexact):
                continue
            values = np.asarray(constant)
            # numbers of rows, masks and one-hot rows are whole
            if (values != np.round(values)).any() and (values != values.flat[0]).any():
                lines.append(each.line)
    return [
        f"WARNING: {line} has a constant with numbers for each row of a batch, and every replica, microbatch"
        " and island uses the same numbers for its first row; give such numbers with the samples, or draw"
        " them by apply.key"
        for line in dict.fromkeys(lines)
    ]


def _has_same_constants(one: TracedEquation, two: TracedEquation) -> bool:
    return len(one.constants) == len(two.constants) and all(map(_is_same, one.constants, two.constants))


def _is_same(one: Any, two: Any) -> bool:
    if one is two or getattr(one, "dtype", None) != getattr(two, "dtype", None):
        return one is two
    if jnp.issubdtype(getattr(one, "dtype", np.float32), jax.dtypes.extended):
        return True
    return np.array_equal(np.asarray(one), np.asarray(two), equal_nan=np.asarray(one).dtype.kind in "fc")


def _find_differences(once: list[TracedEquation], again: list[TracedEquation]) -> list[str]:
    """Return a message about the first difference between two traces of one program."""
    line = find_difference(once, again, _has_same_constants)
    if not line:
        return []
    return [
        f"{line} gives other numbers each time that it is traced, as numpy's or Python's random numbers and"
        " the time do; a step is traced once, so they would be constants that differ after a restart and"
        " between islands: draw with the key of the step, apply.key in the loss or self.rngs in the model"
    ]


def _warn_unweighted(traced: Any, names: list[str], metrics: list[str]) -> list[str]:
    """Return a warning about sums and counts of a loss and its metrics that weights do not change."""
    if "weights" not in names:
        return []
    # whether each result depends on the weights, and on any array of the batch
    groups = [2 if name == "weights" else 1 for name in sorted(names)]
    read = dependencies(traced, [0] * (len(traced.in_avals) - len(names)) + groups)
    of_loss = [name for name, found in zip(("sum", "count"), read, strict=False) if not found & 2]
    ignoring = [f"the {' or the '.join(of_loss)} of the loss"] * bool(of_loss)
    for number, name in enumerate(metrics, 1):
        # a number that does not depend on rows, such as a rate, has no weights
        if read[2 * number] and not (read[2 * number] | read[2 * number + 1]) & 2:
            ignoring.append(f"the metric {name}")
    if not ignoring:
        return []
    return [
        f"WARNING: batch['weights'] do not change {' or '.join(ignoring)}, and they are 0"
        " in rows of padding (if the last batch of an epoch or of the held-out data is short, or islands have"
        " uneven shares): such rows count, and losses are wrong; return"
        " (losses * batch['weights']).sum(), batch['weights'].sum()"
    ]


@contextmanager
def _promotions(rows: int, found: list[str]) -> Iterator[None]:
    """Collect warnings about arrays (rows, 1) and (rows,) that are broadcast to (rows, rows)."""

    def note(message: Any, *_: Any, **__: Any) -> None:
        found_shapes = PROMOTED.search(str(message))
        texts = re.findall(r"\([^)]*\)", found_shapes[2]) if found_shapes else []
        if len(texts) != 2:
            return
        shapes = [tuple(int(word) for word in text.strip("()").split(",") if word.strip()) for text in texts]
        small, large = sorted(shapes, key=len)
        if small[:1] == large[:1] == (rows,) and large[-len(small)] == 1:
            text = (
                f"WARNING: {calling_line()} broadcasts arrays of shapes {_rows_text(shapes[0])} and"
                f" {_rows_text(shapes[1])}, which gives a number for each pair of rows; give both the same"
                " shape, as by x.squeeze(-1), or write y[None, :] if you want all pairs"
            )
            if text not in found:
                found.append(text)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield


def _rows_text(shape: tuple[int, ...]) -> str:
    """Format a shape whose first dim is rows.

    >>> _rows_text((22, 1)), _rows_text((22,))
    ('(rows, 1)', '(rows,)')
    """
    return f"(rows{''.join(f', {size}' for size in shape[1:])}{',' if len(shape) == 1 else ''})"


def _find_state_warnings(
    traced: Any, model_state: Any, num_arrays: int, num_parts: int, num_microbatches: int
) -> list[str]:
    """Return a warning about arrays of the model's state that change differently if a batch is split.

    Args:
      traced: the program of a loss, see `trace_loss`.
      model_state: the state, of shapes.
      num_arrays: the number of arrays of a batch.
      num_parts: parts into which a batch is split, over replicas, microbatches and islands.
      num_microbatches: parts that one replica computes one after the other.
    """
    jaxpr, paths = traced.jaxpr, [path_text(path) for path, _ in jax.tree.leaves_with_path(model_state)]
    # the state follows the sum, the count and metrics; a loss need not call the model
    if not paths or len(jaxpr.outvars) < 2 + len(paths):
        return []
    before = jaxpr.invars[-num_arrays - len(paths) : -num_arrays]
    # documented for batch norms and routers
    known = ("router_bias", *(("mean", "var") if _has_batch_norm(traced) else ()))
    others = len(jaxpr.invars) - num_arrays
    read_rows = dependencies(jaxpr, [0] * others + [1] * num_arrays)[-len(paths) :]
    names = [
        path
        for path, old, new, reads_rows in zip(
            paths, before, jaxpr.outvars[-len(paths) :], read_rows, strict=True
        )
        if new is not old and (num_parts if reads_rows else num_microbatches) > 1
        # arrays that are attributes, which are kept as their bits
        if not jnp.issubdtype(old.aval.dtype, jnp.unsignedinteger)
        if path.split("/")[-1] not in known
    ]
    if not names:
        return []
    return [
        f"WARNING: a call of the model changes {', '.join(names)}; each of the {num_parts} parts of a batch,"
        " over replicas, microbatches and islands, changes it by its own rows, so losses differ from one"
        " device (docs/models.md)"
    ]


def _has_batch_norm(traced: Any) -> bool:
    """Return whether a program has a batch norm of Flax, whose statistics are called mean and var."""
    traces = [each.equation.source_info.traceback for each in list_equations(traced)]
    return any(frame.file_name.endswith(NORMALIZATION) for trace in traces if trace for frame in trace.frames)
