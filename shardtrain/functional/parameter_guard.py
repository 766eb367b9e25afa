"""Refuse a call of an nnx module that sets its parameters, which only the optimizer changes.

Next: `split_module.py`, which calls modules.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx

NORMS = (nnx.SpectralNorm, nnx.WeightNorm)
"""Norms of Flax that set parameters; as in their papers, what they set holds within the call."""


def guard_parameters(module: nnx.Module) -> Callable[[], None]:
    """Raise a ValueError as soon as a parameter of a module is set.

    Returns:
      A function that raises one if a parameter has been replaced by then.
    """
    norms = tuple(path for path, node in nnx.iter_graph(module) if isinstance(node, NORMS))
    before = _parameters(module, norms)
    for path, parameter in before.items():
        own = parameter.get_metadata().get("on_set_value", ())
        hooks = own if isinstance(own, tuple) else (own,)
        parameter.set_metadata(on_set_value=(*hooks, partial(_refuse, path)))

    def check() -> None:
        for path, parameter in _parameters(module, norms).items():
            if before.get(path) is not parameter:
                _refuse(path)

    return check


def _parameters(module: nnx.Module, norms: tuple[Any, ...]) -> dict[Any, nnx.Param]:
    """Return path -> parameter, without those below some paths."""
    return {
        path: node
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Param)
        # a stage of a pipeline has no values of the parameters of others
        and not isinstance(node.get_raw_value(), jax.ShapeDtypeStruct)
        and not any(path[: len(norm)] == norm for norm in norms)
    }


def _refuse(path: Any, *_: Any) -> Any:
    raise ValueError(
        f"a call of the model sets its parameter {'/'.join(map(str, path))}, which only the optimizer"
        " changes, so what was set would be lost; make it a variable of the model's state, such as"
        " nnx.BatchStat(...), or compute the value in the call without setting it"
    )
