"""Push the delta of an island after a wave (several steps), and continue from all deltas pushed so far.

Wave-synchronous parallelism (HetPipe, Park et al. 2020): the parameters are the initial ones plus all pushed
updates, each weighted by its island's share of the rows; an island continues while no other is more than
`distance` waves behind. Next: `islands/parameter_server.py`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.loss import Batch
from shardtrain.functional.model import Tree
from shardtrain.functional.rng import step_key
from shardtrain.islands.parameter_shard import Push
from shardtrain.pipeline.in_flight import count_forwards_ahead
from shardtrain.train_step.island_combiner import average_model_state
from shardtrain.train_step.island_compute import IslandCompute
from shardtrain.train_step.stage_compute import StageCompute, StageExecutor
from shardtrain.train_step.stage_links import StageSums
from shardtrain.train_step.stage_programs import StagePrograms
from shardtrain.train_step.state import Metrics, State, split_fragments
from shardtrain.train_step.sync.island_step import Merge
from shardtrain.train_step.update import add_island_sums

if TYPE_CHECKING:
    from shardtrain.islands.parameter_server import ParameterServer  # importing it starts MPI


class BarrierSchedule:
    """The steps after which islands synchronise to vote, save, evaluate or stop.

    Every merge and every average of gradients is a barrier. Waves have a barrier only if all islands must do
    something, or if one of them requests it.

    Args:
      synchronisation: how islands are synchronised.
      last_step: the last step of the run.
      saves_every: steps between saves; None if saves are not planned by steps.
      others_every: steps between other actions of all islands, such as evaluations.

    Attributes:
      is_requested: whether this island requests a barrier as soon as possible.
      requested_step: the step of a requested barrier; -1 if none was requested.
      replayed: the steps of the barriers of an earlier run that is replayed.

    >>> waves = Synchronisation(on="deltas", every=4, distance=2)
    >>> barriers = BarrierSchedule(waves, last_step=30, saves_every=10)
    >>> [step for step in range(1, 31) if barriers.is_due(step)]
    [12, 20, 30]
    >>> barriers.requested_step = 16
    >>> barriers.is_due(16)
    True
    """

    def __init__(
        self,
        synchronisation: Synchronisation,
        last_step: int,
        saves_every: int | None = None,
        others_every: Sequence[int] = (),
    ) -> None:
        self._synchronisation, self._last_step = synchronisation, last_step
        self._saves_every, self._others_every = saves_every, tuple(others_every)
        self.is_requested, self.requested_step = False, -1
        self.replayed: frozenset[int] = frozenset()

    def is_due(self, step: int) -> bool:
        """Return whether there is a barrier after a step, requested or known from the beginning."""
        every, saves_every = self._synchronisation.every, self._saves_every
        is_synchronous = self._synchronisation.is_synchronous(step)
        if step in (self._last_step, self.requested_step, *self.replayed) or is_synchronous:
            return True
        if self._synchronisation.distance is None:
            return step % every == 0 or (saves_every is not None and step % saves_every == 0)
        # at the end of a wave in which something becomes due
        periods = [saves_every, *self._others_every]
        return step % every == 0 and any(step // n > (step - every) // n for n in periods if n)


class WaveWorker(NamedTuple):
    """What a virtual worker of waves is connected to.

    Args:
      parameters: serves the parameters to which all islands push.
      barriers: says after which waves all islands wait for each other, and have equal parameters.
      share: returns the fraction of the rows of a batch that this island has.
      end_work: called when the own work of a wave is done.
      stages: the sums over the stages of this island's pipeline; None if this island has the whole model.
    """

    parameters: "ParameterServer"
    barriers: BarrierSchedule
    share: Callable[[], float]
    end_work: Callable[[], None]
    stages: StageSums | None = None


class Waves(Merge):
    """Islands that push what they changed at the end of each wave, and do not wait for each other's steps.

    Where islands are stages of pipelines, each stage merges its own parameters with the same stage of the
    other pipelines. All stages of a pipeline have barriers after the same wave.

    Args:
      compute: what this island computes, which is one process.
      synchronisation: how many steps a wave has, and how many waves an island may be ahead.
      worker: what this island is connected to.
      last_step: the last step of the run, which ends the last wave.
    """

    def __init__(
        self,
        compute: IslandCompute | StageCompute,
        synchronisation: Synchronisation,
        worker: WaveWorker,
        last_step: int = -1,
    ) -> None:
        assert synchronisation.distance is not None
        fragments = split_fragments(synchronisation, compute.placement.specs)
        super().__init__(compute, synchronisation, fragments)
        self._distance, self._channel, self._last_step = synchronisation.distance, compute.channel, last_step
        self.worker, self._parameters = worker, worker.parameters
        self._clock, self._least_clock, self._in_wave = 0, 0, 0

    def _restart(self, state: State, number: int) -> None:
        values, dtypes = concatenate_arrays(state.params)
        self._parameters.begin(number, values, dtypes)
        # nobody pushes before all serve
        self._channel.all_gather("the first wave", None)
        self._clock, self._least_clock, self._in_wave = 0, 0, 0
        self.worker.barriers.requested_step = -1

    def merge(self, state: State, number: int) -> tuple[State, Metrics]:
        """End a wave, if one ends after this step: push what was changed, and receive what all pushed.

        The metrics are "staleness", the steps of another island that the parameters of this step lack; and at
        the end of a wave, on island 0, "sums" over all waves that have arrived since. See `Merge.merge`.
        """
        metrics: Metrics = {"staleness": self.staleness()}
        self._in_wave += 1
        if self._synchronisation.is_sent(0, number, self._last_step):
            state, sums = self._end_wave(state, number)
            metrics |= sums
        self._last = (state.step, number)
        return state, metrics

    def staleness(self, in_flight: int = 0) -> float:
        """Return how many steps of another virtual worker the parameters of the next step lack.

        Args:
          in_flight: own earlier steps whose updates have not been made yet.
        """
        waves = self._clock - self._least_clock
        return float(waves * self._synchronisation.every + self._in_wave + in_flight)

    def _end_wave(self, state: State, number: int) -> tuple[State, Metrics]:
        local, barriers, stages = state.local, self.worker.barriers, self.worker.stages
        jax.block_until_ready(local)
        self.worker.end_work()
        drift, _ = concatenate_arrays(local.drift)
        drift *= np.float32(self.worker.share())
        sums, structure = jax.tree.flatten(jax.device_get(local.sums))
        clock, is_due, requests_barrier = self._clock + 1, barriers.is_due(number), barriers.is_requested
        if stages is not None and (found := stages.requests_barrier) is not None:
            requests_barrier = found
        elif stages is not None:
            requests_barrier = stages.add("the request of a barrier", float(requests_barrier)) > 0
        push = Push(
            step=number,
            least=clock if is_due else clock - self._distance,
            requests_barrier=requests_barrier,
            totals=np.array(sums, np.float64),
            update=drift,
            at_barrier=is_due,
        )
        answer = self._parameters.push(push)
        # the first stage's answer is that of all
        barrier = answer.barrier
        if stages is not None:
            barrier = int(stages.send_down("the next barrier", float(barrier)))
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
        self._channel.transfer.num_bytes += self._parameters.take_bytes()
        params = jax.device_put(
            split_arrays(answer.values, state.params), self.compute.placement.state.params
        )
        new, sums = jax.tree.map(jnp.zeros_like, (local.drift, local.sums))
        # the examples since the last barrier weigh the model's state
        count = jnp.zeros_like(local.count) if is_due else local.count
        own_local = local._replace(drift=new, sums=sums, count=count)
        state = state._replace(params=params, local=own_local)
        if is_due:
            model_state = average_model_state(self._channel.transfer, local.model_state, local.count[0])
            own = jax.tree.map(jnp.copy, model_state)
            state = state._replace(model_state=model_state, local=state.local._replace(model_state=own))
        found = jax.tree.unflatten(structure, list(answer.totals.astype(np.float32)))
        return state, {"sums": found}

    def close(self) -> None:
        """End the thread that serves parameters, and those of this step."""
        self._parameters.close()
        super().close()


def concatenate_arrays(tree: Any) -> tuple[np.ndarray, list[tuple[slice, Any]]]:
    """Concatenate the arrays of a tree as float32 (n,); also return the slices of narrower dtypes.

    >>> values, dtypes = concatenate_arrays({"a": jnp.ones((2, 2)), "b": jnp.zeros(1, jnp.bfloat16)})
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


def split_arrays(values: np.ndarray, like: Any) -> Any:
    """Split a concatenation into arrays with the structure, shapes and dtypes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(values, np.cumsum([leaf.size for leaf in leaves])[:-1])
    arrays = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, arrays)


class PendingBackward(NamedTuple):
    """A batch whose forward is done and whose backward is not.

    Args:
      number: its step, from 1.
      programs: with the weights and the batch of its forward.
      executor: with the activations that its backward needs.
    """

    number: int
    programs: StagePrograms
    executor: StageExecutor


class PendingUpdate(NamedTuple):
    """A batch whose backward is done and whose update is not.

    Args:
      number: its step, from 1.
      grads: gradients of the mean loss.
      sums: over this stage and later ones: of the loss, of the gradient's squares, of requests of a barrier.
    """

    number: int
    grads: Tree
    sums: dict[str, Any]


class UnflushedWaves(Waves):
    """Waves of steps that overlap in a pipeline, which is drained only at barriers of all islands.

    Each batch is a step of the virtual worker's own optimizer, as in HetPipe (Park et al. 2020, section 4):
    batch n starts from the updates of all batches up to n - N, where N are in flight, on all stages alike.
    Its backward uses the weights of its forward, which are kept until then (the weight stashing of PipeDream,
    Narayanan et al. 2019, section 3.3). See `pipeline/in_flight.py`.

    Args:
      stage: what this stage computes.
      in_flight: batches between the forward of the first stage and the update.
      of_waves: the further arguments of `Waves`.
    """

    def __init__(self, stage: StageCompute, in_flight: int, *of_waves: Any) -> None:
        super().__init__(stage, *of_waves)
        self._stage, self._in_flight, self._barriers = stage, in_flight, self.worker.barriers
        stage.sums.requests_barrier = False
        self._ahead = count_forwards_ahead(stage.grid.num_stages, in_flight)[stage.grid.stage]
        # one for each batch that this stage may hold
        self._executors = [stage.make_executor() for _ in range(self._ahead + 1)]
        self._forwarded: deque[PendingBackward] = deque()
        self._done: deque[PendingUpdate] = deque()
        # the weights after the last update; None: not computed yet
        self._weights: Tree | None = None
        self._newest: tuple[Any, int] = (None, 0)
        self._updates = 0

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Start a step, and end the one that leaves the pipeline; end all at a barrier."""
        number = self._count_started(state) + 1
        found: list[Metrics] = []
        # 1. the update of the batch that has left the pipeline, which this one has to see
        if self._done and self._done[0].number <= number - self._in_flight:
            state = self._update(state, found)
        # 2. forward with the weights as they are now, and the backward of an earlier batch with its own
        staleness = self.staleness(number - 1 - self._updates)
        self._forward(state, batch, number)
        if len(self._forwarded) > self._ahead:
            self._backward()
        # 3. before a barrier nothing stays in flight
        if self._barriers.is_due(number):
            while self._forwarded:
                self._backward()
            while self._done:
                state = self._update(state, found)
        self._newest = (state.step, number)
        zeros = jax.tree.map(jnp.zeros_like, state.local.sums)
        merged: Metrics = {"staleness": staleness}
        # several waves may have ended
        if sums := [each.pop("sums") for each in found if "sums" in each]:
            merged["sums"] = jax.tree.map(lambda *x: sum(x), *sums)
        skipped = sum(each["skipped"] for each in found)
        # a step that ends no batch has no gradient norm: it updates nothing
        own = {**(found[-1] if found else {}), "skipped": skipped}
        return state, add_island_sums(own, merged, zeros)

    def _count_started(self, state: State) -> int:
        step, number = self._newest
        if state.step is step:
            return number
        # the state of another segment of the run
        assert not self._forwarded
        assert not self._done
        self._weights = None
        self._updates = self.steps_done(state)
        return self._updates

    def _forward(self, state: State, batch: Batch, number: int) -> None:
        weights = self._stage.own_params(state) if self._weights is None else self._weights
        self._weights = weights
        params = self._stage.borrowed.exchange(weights)
        key = step_key(state.seed, jnp.int32(number - 1))
        # with arrays of their own
        programs = copy(self._stage.programs)
        programs.begin(params, state.local.model_state, key, batch, self._stage.start_row)
        self._stage.turns.once("training tasks", programs.compile)
        executor = self._executors[number % len(self._executors)]
        executor.run(programs, "forward")
        self._forwarded.append(PendingBackward(number, programs, executor))

    def _backward(self) -> None:
        number, programs, executor = self._forwarded.popleft()
        executor.run(programs, "backward")
        grads, borrowed, loss_sums = self._stage.gradients.reduced(programs.take_sums())
        self._stage.borrowed.return_gradients(borrowed)
        # the losses come with the cotangents, from the last stage; the squares of the norm grow on the way
        losses = self._stage.sums.send_up(f"the losses of step {number}", self._stage.own_losses(loss_sums))
        count = np.float32(losses["count"])
        grads = self._stage.gradients.scaled(grads, self._stage.borrowed.receive_gradients(), count)
        rest = {
            "squares": float(self._stage.gradients.squares(grads)),
            "requests": float(self._barriers.is_requested),
        }
        rest = self._stage.sums.send_up(f"the gradient norm of step {number}", rest)
        self._done.append(PendingUpdate(number, grads, {"losses": losses, **rest}))

    def _update(self, state: State, metrics: list[Metrics]) -> State:
        """Update by the oldest gradient, with the sums of all stages, and merge; append the metrics."""
        number, grads, sums = self._done.popleft()
        # the first stage has the sums of all
        sums = self._stage.sums.send_down(f"the sums of step {number}", sums)
        losses = jax.tree.map(np.float32, sums["losses"])
        squares = np.float32(sums["squares"])
        state, own = self._stage.own_update(state, grads, state.local.model_state, losses, squares)
        self._updates, self._weights = number, None
        self._stage.sums.requests_barrier = sums["requests"] > 0
        state, found = self.merge(state, number)
        # the step of a requested barrier was not started yet, so that the pipeline can be drained there
        assert self._barriers.requested_step <= number or self._barriers.requested_step > self._newest[1]
        metrics.append({**own, **found})
        return state
