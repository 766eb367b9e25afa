"""Merge what islands changed in their local steps, fragment by fragment; islands wait for each other.

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

from shardtrain.combine.fragments import Fragment
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.islands.transfer import Transfer
from shardtrain.train_step.island_combiner import IslandCombiner, join_metrics
from shardtrain.train_step.island_totals import all_reduce_totals, average_model_state
from shardtrain.train_step.local_steps import merge_fragment, select_combined, send
from shardtrain.train_step.merge import Merge
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.replica_state import split_fragments
from shardtrain.train_step.state import Local, State
from shardtrain.train_step.step import Metrics

AllGather = Callable[[str, Any], list[Any]]
"""(name, value of this rank) -> the values of all ranks."""


def gather_alone(name: str, value: Any = None) -> list[Any]:
    """Return the values of all ranks of a run of one rank."""
    return [value]


class _PendingMerge(NamedTuple):
    """A merge whose buckets are under way: path -> sent deltas, examples, and a future for each bucket."""

    deltas: dict[str, jax.Array]
    count: jax.Array
    buckets: list[Future[Any]]


class IslandMerge(Merge):
    """The merge of islands that wait for each other, by a synchronisation on deltas.

    Args:
      synchronisation: says when islands merge, by which combiner and with which outer optimizer.
      placement: the placement of the parameters on this island.
      transfer: to the other islands.
      all_gather: gathers a value of every rank, by name; it reports which rank is missing.
      last_step: the last step of the run, which merges everything that is left; -1 if there is none.
    """

    def __init__(
        self,
        synchronisation: Synchronisation,
        placement: Placement,
        transfer: Transfer,
        all_gather: AllGather = gather_alone,
        last_step: int = -1,
    ) -> None:
        fragments, params = split_fragments(synchronisation, placement.specs), placement.specs.abstract.params
        combiners = [
            IslandCombiner(synchronisation.combiner, placement, transfer, each.take(params))
            for each in fragments
        ]
        super().__init__(synchronisation, placement, fragments, combiners)
        self._transfer, self._all_gather, self._last_step = transfer, all_gather, last_step
        found = self.shardings(placement.state)
        found = found._replace(local=_drop_unneeded(found.local))
        # one program for each fragment and purpose
        numbered = list(enumerate(fragments))
        self._to_combine = [jax.jit(partial(select_combined, each, number)) for number, each in numbered]
        self._sent = [
            jax.jit(partial(send, each, number), out_shardings=found.local) for number, each in numbered
        ]
        self._merged = [
            jax.jit(
                partial(merge_fragment, each, number, synchronisation.outer_optimizer),
                out_shardings=(found.params, found.local, found.outer_state),
            )
            for number, each in numbered
        ]
        self._measure = [jax.jit(partial(_measure, each, synchronisation)) for each in fragments]
        # a cache: what is under way is in the state, and can be sent again from there
        self._started: dict[int, _PendingMerge] = {}

    def _restart(self, state: State, number: int) -> None:
        self._started.clear()

    def merge(self, state: State, number: int) -> tuple[State, Metrics]:
        """Combine the fragments that are due after a step, and give the result to the outer optimizer.

        The metrics are empty unless a round of all fragments ends. See `Merge.merge`.
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
            metrics, state = self._reduce_round_totals(state)
        found: Metrics = {}
        for fragment in fragments:
            is_sent = synchronisation.is_sent(fragment, number, last_step)
            if not synchronisation.overlap:
                if is_sent and self._synchronises(fragment, state, is_last):
                    state, found = self._finish(fragment, state, self._start(fragment, state))
                continue
            # first what is under way arrives, then what was changed since is sent
            is_due = synchronisation.is_due(fragment, number, last_step)
            if is_due and self._is_under_way(fragment, state):
                started = self._started.pop(fragment, None) or self._start(fragment, state)
                state, found = self._finish(fragment, state, started)
            if is_sent and self._synchronises(fragment, state, is_last):
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

    def _synchronises(self, fragment: int, state: State, is_last: bool) -> bool:
        """Return whether the trigger, if there is one, lets islands send the fragment's deltas now."""
        trigger = self._synchronisation.trigger
        if trigger is None or is_last:
            return True
        value = float(self._measure[fragment](state.local.drift, state.params))
        return bool(trigger.is_due(jnp.array(self._all_gather("the sync trigger", value))))

    def _is_under_way(self, fragment: int, state: State) -> bool:
        return fragment in self._started or float(state.local.sent_count[fragment]) >= 0

    def _start(self, fragment: int, state: State) -> _PendingMerge:
        """Start to send deltas in the background."""
        deltas, count = self._to_combine[fragment](_drop_unneeded(state.local))
        if self._synchronisation.overlap:
            # the next step takes the memory of the state over, so what is under way needs its own
            deltas, count = jax.tree.map(jnp.copy, (deltas, count))
        started = self._combiners[fragment].start(deltas, count, state.combine_state[fragment])
        return _PendingMerge(deltas, count, started)

    def _finish(self, fragment: int, state: State, started: _PendingMerge) -> tuple[State, Metrics]:
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

    def _reduce_round_totals(self, state: State) -> tuple[Metrics, State]:
        """Add up the sums of all islands, and begin them anew."""
        local = state.local
        if not jax.tree.leaves(local.sums):
            return {}, state
        sums, _ = all_reduce_totals(self._transfer, local.sums, (), local.sums["count"])
        local = local._replace(sums=jax.tree.map(jnp.zeros_like, local.sums))
        return {"sums": sums}, state._replace(local=local)


def _drop_unneeded(local: Local) -> Local:
    return local._replace(sums=(), model_state=())


def _restore_local(state: State, local: Local) -> State:
    return state._replace(local=local._replace(sums=state.local.sums, model_state=state.local.model_state))


def _measure(fragment: Fragment, synchronisation: Synchronisation, drift: Any, params: Any) -> jax.Array:
    assert synchronisation.trigger is not None
    return synchronisation.trigger.measure(fragment.take(drift), fragment.take(params))
