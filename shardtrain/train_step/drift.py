"""The arithmetic of local steps: a replica's own update, and the merge of what replicas changed.

Every replica has its own optimizer. Its parameters are the common ones plus its drift, the changes since the
last merge. A merge combines the drifts, gives the result to the outer optimizer and continues from there. All
functions are pure, for use inside jit, and are shared by meshes (`delta_step.py`), islands and stages
(`sync/local_steps.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from shardtrain.combine.combiner import Combiner
from shardtrain.combine.fragments import Fragment
from shardtrain.combine.synchronisation import Synchronisation
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


class Rounds(Protocol):
    """What a merge does with each round: a mesh inside jit, an island on the host; `s` is what changes."""

    def do_if(
        self, is_now: Any, condition: Callable[[Any], Any], change: Callable[[Any], Any], s: Any
    ) -> Any:
        """Return change(s) if `is_now` and condition(s), else s."""
        ...

    def is_under_way(self, number: int, s: Any) -> Any:
        """Return whether deltas of a round have been sent and not been combined."""
        ...

    def is_asked(self, number: int, s: Any) -> Any:
        """Return whether the trigger, if there is one, lets replicas send the deltas of a round now."""
        ...

    def send(self, number: int, s: Any) -> Any:
        """Send the deltas of a round, which are combined later."""
        ...

    def combine(self, number: int, s: Any) -> Any:
        """Combine the deltas of a round: the sent ones with overlap, else all."""
        ...


def merge_rounds(synchronisation: Synchronisation, rounds: Rounds, step: Any, last_step: int, s: Any) -> Any:
    """Do what is due at the end of a step, round by round.

    Args:
      synchronisation: says what is due.
      rounds: does it.
      step: steps done: a number, or traced.
      last_step: the last step of the run, after which nothing stays under way; -1 if there is none.
      s: what is changed.
    """
    for number in range(len(synchronisation.rounds)):
        combine, is_asked = partial(rounds.combine, number), partial(rounds.is_asked, number)
        is_sent = synchronisation.is_sent(number, step, last_step)
        if not synchronisation.overlap:
            s = rounds.do_if(is_sent, is_asked, combine, s)
            continue
        # first what is under way arrives, then what was changed since is sent
        is_under_way = partial(rounds.is_under_way, number)
        s = rounds.do_if(synchronisation.is_due(number, step, last_step), is_under_way, combine, s)
        s = rounds.do_if(is_sent, is_asked, partial(rounds.send, number), s)
        if last_step >= 0:
            s = rounds.do_if(step == last_step, is_under_way, combine, s)
    return s


def merge_fragment(
    fragment: Fragment,
    number: int,
    combiner: Combiner,
    outer: optax.GradientTransformation | None,
    params: Any,
    local: Local,
    outer_state: Any,
    combined: Any,
    lead: int = 0,
) -> tuple[Any, Local, Any]:
    """Give a combined delta to the outer optimizer, and continue from the result.

    Args:
      fragment: the part of the parameters that was combined.
      number: the number of the round.
      combiner: the combiner of the round; if its value is not common, it becomes the replica's drift.
      outer: the outer optimizer; None adds the delta to the parameters.
      params: all common parameters.
      local: what a replica changed.
      outer_state: the outer optimizer's state of all rounds.
      combined: path -> combined delta of the fragment.
      lead: number of leading dims of `local`, such as a dim of replicas.

    Returns:
      (all parameters, `local` after the round, the outer optimizer's state of all rounds).
    """
    local = next_round(fragment, number, local, lead)
    if not combiner.is_common:
        drift = jax.tree.map(jnp.add, fragment.take(local.drift, lead), combined)
        return params, local._replace(drift=fragment.put(local.drift, drift, lead)), outer_state
    params, outer_state = apply_combined(fragment, number, outer, params, outer_state, combined)
    return params, local, outer_state


def apply_combined(
    fragment: Fragment,
    number: int,
    outer: optax.GradientTransformation | None,
    params: Any,
    outer_state: Any,
    combined: Any,
) -> tuple[Any, Any]:
    """Give a combined delta to the outer optimizer; return all parameters and the states of all rounds.

    The arguments are those of `merge_fragment`.
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
    return fragment.put(params, after), outer_state


def replace_item(items: tuple[Any, ...], number: int, item: Any) -> tuple[Any, ...]:
    """Return a tuple with one item replaced."""
    return (*items[:number], item, *items[number + 1 :])


def send(fragment: Fragment, number: int, local: Local, lead: int = 0) -> Local:
    """Record in `local` that the changes of a fragment are being sent, in a synchronisation with overlap.

    Args:
      fragment: the part of the parameters.
      number: the number of the round.
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
