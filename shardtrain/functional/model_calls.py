"""The one call of the model in a loss: its inputs, and its outputs put in. For pipelines; next: `loss.py`."""

from collections.abc import Callable
from typing import Any

from shardtrain.functional.loss import Batch, Loss


class _ModelCalled(BaseException):
    """Stops a loss as soon as it calls the model; not an error."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs


def model_inputs(loss: Loss, batch: Batch) -> tuple[Any, ...]:
    """Return the inputs that a loss passes to the model.

    Raises:
      ValueError: the loss does not call the model.
    """

    def apply(*inputs: Any) -> Any:
        raise _ModelCalled(inputs)

    try:
        loss(apply, batch)
    except _ModelCalled as call:
        return call.inputs
    raise ValueError("the loss returned without calling the model; a pipeline needs one call, apply(inputs)")


def once(last: Callable[..., Any]) -> Callable[..., Any]:
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
