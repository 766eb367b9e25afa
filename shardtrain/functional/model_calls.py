"""Call a model from a loss: with keyword arguments, a random key, and only once in a pipeline.

Next: `loss.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.rng import new_key

LOSS_STREAM = 0x105500
"""Folded into the key of a call for the draws of the loss; the model's streams have small numbers."""


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Options:
    """The keyword arguments of a call of the model, passed as its last input."""

    values: dict[str, Any]

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """Return (values, names), for jax."""
        return tuple(self.values.values()), tuple(self.values)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: tuple[Any, ...]) -> "Options":
        """Make it from names and values, for jax."""
        return cls(dict(zip(names, values, strict=True)))


def split_options(inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of a call of the model.

    >>> split_options((1, Options({"scale": 2})))
    ((1,), {'scale': 2})
    """
    if inputs and isinstance(inputs[-1], Options):
        return inputs[:-1], inputs[-1].values
    return inputs, {}


@dataclass(frozen=True)
class ModelCall:
    """The argument `apply` of a loss.

    Args:
      call: *inputs -> outputs; keyword arguments are its last input, `Options`.
      rng: the key of the model's call; None if nothing is drawn.
    """

    call: Callable[..., Any]
    rng: jax.Array | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the model."""
        return self.call(*inputs, *([Options(options)] if options else []))

    @property
    def key(self) -> jax.Array:
        """A random key for draws of the loss, or for the model; another one in each step.

        Draws whose first dim is the rows are the same for any split of a batch. Every access returns the same
        key: split it to draw several times.
        """
        rng = new_key(0) if self.rng is None else self.rng
        return jax.random.fold_in(rng, LOSS_STREAM)


class _ModelCalled(BaseException):
    """Stops a loss as soon as it calls the model; not an error."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs


def model_inputs(loss: Loss, batch: Batch, rng: jax.Array | None = None) -> tuple[Any, ...]:
    """Return the inputs that a loss passes to the model.

    Args:
      loss: calls the model.
      batch: its batch.
      rng: the key of the model's call.

    Raises:
      ValueError: the loss does not call the model.
    """

    def apply(*inputs: Any) -> Any:
        raise _ModelCalled(inputs)

    try:
        loss(ModelCall(apply, rng), batch)
    except _ModelCalled as call:
        return call.inputs
    raise ValueError("the loss returned without calling the model; a pipeline needs one call, apply(inputs)")


def allow_one_call(last: Callable[..., Any]) -> Callable[..., Any]:
    """Return the model as a function that can be called once.

    Raises:
      ValueError: (when called a second time).
    """
    calls = []

    def apply(*inputs: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise ValueError(
                "the loss calls the model more than once; a pipeline sends each microbatch through once:"
                " join the inputs into one call along the batch"
            )
        return last(*inputs)

    return apply
