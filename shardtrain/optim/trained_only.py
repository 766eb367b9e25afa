"""An optimizer of some of the parameters: the others have no state in it and keep their bits.

Next: `optimizer.py`; which parameters are frozen says `functional/frozen.py`.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain.functional.frozen import merged, without
from shardtrain.optim.clip import TakesNorm


def trained_only(
    optimizer: optax.GradientTransformation, frozen: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that sees trained parameters alone, for a tree with frozen ones.

    Args:
      optimizer: any optax transformation; it is given nested dicts without the frozen parameters.
      frozen: the paths of these.

    >>> params = {"kept": jnp.ones(2), "trained": jnp.ones(2)}
    >>> update = trained_only(optax.sgd(0.5, momentum=0.9), {"kept"})
    >>> state = update.init(params)
    >>> [x.shape for x in jax.tree.leaves(state)]
    [(2,)]
    >>> updates, _ = update.update(params, state, params)
    >>> {name: float(x[0]) for name, x in updates.items()}
    {'kept': -0.0, 'trained': -0.5}
    """
    inner: Any = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        return inner.init(without(params, frozen))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if "grad" in extra:
            extra["grad"] = without(extra["grad"], frozen)
        if value := extra.get("value_fn"):
            extra["value_fn"] = lambda trained: value(merged(trained, params))
        trained = None if params is None else without(params, frozen)
        found, state = inner.update(without(updates, frozen), state, trained, **extra)
        return merged(found, jax.tree.map(_nothing, updates if params is None else params)), state

    made = optax.GradientTransformationExtraArgs(init, update)
    return TakesNorm(*made) if isinstance(optimizer, TakesNorm) else made


def _nothing(x: Any) -> jax.Array:
    """Return what changes no bit of an array when it is added: -0.0, as 0.0 changes -0.0."""
    return jnp.full_like(x, -0.0) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros_like(x)
