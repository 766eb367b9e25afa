"""Push what an island changed in a wave of steps, and go on from what all have pushed so far.

Wave-synchronous parallelism (HetPipe, Park et al. 2020): the parameters are those of the start plus all
updates that were pushed, each weighted by its island's share of the rows; an island goes on while no other
is more than a number of waves behind. Next: `islands/parameter_server.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.islands.parameter_shard import Answer, Push
from shardtrain.islands.transfer import Transfer
from shardtrain.train_step.barrier_schedule import BarrierSchedule
from shardtrain.train_step.island_merge import AllGather
from shardtrain.train_step.island_totals import average_model_state
from shardtrain.train_step.own_state import OwnState
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.replica_state import split_fragments
from shardtrain.train_step.state import Local, Metrics, State


class Parameters(Protocol):
    """Parameters to which all islands push; see `parameter_server.ParameterServer`."""

    def begin(self, step: int, values: np.ndarray, dtypes: Sequence[tuple[slice, Any]]) -> None:
        """Start from common parameters."""
        ...

    def push(self, push: Push) -> Answer:
        """Push an update, and wait until every island has pushed enough waves."""
        ...

    def take_bytes(self) -> int:
        """Return the bytes that were sent to other islands since the last call."""
        ...

    def close(self) -> None:
        """End."""
        ...


class VirtualWorker(Protocol):
    """The islands that train one replica in waves: one, or the stages of a pipeline."""

    def any_requests_barrier(self, own: bool) -> bool:
        """Return whether any of its islands requests a barrier."""
        ...

    def find_barrier(self, answered: int) -> int:
        """Return the wave of the barrier that the shards answered to its first island."""
        ...


class OneIsland:
    """A virtual worker of one island."""

    def any_requests_barrier(self, own: bool) -> bool:
        """Return what this island wants."""
        return own

    def find_barrier(self, answered: int) -> int:
        """Return what this island was answered."""
        return answered


class WaveMerge:
    """The end of an island's waves; as `IslandMerge`, but islands do not wait for each other's steps.

    Where islands are stages of pipelines, this is the end of those of a stage, whose parameters all
    pipelines push to. All stages of a pipeline have barriers after the same wave.

    Args:
      synchronisation: how many steps a wave has, and how many waves an island may be ahead.
      placement: the placement of the parameters on this island, which is one process.
      parameters: to which all islands push.
      barriers: the waves after which all islands have equal parameters.
      share: returns the part of the rows of a batch that this island has.
      transfer: to the other islands, for the model's state at barriers.
      all_gather: called with a name when this island reaches the end of a wave alone (`None`) or with all.
      last_step: the last step of the run, which ends the last wave.
      worker: the virtual worker of which this island is a stage; None: it is one itself.
    """

    labels: list[str] = []
    keeps_state = False

    def __init__(
        self,
        synchronisation: Synchronisation,
        placement: Placement,
        *,
        parameters: Parameters,
        barriers: BarrierSchedule,
        share: Callable[[], float],
        transfer: Transfer,
        all_gather: AllGather,
        end_work: Callable[[], None],
        last_step: int = -1,
        worker: VirtualWorker | None = None,
    ) -> None:
        assert synchronisation.distance is not None
        self._synchronisation, self._distance = synchronisation, synchronisation.distance
        self._parameters, self._barriers, self._share = parameters, barriers, share
        self._transfer, self._all_gather, self._end_work = transfer, all_gather, end_work
        self._last_step, self._worker = last_step, worker or OneIsland()
        self._own = OwnState(synchronisation, placement, split_fragments(synchronisation, placement.specs))
        self.begin, self.wanted, self.shardings = self._own.begin, self._own.wanted, self._own.shardings
        self._param_shardings = placement.state.params
        self._last: tuple[Any, int] = (None, 0)
        self._clock, self._least_clock, self._in_wave = 0, 0, 0

    def steps_done(self, state: State) -> int:
        """Return the steps done; starts to serve parameters if the state is not the one returned last."""
        step, number = self._last
        if state.step is step:
            return number
        number = int(state.step)
        values, dtypes = flat(state.params)
        self._parameters.begin(number, values, dtypes)
        # nobody pushes before all serve
        self._all_gather("the first wave", None)
        self._clock, self._least_clock, self._in_wave = 0, 0, 0
        self._barriers.requested_step = -1
        return number

    def merge(self, state: State, number: int) -> tuple[State, Metrics]:
        """End a wave, if one ends after this step: push what was changed, and go on from what all pushed.

        Args:
          state: the state after the step.
          number: steps done.

        Returns:
          (the state after the wave, the metrics): "staleness", the steps of another island that were missing
          in the parameters of this step; at the end of a wave, on island 0, "sums": those of all waves of all
          islands that have come in since.
        """
        metrics: Metrics = {"staleness": self.staleness()}
        self._in_wave += 1
        if self._synchronisation.is_sent(0, number, self._last_step):
            state, sums = self._end_wave(state, number)
            metrics |= sums
        self._last = (state.step, number)
        return state, metrics

    def staleness(self, in_flight: int = 0) -> float:
        """Return how many steps of another virtual worker, up to the next own one, its parameters lack.

        Args:
          in_flight: own steps before that one whose updates are to come.
        """
        waves = self._clock - self._least_clock
        return float(waves * self._synchronisation.every + self._in_wave + in_flight)

    def _end_wave(self, state: State, number: int) -> tuple[State, Metrics]:
        local, barriers = state.local, self._barriers
        jax.block_until_ready(local)
        self._end_work()
        drift, _ = flat(local.drift)
        drift *= np.float32(self._share())
        sums, structure = jax.tree.flatten(jax.device_get(local.sums))
        clock, is_due = self._clock + 1, barriers.is_due(number)
        push = Push(
            step=number,
            least=clock if is_due else clock - self._distance,
            requests_barrier=self._worker.any_requests_barrier(barriers.is_requested),
            totals=np.array(sums, np.float64),
            update=drift,
            at_barrier=is_due,
        )
        answer = self._parameters.push(push)
        barrier = self._worker.find_barrier(answer.barrier)
        if barrier == clock and not is_due:
            # another island requested a barrier here: wait for the waves of all
            is_due, totals = True, answer.totals
            again = push._replace(
                least=clock,
                requests_barrier=False,
                totals=np.zeros_like(totals),
                update=None,
                at_barrier=True,
            )
            answer = self._parameters.push(again)
            answer = answer._replace(totals=answer.totals + totals)
        if barrier >= clock:
            barriers.requested_step = number + (barrier - clock) * self._synchronisation.every
        self._clock, self._least_clock, self._in_wave = clock, min(answer.clocks), 0
        self._transfer.num_bytes += self._parameters.take_bytes()
        params = jax.device_put(unflat(answer.values, state.params), self._param_shardings)
        state = state._replace(params=params, local=_next_wave(local, is_due))
        if is_due:
            model_state = average_model_state(self._transfer, local.model_state, local.count[0])
            own = jax.tree.map(jnp.copy, model_state)
            state = state._replace(model_state=model_state, local=state.local._replace(model_state=own))
        found = jax.tree.unflatten(structure, list(answer.totals.astype(np.float32)))
        return state, {"sums": found}

    def close(self) -> None:
        """End the thread that serves parameters."""
        self._parameters.close()


def flat(tree: Any) -> tuple[np.ndarray, list[tuple[slice, Any]]]:
    """Return the arrays of a tree one after the other, as float32 (n,), and which parts have fewer bits.

    >>> values, dtypes = flat({"a": jnp.ones((2, 2)), "b": jnp.zeros(1, jnp.bfloat16)})
    >>> values.tolist(), [(part, str(dtype)) for part, dtype in dtypes]
    ([1.0, 1.0, 1.0, 1.0, 0.0], [(slice(4, 5, None), 'bfloat16')])
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = [
        (slice(int(end) - leaf.size, int(end)), leaf.dtype)
        for leaf, end in zip(leaves, ends, strict=True)
        if leaf.dtype != np.float32
    ]
    return np.concatenate([leaf.ravel().astype(np.float32) for leaf in leaves]), parts


def unflat(values: np.ndarray, like: Any) -> Any:
    """Return the arrays of `flat` with the structure, shapes and dtypes of a tree."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(values, np.cumsum([leaf.size for leaf in leaves])[:-1])
    arrays = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, arrays)


def _next_wave(local: Local, is_due: bool) -> Local:
    """Return the `Local` of an island that has changed nothing since its parameters came."""
    drift, sums = jax.tree.map(jnp.zeros_like, (local.drift, local.sums))
    # the examples since the last barrier weigh the model's state
    count = jnp.zeros_like(local.count) if is_due else local.count
    return local._replace(drift=drift, sums=sums, count=count)
