"""The arithmetic of local steps: a replica's own update, and the merge of what replicas changed.

Every replica has an optimizer of its own. Its parameters are the common ones plus its drift, what it has
changed since they were last combined. A merge combines the drifts, gives the result to the outer optimizer
and starts the next round from there. All functions are pure, for use inside jit, and the same in a mesh
(`delta_step.py`), on islands (`island_step.py`) and in stages (`stage_step.py`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain.combine.fragments import Fragment
from shardtrain.optim.optimizer_state import make_storable
from shardtrain.train_step.state import Local


def add_drift(params: Any, drift: Any) -> Any:
    """Add what a replica has changed to the common parameters; whole numbers (frozen) keep their bits."""

    def add(p: jax.Array, d: jax.Array) -> jax.Array:
        return p + (d if jnp.issubdtype(p.dtype, jnp.floating) else d.astype(p.dtype))

    return jax.tree.map(add, params, drift)


def own_params(params: Any, drift: Any) -> Any:
    """Return a replica's own parameters: the common ones plus its drift, in the dtypes of the former."""
    return jax.tree.map(lambda x, p: x.astype(p.dtype), add_drift(params, drift), params)


def make_local_update(optimizer: optax.GradientTransformation) -> Callable[..., tuple[Any, Any]]:
    """Make a replica's own update.

    Returns:
      (params, drift, opt_state, grads, count, value) -> (opt_state, drift): `params` are the common ones,
      `count` the replica's examples and `value` its mean loss. Without examples nothing changes.
    """
    used = make_storable(optimizer)

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


def apply_delta(
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


def send(fragment: Fragment, number: int, local: Local, lead: int = 0) -> Local:
    """Return the `Local` of a replica whose changes of a fragment, of this number, are under way from now on.

    Args:
      fragment: the part of the parameters.
      number: of the fragment.
      local: of a synchronisation with overlap.
      lead: dims before each array's own, such as one of replicas.
    """
    return local._replace(
        count=local.count.at[..., number].set(0),
        sent=fragment.put(local.sent, fragment.take(local.drift, lead), lead),
        sent_count=local.sent_count.at[..., number].set(local.count[..., number]),
    )


def select_combined(
    fragment: Fragment, number: int, local: Local, lead: int = 0
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return the changes of a fragment that are combined next, by path, and their number of examples.

    They are those that were sent, and without overlap all. See `send` for the arguments.
    """
    if not jax.tree.leaves(local.sent):
        return fragment.take(local.drift, lead), local.count[..., number]
    return fragment.take(local.sent, lead), jnp.maximum(local.sent_count[..., number], 0)


def next_round(fragment: Fragment, number: int, local: Local, lead: int = 0) -> Local:
    """Return what a replica has changed beside what was combined of a fragment, see `send`."""
    drift = fragment.take(local.drift, lead)
    if not jax.tree.leaves(local.sent):
        rest = jax.tree.map(jnp.zeros_like, drift)
        count = local.count.at[..., number].set(0)
        return local._replace(drift=fragment.put(local.drift, rest, lead), count=count)
    sent = fragment.take(local.sent, lead)
    rest = jax.tree.map(jnp.subtract, drift, sent)
    return local._replace(
        drift=fragment.put(local.drift, rest, lead),
        sent=fragment.put(local.sent, jax.tree.map(jnp.zeros_like, sent), lead),
        sent_count=local.sent_count.at[..., number].set(-1),
    )
