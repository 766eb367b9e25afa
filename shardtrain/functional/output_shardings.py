"""Follow `out_sharding` in calls of Flax's layers by the rules of a layout, as other constraints.

jax takes it only on a mesh with explicit axes, which a run does not have. Next: `activation_rules.py`.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import AXES, BATCH
from shardtrain.errors.user_code import raised_at
from shardtrain.functional.model import dim_names
from shardtrain.sharding.array_dims import JOINT

ARGUMENT = "out_sharding"
"""The argument of layers and of functions of jax."""

_FOLLOWS: ContextVar[bool] = ContextVar("follows", default=False)

_SAID = ("not under a mesh context", "cannot contain axis names that are of type Auto", "out_sharding")
"""What jax says of this argument on other meshes."""


@contextmanager
def output_shardings() -> Iterator[None]:
    """Within this, `out_sharding` of Flax's layers names dims for `nn.with_logical_constraint`.

    Raises:
      ValueError: a function of jax was given one.
    """
    token = _FOLLOWS.set(True)
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        if not any(text in str(error) for text in _SAID):
            raise
        raise ValueError(
            f"{raised_at(error)}: the model gives {ARGUMENT} to a function of jax, which takes it on meshes"
            " with explicit axes; leave it out there and name the dims of what the function returns, as"
            " nn.with_logical_constraint(x, ('batch', None, 'embed')), where names of mesh axes do too"
        ) from error
    finally:
        _FOLLOWS.reset(token)


def _following(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of a layer to constrain what it returns, in place of its argument."""
    signature = inspect.signature(original)

    @wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        given = bound.arguments.pop(ARGUMENT, None) if _FOLLOWS.get() else None
        if given is None:
            return original(*arguments, **options)
        outputs = original(*bound.args, **bound.kwargs)
        names = dim_names(given, outputs.shape, f"{ARGUMENT} of {type(arguments[0]).__name__}") or ()
        return with_logical_constraint(outputs, tuple(map(_dim, names)))

    return call


def _dim(name: str | None) -> str | None:
    """Return the dim of the batch for several mesh axes, over which only rows are sharded together."""
    return BATCH if name and JOINT in name and set(name.split(JOINT)) <= set(AXES) else name


_LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.Embed, nnx.LoRALinear)

for _layer, _method in (*((layer, "__call__") for layer in _LAYERS), (nnx.Embed, "attend")):
    setattr(_layer, _method, _following(getattr(_layer, _method)))
