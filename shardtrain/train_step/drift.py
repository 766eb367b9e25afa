"""The arithmetic of local steps: a replica's own update, and the merge of what replicas changed.

Every replica has its own optimizer. Its parameters are the common ones plus its drift, the changes since the
last merge. A merge combines the drifts, gives the result to the outer optimizer and continues from there. All
functions are pure, for use inside jit, and are shared by meshes (`delta_step.py`), islands and stages
(`sync/local_steps.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from shardtrain.combine.combiner import Combiner
from shardtrain.combine.fragments import Fragment
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.optim.optimizer_state import make_storable
from shardtrain.train_step.state import Local, split_fragments


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


@dataclass(frozen=True, eq=False)
class RoundMerge:
    """The arithmetic of one round of a merge.

    Args:
      number: the number of the round.
      fragment: the part of the parameters that it combines.
      combiner: its combiner; a value that is not common becomes the replica's drift.
      outer: the outer optimizer; None adds the combined delta to the parameters.
      lead: number of leading dims of what a replica changed, such as a dim of replicas.
    """

    number: int
    fragment: Fragment
    combiner: Combiner
    outer: optax.GradientTransformation | None
    lead: int = 0

    def send(self, local: Local) -> Local:
        """Record in `local` that the changes are being sent, in a synchronisation with overlap."""
        sent = self.fragment.put(local.sent, self.fragment.take(local.drift, self.lead), self.lead)
        return local._replace(
            count=local.count.at[..., self.number].set(0),
            sent=sent,
            sent_count=local.sent_count.at[..., self.number].set(local.count[..., self.number]),
        )

    def select(self, local: Local) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return path -> the changes that are combined next, and their number of examples.

        With overlap they are the sent changes, otherwise all changes.
        """
        if not jax.tree.leaves(local.sent):
            return self.fragment.take(local.drift, self.lead), local.count[..., self.number]
        counts = local.sent_count[..., self.number]
        return self.fragment.take(local.sent, self.lead), jnp.maximum(counts, 0)

    def merge(self, params: Any, local: Local, outer_state: Any, combined: Any) -> tuple[Any, Local, Any]:
        """Give a combined delta to the outer optimizer, and continue from the result.

        Args:
          params: all common parameters.
          local: what a replica changed.
          outer_state: the outer optimizer's state of all rounds.
          combined: path -> combined delta of the fragment.

        Returns:
          (all parameters, `local` after the round, the outer optimizer's state of all rounds).
        """
        local = self._remove_combined(local)
        if not self.combiner.is_common:
            drift = jax.tree.map(jnp.add, self.fragment.take(local.drift, self.lead), combined)
            drift = self.fragment.put(local.drift, drift, self.lead)
            return params, local._replace(drift=drift), outer_state
        params, outer_state = self.apply(params, outer_state, combined)
        return params, local, outer_state

    def apply(self, params: Any, outer_state: Any, combined: Any) -> tuple[Any, Any]:
        """Return (all parameters, the outer optimizer's state of all rounds) after a common delta."""
        before = self.fragment.take(params)
        updates = combined
        if self.outer is not None:
            against = jax.tree.map(lambda x: -x.astype(jnp.float32), combined)
            updates, own = self.outer.update(against, outer_state[self.number], before)
            outer_state = replace_item(outer_state, self.number, own)
        after = jax.tree.map(
            lambda p, u: (p.astype(jnp.float32) + u.astype(jnp.float32)).astype(p.dtype), before, updates
        )
        return self.fragment.put(params, after), outer_state

    def _remove_combined(self, local: Local) -> Local:
        """Remove the combined changes from what a replica changed."""
        fragment, lead = self.fragment, self.lead
        drift = fragment.take(local.drift, lead)
        if not jax.tree.leaves(local.sent):
            rest = jax.tree.map(jnp.zeros_like, drift)
            count = local.count.at[..., self.number].set(0)
            return local._replace(drift=fragment.put(local.drift, rest, lead), count=count)
        sent = fragment.take(local.sent, lead)
        rest = jax.tree.map(jnp.subtract, drift, sent)
        return local._replace(
            drift=fragment.put(local.drift, rest, lead),
            sent=fragment.put(local.sent, jax.tree.map(jnp.zeros_like, sent), lead),
            sent_count=local.sent_count.at[..., self.number].set(-1),
        )


def make_round_merges(synchronisation: Synchronisation, specs: Any, lead: int = 0) -> list[RoundMerge]:
    """Make the arithmetic of all rounds of a synchronisation, for `placement.Specs` of a model."""
    outer, fragments = synchronisation.outer_optimizer, split_fragments(synchronisation, specs)
    rounds = enumerate(zip(fragments, synchronisation.rounds, strict=True))
    return [RoundMerge(number, part, each.combiner, outer, lead) for number, (part, each) in rounds]


def replace_item(items: tuple[Any, ...], number: int, item: Any) -> tuple[Any, ...]:
    """Return a tuple with one item replaced."""
    return (*items[:number], item, *items[number + 1 :])
