"""The arithmetic of local steps: a replica's own update, and the merge of what replicas changed.

Every replica has its own optimizer. Its parameters are the common ones plus its drift, the changes since the
last merge. A merge combines the drifts, gives the result to the outer optimizer and starts the next round
from there. All functions are pure, for use inside jit, and are shared by meshes (`delta_step.py`), islands
(`delta_island_step.py`) and stages (`stage_step.py`).
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
    """Add a replica's drift to the common parameters; integers (frozen parameters) keep their bits."""

    def add(p: jax.Array, d: jax.Array) -> jax.Array:
        return p + (d if jnp.issubdtype(p.dtype, jnp.floating) else d.astype(p.dtype))

    return jax.tree.map(add, params, drift)


def make_own_params(params: Any, drift: Any) -> Any:
    """Return a replica's own parameters: the common ones plus its drift, in the dtypes of the parameters."""
    return jax.tree.map(lambda x, p: x.astype(p.dtype), add_drift(params, drift), params)


def make_local_update(optimizer: optax.GradientTransformation) -> Callable[..., tuple[Any, Any]]:
    """Make a replica's own update.

    Returns:
      (params, drift, opt_state, grads, count, value) -> (opt_state, drift): `params` are the common
      parameters, `count` the replica's examples and `value` its mean loss. Without examples nothing changes.
    """
    used = make_storable(optimizer)

    def update(
        params: Any, drift: Any, opt_state: Any, grads: Any, count: jax.Array, value: jax.Array
    ) -> tuple[Any, Any]:
        own = make_own_params(params, drift)
        updates, new = used.update(grads, opt_state, own, value=value, grad=grads)
        moved = jax.tree.map(lambda d, u: d + u.astype(d.dtype), drift, updates)
        return jax.tree.map(
            lambda n, o: jnp.where(count > 0, n.astype(o.dtype), o), (new, moved), (opt_state, drift)
        )

    return update


def merge_fragment(
    fragment: Fragment,
    number: int,
    outer: optax.GradientTransformation | None,
    params: Any,
    local: Local,
    outer_state: Any,
    combined: Any,
    lead: int = 0,
) -> tuple[Any, Local, Any]:
    """Give a combined delta to the outer optimizer, and start the next round from the result.

    Args:
      fragment: the part of the parameters that was combined.
      number: the number of the fragment.
      outer: the outer optimizer; None adds the delta to the parameters.
      params: all common parameters.
      local: what a replica changed.
      outer_state: the outer optimizer's state of all fragments.
      combined: path -> combined delta of the fragment.
      lead: number of leading dims of `local`, such as a dim of replicas.

    Returns:
      (all parameters, `local` of the next round, the outer optimizer's state of all fragments).
    """
    before = fragment.take(params)
    updates = combined
    if outer is not None:
        against = jax.tree.map(lambda x: -x.astype(jnp.float32), combined)
        updates, own = outer.update(against, outer_state[number], before)
        outer_state = replace_item(outer_state, number, own)
    after = jax.tree.map(
        lambda p, u: (p.astype(jnp.float32) + u.astype(jnp.float32)).astype(p.dtype), before, updates
    )
    return fragment.put(params, after), next_round(fragment, number, local, lead), outer_state


def replace_item(items: tuple[Any, ...], number: int, item: Any) -> tuple[Any, ...]:
    """Return a tuple with one item replaced."""
    return (*items[:number], item, *items[number + 1 :])


def send(fragment: Fragment, number: int, local: Local, lead: int = 0) -> Local:
    """Record in `local` that the changes of a fragment are being sent, in a synchronisation with overlap.

    Args:
      fragment: the part of the parameters.
      number: the number of the fragment.
      local: what a replica changed.
      lead: number of leading dims of `local`, such as a dim of replicas.
    """
    return local._replace(
        count=local.count.at[..., number].set(0),
        sent=fragment.put(local.sent, fragment.take(local.drift, lead), lead),
        sent_count=local.sent_count.at[..., number].set(local.count[..., number]),
    )


def select_combined(
    fragment: Fragment, number: int, local: Local, lead: int = 0
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return path -> the changes of a fragment that are combined next, and their number of examples.

    With overlap they are the sent changes, otherwise all changes. The arguments are those of `send`.
    """
    if not jax.tree.leaves(local.sent):
        return fragment.take(local.drift, lead), local.count[..., number]
    return fragment.take(local.sent, lead), jnp.maximum(local.sent_count[..., number], 0)


def next_round(fragment: Fragment, number: int, local: Local, lead: int = 0) -> Local:
    """Remove the combined changes of a fragment from `local`; the arguments are those of `send`."""
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
