"""Set the training or evaluation mode of Flax modules, and check that linen modules obey it.

Next: `nnx_model.py`, `linen_model.py`.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import flax.linen as nn

from shardtrain.errors.messages import problems_error

MODES = {"train": True, "training": True, "is_training": True, "deterministic": False}
"""Names of arguments that set the mode of a module -> the value in training."""


def mode_arguments(function: Callable[..., Any], train: bool) -> dict[str, bool]:
    """Return the arguments of a function that set its mode.

    >>> mode_arguments(lambda x, deterministic: x, train=True)
    {'deterministic': False}
    """
    known = inspect.signature(function).parameters
    return {name: train == value for name, value in MODES.items() if name in known}


@dataclass(frozen=True)
class Call:
    """A call of a linen module, and the training behaviour that it showed, if any."""

    module: nn.Module
    problem: str | None


MODE_FIELDS = {
    nn.Dropout: ("rate", "deterministic", "drops out"),
    nn.MultiHeadDotProductAttention: ("dropout_rate", "deterministic", "drops out"),
    nn.BatchNorm: (None, "use_running_average", "takes the statistics of the batch"),
}
"""Linen module -> (the field that enables its training behaviour, the field of its mode, the behaviour)."""


@contextmanager
def record_calls(calls: list[Call]) -> Iterator[None]:
    """Within this context, append every call of a linen module to a list."""

    def intercept(call: Any, arguments: Any, options: Any, context: Any) -> Any:
        if context.method_name == "__call__":
            calls.append(Call(context.module, _mode_problem(context.module, arguments, options)))
        return call(*arguments, **options)

    with nn.intercept_methods(intercept):
        yield


def _mode_problem(module: nn.Module, arguments: Any, options: Any) -> str | None:
    """Return the training behaviour of this call of a module; None without any."""
    for kind, (rate, field, what) in MODE_FIELDS.items():
        if isinstance(module, kind) and (rate is None or getattr(module, rate) > 0):
            bound = inspect.signature(type(module).__call__).bind(module, *arguments, **options).arguments
            mode = bound.get(field) if getattr(module, field) is None else getattr(module, field)
            if mode is False:
                return f"{'/'.join(module.path)} {what}: {field} is False"
    return None


def check_evaluation(name: str, calls: list[Call]) -> None:
    """Check that a linen module does not behave in evaluation as in training.

    Args:
      name: the name of the module's class.
      calls: the calls of its submodules, in evaluation.

    Raises:
      ValueError: lists every submodule that applies dropout or uses batch statistics.
    """
    problems = list(dict.fromkeys(call.problem for call in calls if call.problem is not None))
    if problems:
        modes = ", ".join(MODES)
        error = str(problems_error(f"{name} would behave in evaluation as in training", problems))
        raise ValueError(
            f"{error}\n  its mode is fixed when it is built; give it twice, as from_linen({name}(...), ...,"
            f" evaluation={name}(...)), the second built for evaluation, or let __call__ take one of {modes}"
        )
