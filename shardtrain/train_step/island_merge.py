"""Merge what islands changed in their local steps, fragment by fragment, and start the next round from it.

Islands here are replicas: whole ones, or the same stage of several pipelines. With overlap the exchange of a
merge takes place while the next steps are computed. Next: `local_steps.py` (the arithmetic),
`island_combiner.py` (the exchange).
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardtrain.combine.fragments import Fragment
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.islands.transfer import Transfer
from shardtrain.train_step.island_combiner import IslandCombiner, join_metrics
from shardtrain.train_step.island_totals import all_reduce_totals, average_model_state
from shardtrain.train_step.local_steps import apply_delta, next_round, select_combined, send
from shardtrain.train_step.own_state import OwnState
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.replica_state import split_fragments
from shardtrain.train_step.state import Local, State
from shardtrain.train_step.step import Metrics

AllGather = Callable[[str, Any], list[Any]]
"""(name, value of this rank) -> every rank's."""


def gather_alone(name: str, value: Any = None) -> list[Any]:
    """Return the value of the only rank there is."""
    return [value]


class _Started(NamedTuple):
    """A merge whose buckets are under way.

    Args:
      deltas: path -> what is sent.
      count: float32 scalar, examples.
      buckets: the futures of the buckets, see `IslandCombiner.start`.
    """

    deltas: dict[str, jax.Array]
    count: jax.Array
    buckets: list[Future[Any]]


class IslandMerge:
    """The merge of islands at the end of some steps, by a synchronisation on deltas.

    Args:
      synchronisation: when, by which combiner, with which outer optimizer.
      placement: the placement of the parameters on this island.
      transfer: to the other islands.
      all_gather: called with a name before islands exchange something; it can say which rank is missing.
      last_step: the last step of the run, after which nothing is left to merge; -1 if there is none.
    """

    def __init__(
        self,
        synchronisation: Synchronisation,
        placement: Placement,
        transfer: Transfer,
        all_gather: AllGather = gather_alone,
        last_step: int = -1,
    ) -> None:
        self._synchronisation = synchronisation
        self._transfer, self._all_gather, self._last_step = transfer, all_gather, last_step
        self._fragments = split_fragments(synchronisation, placement.specs)
        params = placement.specs.abstract.params
        self._combiners = [
            IslandCombiner(synchronisation.combiner, placement, transfer, each.take(params))
            for each in self._fragments
        ]
        outer = synchronisation.outer_optimizer
        self._own = OwnState(synchronisation, placement, self._fragments)
        self.shardings = self._own.shardings
        found = self.shardings(placement.state)
        found = found._replace(local=_drop_unneeded(found.local))
        # one program for each fragment: what is sent, that it is under way, its merge, how far it has moved
        numbered = list(enumerate(self._fragments))
        self._to_combine = [jax.jit(partial(select_combined, each, number)) for number, each in numbered]
        self._sent = [
            jax.jit(partial(send, each, number), out_shardings=found.local) for number, each in numbered
        ]
        self._merged = [
            jax.jit(
                partial(_merge, each, number, outer),
                out_shardings=(found.params, found.local, found.outer_state),
            )
            for number, each in numbered
        ]
        self._measure = [jax.jit(partial(_measure, each, synchronisation)) for each in self._fragments]
        # a cache: what is under way is in the state, and can be sent again from there
        self._started: dict[int, _Started] = {}
        self._last: tuple[Any, int] = (None, 0)

    @property
    def labels(self) -> list[str]:
        """Names of the entries of a combiner's metric (L,); of several fragments there is none."""
        return self._combiners[0].labels if len(self._combiners) == 1 else []

    @property
    def keeps_state(self) -> bool:
        """Whether the combiner has a state."""
        return any(combiner.keeps_state for combiner in self._combiners)

    def begin(self, state: State, sums: Any = ()) -> State:
        """Return a state of which nothing was changed yet, with what the merge needs in it.

        Args:
          state: the state of this island.
          sums: shapes of what is added up between merges.
        """
        combine_state = [combiner.init() for combiner in self._combiners]
        return self._own.begin(state, sums)._replace(combine_state=combine_state)

    def wanted(self, state: State, sums: Any = ()) -> State:
        """Return the shapes, dtypes and shardings of what `begin` returns."""
        combine_state = [combiner.wanted() for combiner in self._combiners]
        return self._own.wanted(state, sums)._replace(combine_state=combine_state)

    def steps_done(self, state: State) -> int:
        """Return the steps done; waits for the device only if the state is not the one returned last."""
        step, number = self._last
        if state.step is step:
            return number
        self._started.clear()
        return int(state.step)

    def merge(self, state: State, number: int) -> tuple[State, Metrics]:
        """Combine the fragments that are due after a step, and give the result to the outer optimizer.

        Args:
          state: the state after the step.
          number: steps done.

        Returns:
          (the state after the merges, the metrics): where a round of all fragments has ended these have the
          sums over all islands under "sums", else there are none.
        """
        synchronisation, last_step = self._synchronisation, self._last_step
        fragments, is_last = range(len(self._fragments)), number == last_step
        does = (synchronisation.is_due, synchronisation.is_sent)
        if not any(is_now(each, number, last_step) for each in fragments for is_now in does):
            self._last = (state.step, number)
            return state, {}
        # own work is done before the exchange, so that a slow island is one that arrives late
        jax.block_until_ready(state.local)
        self._all_gather("merge", None)
        metrics: Metrics = {}
        ends_round = synchronisation.is_due(fragments[-1], number, last_step)
        if ends_round:
            metrics, state = self._round_totals(state)
        found: Metrics = {}
        for fragment in fragments:
            is_sent = synchronisation.is_sent(fragment, number, last_step)
            if not synchronisation.overlap:
                if is_sent and self._meets(fragment, state, is_last):
                    state, found = self._finish(fragment, state, self._start(fragment, state))
                continue
            # first what is under way arrives, then what was changed since is sent
            is_due = synchronisation.is_due(fragment, number, last_step)
            if is_due and self._is_under_way(fragment, state):
                started = self._started.pop(fragment, None) or self._start(fragment, state)
                state, found = self._finish(fragment, state, started)
            if is_sent and self._meets(fragment, state, is_last):
                state = _restore_local(state, self._sent[fragment](_drop_unneeded(state.local)))
                self._started[fragment] = self._start(fragment, state)
            # nothing stays under way after the last step
            if is_last:
                state, found = self._finish(fragment, state, self._started.pop(fragment))
        self._last = (state.step, number)
        if ends_round:
            whole = len(fragments) == 1
            metrics |= {name: x for name, x in found.items() if whole or not x.ndim}
        return state, metrics

    def close(self) -> None:
        """There is nothing to end: the transfer is not this object's."""

    def _meets(self, fragment: int, state: State, is_last: bool) -> bool:
        """Return whether islands send the fragment's deltas now, where the synchronisation lets them."""
        trigger = self._synchronisation.trigger
        if trigger is None or is_last:
            return True
        value = float(self._measure[fragment](state.local.drift, state.params))
        return bool(trigger.is_due(jnp.array(self._all_gather("the sync trigger", value))))

    def _is_under_way(self, fragment: int, state: State) -> bool:
        return fragment in self._started or float(state.local.sent_count[fragment]) >= 0

    def _start(self, fragment: int, state: State) -> _Started:
        """Start to send deltas in the background."""
        deltas, count = self._to_combine[fragment](_drop_unneeded(state.local))
        if self._synchronisation.overlap:
            # the next step takes the memory of the state over, so what is under way needs its own
            deltas, count = jax.tree.map(jnp.copy, (deltas, count))
        started = self._combiners[fragment].start(deltas, count, state.combine_state[fragment])
        return _Started(deltas, count, started)

    def _finish(self, fragment: int, state: State, started: _Started) -> tuple[State, Metrics]:
        """Wait for the combined deltas, and give them to the outer optimizer: (state, combiner's metrics)."""
        combined = self._combiners[fragment].finish(started.deltas, started.buckets)
        combine_state = [*state.combine_state]
        combine_state[fragment] = combined.state
        params, local, outer_state = self._merged[fragment](
            state.params, _drop_unneeded(state.local), state.outer_state, combined.value
        )
        state = state._replace(params=params, outer_state=outer_state, combine_state=combine_state)
        state = _restore_local(state, local)
        # the last fragment ends a round: the model's state is averaged by the same examples
        if fragment == len(self._fragments) - 1:
            found = average_model_state(self._transfer, state.local.model_state, started.count)
            own = jax.tree.map(jnp.copy, found)
            state = state._replace(model_state=found, local=state.local._replace(model_state=own))
        return state, join_metrics(combined.metrics)

    def _round_totals(self, state: State) -> tuple[Metrics, State]:
        """Add up the sums of all islands, and begin them anew."""
        local = state.local
        if not jax.tree.leaves(local.sums):
            return {}, state
        sums, _ = all_reduce_totals(self._transfer, local.sums, (), local.sums["count"])
        local = local._replace(sums=jax.tree.map(jnp.zeros_like, local.sums))
        return {"sums": sums}, state._replace(local=local)


def _drop_unneeded(local: Local) -> Local:
    """Return the `Local` without what the programs of a merge do not need."""
    return local._replace(sums=(), model_state=())


def _restore_local(state: State, local: Local) -> State:
    """Return the state with what a program made of `_drop_unneeded`."""
    return state._replace(local=local._replace(sums=state.local.sums, model_state=state.local.model_state))


def _merge(
    fragment: Fragment,
    number: int,
    outer: optax.GradientTransformation | None,
    params: Any,
    local: Local,
    outer_state: Any,
    combined: Any,
) -> tuple[Any, Local, Any]:
    """Return (params, local, outer state of all fragments) after a fragment was combined."""
    own = outer_state[number] if outer is not None else ()
    params, own = apply_delta(fragment, outer, params, combined, own)
    if outer is not None:
        outer_state = (*outer_state[:number], own, *outer_state[number + 1 :])
    return params, next_round(fragment, number, local), outer_state


def _measure(fragment: Fragment, synchronisation: Synchronisation, drift: Any, params: Any) -> jax.Array:
    assert synchronisation.trigger is not None
    return synchronisation.trigger.measure(fragment.take(drift), fragment.take(params))
