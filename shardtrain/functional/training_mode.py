"""Training or evaluation: the arguments that tell a Flax module which of both it runs in."""

import inspect
from collections.abc import Callable
from typing import Any

MODES = {"train": True, "training": True, "is_training": True, "deterministic": False}
"""Arguments that tell a module whether it trains: name -> the value in training."""


def mode_arguments(function: Callable[..., Any], train: bool) -> dict[str, bool]:
    """The arguments of a function that tell it whether it trains.

    >>> mode_arguments(lambda x, deterministic: x, train=True)
    {'deterministic': False}
    """
    known = inspect.signature(function).parameters
    return {name: train == value for name, value in MODES.items() if name in known}
