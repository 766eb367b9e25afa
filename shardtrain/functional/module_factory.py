"""Construct the nnx module of a run from its class or function, whatever its signature is.

Next: `nnx_model.py`.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx

from shardtrain.errors.user_code import user_code

STREAMS = "rngs"
"""The argument of constructors that takes the random streams."""


def construct(factory: Callable[..., Any], rngs: nnx.Rngs) -> nnx.Module:
    """Construct a module from its random streams, inside a trace.

    Args:
      factory: a class of modules, or a function that returns one.
      rngs: its random streams.

    Raises:
      ValueError: it takes other arguments, or returns something else.
      UserCodeFailed: it raised.
    """
    name = getattr(factory, "__name__", type(factory).__name__)
    arguments, options = _arguments(factory, name, rngs)
    # an array that is made in a trace is data of its module, as one that is made outside
    nnx.register_data_type(type(jnp.zeros(())))
    with user_code(lambda error: f"the constructor of the model, {name},"):
        module = factory(*arguments, **options)
    if isinstance(module, nnx.Module):
        return module
    if isinstance(module, nn.Module):
        raise ValueError(linen_text(f"{name} gives the linen module {type(module).__name__}"))
    raise ValueError(
        f"model {name} gives {type(module).__name__}; it must return an nnx.Module, or be a class of them"
    )


def linen_text(what: str) -> str:
    """Return the message that says how to give a linen module to a run."""
    return (
        f"{what}, whose inputs are not known; write from_linen(module, jax.ShapeDtypeStruct(...)) with the"
        " shape of one batch"
    )


def _arguments(
    factory: Callable[..., Any], name: str, rngs: nnx.Rngs
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a factory is called, by position and by name."""
    try:
        parameters = inspect.signature(_keep_arguments(factory)).parameters
    except ValueError:  # of builtin functions
        return (rngs,), {}
    required = [
        each.name
        for each in parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    streams = parameters.get(STREAMS)
    by_name = streams is not None and streams.kind in (streams.KEYWORD_ONLY, streams.POSITIONAL_OR_KEYWORD)
    others = [each for each in required if each != STREAMS]
    if by_name and not others:
        return (), {STREAMS: rngs}
    if not by_name and _takes_position(factory, parameters, required):
        return (rngs,), {}
    if not required and isinstance(factory, type):
        return (), {}
    streams_given = f"{STREAMS}={STREAMS}" if by_name else ""
    given = ", ".join([*(f"{each}=..." for each in others), *([streams_given] if streams_given else [])])
    needs = f"needs {', '.join(others)}" if others else "takes no random streams"
    raise ValueError(
        f"model is {name}, which {needs}, and a run gives {STREAMS} alone; write"
        f" model=lambda {STREAMS}: {name if isinstance(factory, type) else 'MyModule'}({given})"
    )


def _keep_arguments(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the arguments of a factory; a class of modules shows those of its metaclass."""
    if isinstance(factory, partial):
        return partial(_keep_arguments(factory.func), *factory.args, **factory.keywords)
    if not isinstance(factory, type):
        return factory
    return (lambda: None) if factory.__init__ is object.__init__ else partial(factory.__init__, None)


def _takes_position(factory: Any, parameters: Any, required: list[str]) -> bool:
    """Return whether the first argument takes the streams; that of a class must have such a name."""
    positional = [
        each
        for each in parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if any(each.kind is each.VAR_POSITIONAL for each in parameters.values()):
        return not required
    if not positional or len(required) > 1 or (required and required[0] != positional[0].name):
        return False
    return not isinstance(factory, type) or "rng" in positional[0].name or len(positional[0].name) == 1
