"""Learning rates that differ by parameter: factors by patterns of paths.

Next: `optimizer.py`.
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import optax

from shardtrain.errors.messages import problems_error
from shardtrain.functional.model import path_text
from shardtrain.system.excerpts import some


def rate_problem(text: str) -> str | None:
    """Return what is wrong with a factor by pattern; None if nothing is.

    >>> rate_problem("blocks/*=0.5") is None
    True
    >>> rate_problem("blocks/*=-1")
    "rates has 'blocks/*=-1'; write PATTERN=FACTOR with a factor of 0 or more, as in 'blocks/*=0.1'"
    """
    pattern, found, factor = text.rpartition("=")
    try:
        value = float(factor)
    except ValueError:
        value = math.nan
    if pattern and found and math.isfinite(value) and value >= 0:
        return None
    return f"rates has {text!r}; write PATTERN=FACTOR with a factor of 0 or more, as in 'blocks/*=0.1'"


def check_rates(rates: Sequence[str], paths: Sequence[str]) -> None:
    """Check that every pattern applies to a parameter of these paths.

    Raises:
      ValueError: lists every pattern that does not.
    """
    chosen = {_first(path, rates) for path in paths}
    if idle := [each for each in rates if each not in chosen]:
        raise problems_error(
            "rates does not fit the parameters that are trained",
            [f"{each!r} is the first to match no parameter; there are {some(paths, 20)}" for each in idle],
        )


def with_rates(
    update: optax.GradientTransformation, rates: Sequence[str]
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation whose updates are multiplied by factors; its state is the same.

    Args:
      update: one that includes the learning rate (and decay, which is scaled too).
      rates: "PATTERN=FACTOR"; the first whose pattern (fnmatch) matches the path of a parameter applies.

    >>> update = with_rates(optax.sgd(1.0), ["head=0", "h*=0.5"])
    >>> params = {"head": 1.0, "hidden": 1.0, "last": 1.0}
    >>> updates, _ = update.update(params, update.init(params))
    >>> {name: float(x) for name, x in updates.items()}
    {'head': -0.0, 'hidden': -0.5, 'last': -1.0}
    """
    inner = optax.with_extra_args_support(update)

    def scaled(path: Any, x: jax.Array) -> jax.Array:
        found = _first(path_text(path), rates)
        return x if found is None else float(found.rpartition("=")[2]) * x

    def apply(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        found, state = inner.update(updates, state, params, **extra)
        return jax.tree.map_with_path(scaled, found), state

    return optax.GradientTransformationExtraArgs(inner.init, apply)


def _first(path: str, rates: Sequence[str]) -> str | None:
    return next((each for each in rates if fnmatchcase(path, each.rpartition("=")[0])), None)
