"""Find the axis name over which BatchNorm averages replicas, and call models where it is not bound.

Next: `nnx_model.py`, `linen_model.py`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from shardtrain.errors.messages import refuse

REPLICAS = "replicas"
"""The axis name that sync_batch_norm gives to norms."""

NO_BATCH_NORMS = (
    *(nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm),
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm),
)


def find_axis_name(modules: Iterable[Any]) -> str | None:
    """Return the axis name over which modules average batch statistics; None if none does.

    Raises:
      ValueError: several axis names, or one on a norm that does not use batch statistics.
    """
    having = [m for m in modules if isinstance(getattr(m, "axis_name", None), str)]
    names = sorted({m.axis_name for m in having})
    problems = [
        f"{type(m).__name__}(axis_name={m.axis_name!r}) takes means over features, and an axis of replicas"
        " has none; leave axis_name out, sharded features need none here"
        for m in having
        if isinstance(m, NO_BATCH_NORMS)
    ]
    if len(names) > 1:
        problems.append(f"there are the axis names {names}; use one, as all of them mean the replicas")
    refuse("statistics cannot be averaged over replicas", list(dict.fromkeys(problems)))
    return names[0] if names else None


def bind_axis(call: Callable[..., Any], axis_name: str | None) -> Callable[..., Any]:
    """Return a function that also works where its axis name is not bound, like with one replica."""
    if axis_name is None:
        return call

    def bound(*arguments: Any) -> Any:
        try:
            jax.lax.axis_size(axis_name)
        except NameError:
            alone = jax.vmap(
                lambda: call(*arguments), in_axes=(), out_axes=None, axis_name=axis_name, axis_size=1
            )
            return alone()
        return call(*arguments)

    return bound
