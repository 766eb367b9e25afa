"""Check the loss function and the labels of the first batch, before the first step.

The loss is computed from two rows and made-up outputs of the model; labels are compared with the number of
classes of the model. Next: `trainer/prepared_run.py`, which calls these checks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.errors.user_code import UserCodeFailed
from shardtrain.functional.auxiliary import plain, sum_loss
from shardtrain.functional.loss import CLASSES, Loss, Regularized
from shardtrain.functional.metrics import LossWithMetrics
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key
from shardtrain.functional.traced_loss import ONE, loss_count, trace_few_rows
from shardtrain.system.xla_flags import quick_options

MOST_ELEMENTS = 1 << 24
"""Largest size of the model's outputs for one row; for larger ones only counts are computed."""

INPUTS = {"tokens": "weights", "source": "source_mask"}
"""Arrays of a batch with tokens that models read, each with the array that masks them."""

SHOWN = 3
"""Number of wrong values that a message lists for each array."""


class LossFacts(NamedTuple):
    """The facts about a run's model and loss against which its batches are checked.

    Args:
      loss: the loss function of the run.
      apply: (params, model_state, key, *inputs) -> the outputs of the whole model in evaluation mode; always
        the same function, so that jax traces it once for all inputs of the same shapes.
      abstract: the shapes and dtypes of its (params, model_state).
      outputs: the shapes and dtypes of its outputs for the rows.
      rows: two rows of a batch, on the host; all of them if the loss or the model cannot take two.
      vocab: number of tokens in the model's vocabulary; None if it is not known.
      metrics: names of the metrics that the loss returns in addition to its sum and count.
      count: () -> the count of the loss in the whole batch; None if it depends on what the model computes.
    """

    loss: Loss
    apply: Callable[..., Any]
    abstract: Any
    outputs: Any
    rows: Mapping[str, np.ndarray]
    vocab: int | None
    metrics: tuple[str, ...] = ()
    count: Callable[[], float | None] = lambda: None

    @property
    def known(self) -> Mapping[str, Sequence[str]]:
        """The arrays of a batch that are known to hold classes for this loss, see `CLASSES`."""
        # not __wrapped__: a function that wraps a loss of this library may return something else
        loss: Any = getattr(self.loss, "guarded", self.loss)
        while isinstance(loss, LossWithMetrics | Regularized):
            loss = loss.loss
        # a loss need not be hashable
        return next((arrays for own, arrays in CLASSES.items() if own is loss), {})

    @property
    def num_classes(self) -> int | None:
        """The size of the last dim of the model's outputs; None if they are not a single array of floats."""
        found = [x for x in jax.tree.leaves(self.outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
        return found[0].shape[-1] if len(found) == 1 and found[0].ndim > 1 else None

    def find_outputs(self, inputs: Any) -> Any:
        """Return the shapes of the model's outputs for some inputs, in evaluation mode."""
        key = jax.eval_shape(lambda: new_key(0))
        if all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(inputs)):
            return jax.eval_shape(self.apply, *self.abstract, key, *inputs)
        # flags and other inputs that are no arrays cannot be arguments
        return jax.eval_shape(lambda *state: self.apply(*state, *inputs), *self.abstract, key)


def make_loss_facts(
    model: Model, loss: Loss, batch: Mapping[str, np.ndarray], vocab: Any = None
) -> LossFacts:
    """Trace the model and the loss on two rows of a batch, without computing anything.

    Args:
      model: the whole model.
      loss: the loss function of the run.
      batch: any batch of the run, on the host.
      vocab: number of tokens in the model's vocabulary, if its configuration has one.

    Raises:
      ValueError: the loss does not return (sum, count), or the model cannot read the samples.
      UserCodeFailed: the model or the loss raised.
    """
    abstract = jax.eval_shape(model.init, new_key(0))

    def evaluate(params: Any, model_state: Any, key: jax.Array, *inputs: Any) -> Any:
        return model.apply(params, model_state, key, False, *inputs)[0]

    found = LossFacts(loss, evaluate, abstract, None, {}, vocab if type(vocab) is int else None)

    def trace(num_rows: int) -> LossFacts:
        rows = {name: np.asarray(x)[np.arange(num_rows) % len(x)] for name, x in batch.items()}
        outputs: list[Any] = []

        def apply(*inputs: Any) -> Any:
            shapes = found.find_outputs(inputs)
            outputs.append(plain(shapes))
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        with jax.sharding.use_abstract_mesh(ONE):
            _, _, metrics = jax.eval_shape(lambda batch: sum_loss(loss, apply, batch), rows)
        return found._replace(outputs=outputs, rows=rows, metrics=tuple(metrics))

    traced, _ = trace_few_rows(trace, len(next(iter(batch.values()))))
    return traced._replace(count=lambda: loss_count(model, loss, batch))


def find_loss_problems(expected: LossFacts) -> list[str]:
    """Return why a loss function is wrong: it returns a mean instead of a sum, or a constant count.

    Only certain mistakes are reported: sums and counts may depend on several rows at once (contrastive
    losses, losses over pairs), and a model without an output per row computes its loss itself.

    Args:
      expected: the facts about the run.

    Returns:
      A message for each mistake, with the correct result.
    """
    outputs = [x for x in jax.tree.leaves(expected.outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
    if any(x.ndim == 0 or x.shape[0] != 2 for x in outputs):
        return []
    if expected.known:
        # a loss of this library returns sums
        return _find_count_problems(expected, 0)
    totals = _totals(expected, with_sums=sum(x.size for x in outputs) // 2 <= MOST_ELEMENTS)
    if totals is None:
        return []
    whole, alone = totals
    if problems := _find_count_problems(expected, float(whole["count"])):
        return problems
    if whole["count"] != 0 and np.allclose(alone["count"], whole["count"], rtol=1e-4):
        one, two = alone["count"]
        return [
            f"the count of the loss is {whole['count']:g} for two rows together, and {one:g} and {two:g} for"
            " each alone: return the sum of the losses, never their mean, and the number of examples or"
            " tokens in it, such as `(losses * batch['weights']).sum(), batch['weights'].sum()`"
        ]
    if "sum" in whole and _is_mean(whole["sum"], alone["sum"], alone["count"]):
        return [
            f"the loss of two rows together, {whole['sum']:.6g}, is the mean of their separate losses,"
            f" {alone['sum'][0]:.6g} and {alone['sum'][1]:.6g}: return the sum and the count, `losses.sum()`"
            " instead of `losses.mean()`"
        ]
    return []


def _find_count_problems(expected: LossFacts, count_of_two: float) -> list[str]:
    """Return a message if nothing in the first batch counts though its weights are not 0."""
    if count_of_two > 0 or not np.any(expected.rows.get("weights", 1)):
        return []
    # rows may have nothing that counts, as masks may; the whole batch should have
    count = expected.count() if count_of_two == 0 else count_of_two
    if count is None or count > 0:
        return []
    return [
        f"the count of the loss is {count:g} for the first batch, and a step divides by it; return"
        " the number of examples or tokens in the sum, such as batch['weights'].sum()"
    ]


def _is_mean(whole: float, alone: np.ndarray, counts: np.ndarray) -> bool:
    """Return whether the loss of two rows is the mean of their losses, plain or weighted by their counts."""
    if (
        not np.isfinite([whole, *alone]).all()
        or not counts.all()
        or np.isclose(whole, alone.sum(), rtol=1e-3)
    ):
        return False
    means = (alone.mean(), np.average(alone, weights=counts))
    return any(np.isclose(whole, mean, rtol=1e-4) for mean in means)


def _totals(expected: LossFacts, with_sums: bool) -> tuple[Any, Any] | None:
    """Compute the count and the sum of the loss for two rows together, and for each alone.

    Return None for a loss that needs more than one row.
    """

    def totals(batch: Any, numbers: jax.Array) -> dict[str, Any]:
        def apply(*inputs: Any) -> Any:
            return jax.tree.map(lambda x: _make_up_outputs(x, numbers), plain(expected.find_outputs(inputs)))

        loss_sum, count, _ = sum_loss(expected.loss, apply, batch)
        return {"count": count, "sum": loss_sum} if with_sums else {"count": count}

    together = dict(expected.rows), jnp.arange(2)
    one_by_one = jax.tree.map(lambda x: x[:, None], together)
    of_each = jax.jit(jax.vmap(totals))
    with jax.sharding.use_abstract_mesh(ONE):
        try:
            jax.eval_shape(of_each, *one_by_one)
        except (UserCodeFailed, ValueError):
            return None
        options = quick_options(jax.default_backend())
        both = jax.jit(lambda whole, each: (totals(*whole), of_each(*each)), compiler_options=options)
        return jax.device_get(both(together, one_by_one))


def _make_up_outputs(like: Any, numbers: jax.Array) -> jax.Array:
    """Return made-up outputs from 0 to 1 that depend only on the row; valid as logits or probabilities."""
    if not jnp.issubdtype(like.dtype, jnp.floating):
        return jnp.zeros(like.shape, like.dtype)
    position = jax.lax.iota(jnp.float32, max(like.size // max(len(numbers), 1), 1))
    if like.ndim == 0 or like.shape[0] != len(numbers):
        return jnp.full(like.shape, 0.5, like.dtype)
    values = 0.5 + 0.4 * jnp.sin(1.37 * position + 2.1 * numbers[:, None] + 0.3)
    return values.reshape(like.shape).astype(like.dtype)


def find_class_problems(expected: LossFacts, batch: Mapping[str, np.ndarray]) -> list[str]:
    """Return the tokens and labels of a batch that are outside the model's classes.

    Args:
      expected: the facts about the run.
      batch: rows on the host.

    Returns:
      A message for each array: the first wrong values, their rows, and the allowed range.
    """
    limit, known = expected.num_classes, expected.known
    problems = []
    for name, excuses in known.items():
        if limit is not None and name in batch:
            counts = _counts(batch, name, excuses)
            problems += _outside(name, np.asarray(batch[name]), counts, limit)
    for name, excuse in INPUTS.items():
        if name not in known and expected.vocab is not None and name in batch:
            # the user's own loss may ignore negative tokens itself
            counts = _counts(batch, name, (excuse,)) & (np.asarray(batch[name]) >= 0)
            problems += _outside(name, np.asarray(batch[name]), counts, expected.vocab)
    return problems


def _counts(batch: Mapping[str, np.ndarray], name: str, excuses: Sequence[str]) -> np.ndarray:
    """Return a mask of the entries of an array that count: those without a weight of 0."""
    values = np.asarray(batch[name])
    counts = np.ones(values.shape, bool)
    for excuse in excuses:
        weights = np.asarray(batch.get(excuse, 1))
        if weights.ndim == 1 and values.ndim > 1:
            counts &= (weights != 0).reshape(-1, *[1] * (values.ndim - 1))
        elif weights.shape == values.shape:
            counts &= weights != 0
        elif weights.ndim == 2 and values.ndim == 2 and weights.shape[1] == values.shape[1] - 1:
            # one weight per target; the first token is no target
            counts[:, 1:] &= weights != 0
    return counts


TOTAL_TOLERANCE = 1e-2
"""Largest difference from 1 of the sum of a label's shares, which may have 16 bits."""


def _outside(name: str, values: np.ndarray, counts: np.ndarray, limit: int) -> list[str]:
    """Return a message about the values that count and are not between 0 and `limit` - 1."""
    if name == "label" and values.ndim == 2 and values.dtype.kind == "f":
        return _soft_problems(values, np.any(counts, axis=-1), limit)
    if values.dtype.kind not in "iu":
        return [f"{name!r} is {values.dtype}, and classes are whole numbers; use .astype('int32')"]
    wrong = np.argwhere(counts & ((values < 0) | (values >= limit)))
    if not len(wrong):
        return []
    shown = ", ".join(
        f"{values[tuple(where)]} in row {where[0]}"
        + (f" at {', '.join(map(str, where[1:]))}" if len(where) > 1 else "")
        for where in wrong[:SHOWN]
    )
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    largest = int(values[tuple(wrong.T)].max())
    cures = [f"give the model {largest + 1} classes or more"] if largest >= limit else []
    if values[tuple(wrong.T)].min() < 0:
        cures.append("give entries to ignore a weight of 0 (negative labels are not ignored)")
    return [f"{name!r} has {shown}{more}; the model has classes 0 to {limit - 1}: {'; '.join(cures)}"]


def _soft_problems(labels: np.ndarray, counts: Any, limit: int) -> list[str]:
    """Return a message about labels of rows that count and are not shares of `limit` classes.

    >>> _soft_problems(np.array([[0.5, 0.25]]), np.array([True]), 2)
    ["'label' has row 0, which adds up to 0.75; give each class its share, 0 or more, together 1"]
    """
    if labels.shape[1] != limit:
        had = labels.shape[1]
        return [f"'label' has shares of {had} classes, and the model has {limit}; make both the same"]
    totals = np.where((labels >= 0).all(-1), labels.sum(-1, dtype=np.float64), np.nan)
    wrong = np.flatnonzero(counts & ~(np.abs(totals - 1) < TOTAL_TOLERANCE))
    if not len(wrong):
        return []
    what = "has a share below 0" if np.isnan(totals[wrong[0]]) else f"adds up to {totals[wrong[0]]:.4g}"
    return [f"'label' has row {wrong[0]}, which {what}; give each class its share, 0 or more, together 1"]
