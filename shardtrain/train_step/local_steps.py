"""The arithmetic of local steps: a replica's own update, and the merge of what replicas changed.

Every replica has an optimizer of its own. Its parameters are the common ones plus its drift, what it has
changed since they were last combined. A merge combines the drifts, gives the result to the outer optimizer
and starts the next round from there. All functions are pure, for use inside jit, and the same in a mesh
(`step.py`), on islands (`island_step.py`) and in stages (`stage_step.py`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain.combine.fragments import Fragment
from shardtrain.optim.optimizer_state import stored
from shardtrain.train_step.state import Local


def own_params(params: Any, drift: Any) -> Any:
    """Return a replica's own parameters: the common ones plus its drift, in the dtypes of the former."""
    return jax.tree.map(lambda p, d: (p.astype(jnp.float32) + d).astype(p.dtype), params, drift)


def make_local_update(optimizer: optax.GradientTransformation) -> Callable[..., tuple[Any, Any]]:
    """Make a replica's own update.

    Returns:
      (params, drift, opt_state, grads, count, value) -> (opt_state, drift): `params` are the common ones,
      `count` the replica's examples and `value` its mean loss. Without examples nothing changes.
    """
    used = stored(optimizer)

    def update(
        params: Any, drift: Any, opt_state: Any, grads: Any, count: jax.Array, value: jax.Array
    ) -> tuple[Any, Any]:
        own = own_params(params, drift)
        updates, new = used.update(grads, opt_state, own, value=value, grad=grads)
        moved = jax.tree.map(lambda d, u: d + u.astype(d.dtype), drift, updates)
        return jax.tree.map(
            lambda n, o: jnp.where(count > 0, n.astype(o.dtype), o), (new, moved), (opt_state, drift)
        )

    return update


def merged(
    fragment: Fragment,
    outer: optax.GradientTransformation | None,
    params: Any,
    combined: Any,
    outer_state: Any,
) -> tuple[Any, Any]:
    """Give a combined delta to the outer optimizer.

    Args:
      fragment: the part of the parameters that was combined.
      outer: the outer optimizer; None adds the delta as it is.
      params: all common parameters.
      combined: path -> combined delta of the fragment.
      outer_state: the outer optimizer's state of this fragment.

    Returns:
      (all parameters, the outer optimizer's state of this fragment).
    """
    before = fragment.take(params)
    updates = combined
    if outer is not None:
        against = jax.tree.map(lambda x: -x.astype(jnp.float32), combined)
        updates, outer_state = outer.update(against, outer_state, before)
    after = jax.tree.map(
        lambda p, u: (p.astype(jnp.float32) + u.astype(jnp.float32)).astype(p.dtype), before, updates
    )
    return fragment.put(params, after), outer_state


def next_round(fragment: Fragment, number: int, local: Local, lead: int = 0) -> Local:
    """Return what a replica has changed after a fragment, of this number, was combined: nothing of it."""
    zeros = {path: jnp.zeros_like(x) for path, x in fragment.take(local.drift, lead).items()}
    count = local.count.at[..., number].set(0)
    return local._replace(drift=fragment.put(local.drift, zeros, lead), count=count)
