"""Run the steps of a stage whose pipeline holds several batches at the same time.

Each batch is a step of the virtual worker's own optimizer, as in HetPipe (Park et al. 2020, section 4): batch
n starts from the updates of all batches up to n - N, where N are in flight, on all stages alike. Its backward
uses the weights of its forward, which are kept until then (the weight stashing of PipeDream, Narayanan et al.
2019, section 3.3). Next: `pipeline/in_flight.py`, `waves.py`.
"""

from collections import deque
from copy import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.functional.loss import Batch
from shardtrain.functional.model import Tree
from shardtrain.functional.rng import step_key
from shardtrain.pipeline.in_flight import count_forwards_ahead
from shardtrain.train_step.stage_compute import StageCompute, StageExecutor
from shardtrain.train_step.stage_programs import StagePrograms
from shardtrain.train_step.state import Metrics, State
from shardtrain.train_step.sync.waves import Waves
from shardtrain.train_step.update import add_island_sums


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
    """Waves of steps that overlap; the pipeline is drained only at barriers of all islands.

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
        programs.begin(params, state.local.model_state, key, batch)
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
