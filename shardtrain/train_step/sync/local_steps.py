"""Merge what islands changed in their local steps, round by round; islands wait for each other.

Islands here are replicas: whole ones, or the same stage of several pipelines. With overlap the exchange of a
merge takes place while the next steps are computed. Next: `drift.py` (the arithmetic), `island_combiner.py`
(the exchange).
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardtrain.combine.fragments import Fragment
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.train_step.drift import make_round_merges, merge_rounds
from shardtrain.train_step.island_combiner import (
    IslandCombiner,
    all_reduce_totals,
    average_model_state,
    join_metrics,
)
from shardtrain.train_step.island_compute import IslandCompute
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import Local, Metrics, State
from shardtrain.train_step.sync.island_step import EveryStep, IslandStep, Merge


class _PendingMerge(NamedTuple):
    """A merge whose buckets are under way: path -> sent deltas, examples, and a future for each bucket."""

    deltas: dict[str, jax.Array]
    count: jax.Array
    buckets: list[Future[Any]]


Found = tuple[State, Metrics]
"""The state, and the metrics of the combiner."""


class LocalSteps(Merge):
    """Islands that wait for each other to merge what they changed, by a synchronisation on deltas.

    It is a `drift.Rounds`.

    Args:
      compute: what this island computes.
      synchronisation: says when islands merge, by which combiner and with which outer optimizer.
      last_step: the last step of the run, which merges everything that is left; -1 if there is none.
    """

    def __init__(
        self, compute: IslandCompute | StageCompute, synchronisation: Synchronisation, last_step: int
    ) -> None:
        placement, channel = compute.placement, compute.channel
        rounds = make_round_merges(synchronisation, placement.specs)
        params = placement.specs.abstract.params
        # one combiner and one program of each purpose for each round
        combiners = [
            IslandCombiner(each.combiner, placement, channel.transfer, each.fragment.take(params))
            for each in rounds
        ]
        super().__init__(compute, synchronisation, [each.fragment for each in rounds], combiners)
        self._channel, self._last_step = channel, last_step
        found = self.shardings(placement.state)
        found = found._replace(local=_drop_unneeded(found.local))
        after = (found.params, found.local, found.outer_state)
        self._to_combine = [jax.jit(each.select) for each in rounds]
        self._sent = [jax.jit(each.send, out_shardings=found.local) for each in rounds]
        self._merged = [jax.jit(each.merge, out_shardings=after) for each in rounds]
        self._measure = [jax.jit(partial(_measure, each.fragment, synchronisation)) for each in rounds]
        # a cache: what is under way is in the state, and can be sent again from there
        self._started: dict[int, _PendingMerge] = {}

    def _restart(self, state: State, number: int) -> None:
        self._started.clear()

    def merge(self, state: State, number: int) -> tuple[State, Metrics]:
        """Combine what is due after a step, and give the result to the outer optimizer.

        The metrics are empty unless the last round is due. See `Merge.merge`.
        """
        synchronisation, last_step = self._synchronisation, self._last_step
        rounds = range(len(self._fragments))
        does = (synchronisation.is_due, synchronisation.is_sent)
        if not any(is_now(each, number, last_step) for each in rounds for is_now in does):
            self._last = (state.step, number)
            return state, {}
        # own work is done before the exchange, so that a slow island is one that arrives late
        jax.block_until_ready(state.local)
        self._channel.all_gather("merge", None)
        metrics: Metrics = {}
        ends_rounds = synchronisation.is_due(rounds[-1], number, last_step)
        local = state.local
        if ends_rounds and jax.tree.leaves(local.sums):
            # add up the sums of all islands, and begin them anew
            transfer = self._channel.transfer
            metrics["sums"], _ = all_reduce_totals(transfer, local.sums, (), local.sums["count"])
            state = state._replace(local=local._replace(sums=jax.tree.map(jnp.zeros_like, local.sums)))
        self._is_last = number == last_step
        state, found = merge_rounds(synchronisation, self, number, last_step, (state, {}))
        self._last = (state.step, number)
        if ends_rounds:
            whole = len(rounds) == 1
            metrics |= {name: x for name, x in found.items() if whole or not x.ndim}
        return state, metrics

    def do_if(
        self, is_now: bool, condition: Callable[[Found], bool], change: Callable[[Found], Found], s: Found
    ) -> Found:
        """Do a part of a merge if it is due, see `drift.Rounds`."""
        return change(s) if is_now and condition(s) else s

    def is_under_way(self, number: int, s: Found) -> bool:
        """Return whether deltas of a round have been sent and not been combined."""
        return number in self._started or float(s[0].local.sent_count[number]) >= 0

    def is_asked(self, number: int, s: Found) -> bool:
        """Return whether the trigger, if there is one, lets islands send the deltas of a round now."""
        trigger = self._synchronisation.trigger
        if trigger is None or self._is_last:
            return True
        value = float(self._measure[number](s[0].local.drift, s[0].params))
        return bool(trigger.is_due(jnp.array(self._channel.all_gather("the sync trigger", value))))

    def send(self, number: int, s: Found) -> Found:
        """Send the deltas of a round in the background."""
        state = _restore_local(s[0], self._sent[number](_drop_unneeded(s[0].local)))
        self._started[number] = self._start(number, state)
        return state, s[1]

    def combine(self, number: int, s: Found) -> Found:
        """Wait for the combined deltas of a round, which are sent if they were not, and merge them."""
        state, _ = s
        started = self._started.pop(number, None) or self._start(number, state)
        combined = self._combiners[number].finish(started.deltas, started.buckets)
        combine_state = [*state.combine_state]
        combine_state[number] = combined.state
        params, local, outer_state = self._merged[number](
            state.params, _drop_unneeded(state.local), state.outer_state, combined.value
        )
        state = state._replace(params=params, outer_state=outer_state, combine_state=combine_state)
        state = _restore_local(state, local)
        # the last round makes all common: the model's state is averaged by the same examples
        if number == len(self._fragments) - 1:
            found = average_model_state(self._channel.transfer, state.local.model_state, started.count)
            own = jax.tree.map(jnp.copy, found)
            state = state._replace(model_state=found, local=state.local._replace(model_state=own))
        return state, join_metrics(combined.metrics)

    def _start(self, number: int, state: State) -> _PendingMerge:
        """Start to send deltas in the background."""
        deltas, count = self._to_combine[number](_drop_unneeded(state.local))
        if self._synchronisation.overlap:
            # the next step takes the memory of the state over, so what is under way needs its own
            deltas, count = jax.tree.map(jnp.copy, (deltas, count))
        started = self._combiners[number].start(deltas, count, state.combine_state[number])
        return _PendingMerge(deltas, count, started)


def _drop_unneeded(local: Local) -> Local:
    return local._replace(sums=(), model_state=())


def _restore_local(state: State, local: Local) -> State:
    return state._replace(local=local._replace(sums=state.local.sums, model_state=state.local.model_state))


def _measure(fragment: Fragment, synchronisation: Synchronisation, drift: Any, params: Any) -> jax.Array:
    assert synchronisation.trigger is not None
    return synchronisation.trigger.measure(fragment.take(drift), fragment.take(params))


def make_sync(
    compute: IslandCompute | StageCompute, synchronisation: Synchronisation, last_step: int = -1
) -> IslandStep:
    """Make the step of an island by a synchronisation without a `distance`.

    Args:
      compute: what this island computes.
      synchronisation: how islands are synchronised.
      last_step: the last step of the run, see `step.make_step`.
    """
    if synchronisation.on_deltas:
        return LocalSteps(compute, synchronisation, last_step)
    return EveryStep(compute)
