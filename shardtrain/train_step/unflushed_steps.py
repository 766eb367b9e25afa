"""The steps of a stage whose pipeline is not flushed: several batches are in it at the same time.

Each batch is a step of the virtual worker's own optimizer, as in HetPipe (Park et al. 2020, section 4): batch
n starts from the updates of all batches up to n - N, where N are in flight, on all stages alike. Its backward
uses the weights of its forward, which are kept until then (the weight stashing of PipeDream, Narayanan et al.
2019, section 3.3). Next: `pipeline/in_flight.py`, `stage_sums.py`, `wave_merge.py`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.functional.loss import Batch
from shardtrain.functional.model import Tree
from shardtrain.functional.rng import step_key
from shardtrain.train_step.barrier_schedule import BarrierSchedule
from shardtrain.train_step.borrowed_parameters import BorrowedParameters
from shardtrain.train_step.compile_turns import CompileTurns
from shardtrain.train_step.island_totals import add_island_sums
from shardtrain.train_step.stage_executor import StageExecutor
from shardtrain.train_step.stage_programs import StagePrograms
from shardtrain.train_step.stage_sums import StagesInFlight
from shardtrain.train_step.stage_update import GradientPrograms
from shardtrain.train_step.state import Metrics, State
from shardtrain.train_step.wave_merge import WaveMerge


class Forwarded(NamedTuple):
    """A batch whose backward on this stage is to come.

    Args:
      number: its step, from 1.
      programs: with the weights and the batch of its forward.
      executor: with the activations that its backward needs.
    """

    number: int
    programs: StagePrograms
    executor: StageExecutor


class Done(NamedTuple):
    """A batch whose update is to come.

    Args:
      number: its step, from 1.
      grads: of the mean loss.
      sums: of this and later stages: of the loss, of the gradient's squares, and who requests a barrier.
    """

    number: int
    grads: Tree
    sums: dict[str, Any]


class UnflushedSteps:
    """Steps that overlap; between two barriers of all islands the pipeline does not run empty.

    Args:
      in_flight: batches between the forward of the first stage and the update.
      ahead: batches that forwards of this stage are ahead of its backwards.
      programs: of this stage, for training.
      executors: one for each batch that this stage may hold; all tasks of a kind are run together.
      borrowed: the parameters that stages borrow from each other.
      gradient_programs: on the sums of the tasks.
      own_params: state -> the weights of this virtual worker.
      own_update: the update of its own optimizer.
      merge: the end of waves, whose virtual worker is `stages`.
      stages: to the other stages of this pipeline.
      barriers: says after which steps the pipeline is drained.
      no_losses: sums of the loss of no batch.
      turns: when programs are compiled.
    """

    def __init__(
        self,
        *,
        in_flight: int,
        ahead: int,
        programs: StagePrograms,
        executors: Sequence[StageExecutor],
        borrowed: BorrowedParameters,
        gradient_programs: GradientPrograms,
        own_params: Callable[[State], Tree],
        own_update: Callable[..., tuple[State, Metrics]],
        merge: WaveMerge,
        stages: StagesInFlight,
        barriers: BarrierSchedule,
        no_losses: dict[str, Any],
        turns: CompileTurns,
    ) -> None:
        assert len(executors) == ahead + 1
        self._in_flight, self._ahead = in_flight, ahead
        self._programs, self._executors, self._borrowed = programs, executors, borrowed
        self._gradient_programs, self._own_params, self._own_update = (
            gradient_programs,
            own_params,
            own_update,
        )
        self._merge, self._stages, self._barriers = merge, stages, barriers
        self._no_losses, self._turns = no_losses, turns
        self._forwarded: deque[Forwarded] = deque()
        self._done: deque[Done] = deque()
        # the weights after the last update; None: not computed yet
        self._weights: Tree | None = None
        self._last: tuple[Any, int] = (None, 0)
        self._updates = 0

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Start a step, and end the one that leaves the pipeline; end all at a barrier."""
        number = self._count_started(state) + 1
        found: list[Metrics] = []
        # 1. the update of the batch that has left the pipeline, which this one has to see
        if self._done and self._done[0].number <= number - self._in_flight:
            state = self._update(state, found)
        # 2. forward with the weights as they are now, and the backward of an earlier batch with its own
        staleness = self._merge.staleness(number - 1 - self._updates)
        self._forward(state, batch, number)
        if len(self._forwarded) > self._ahead:
            self._backward()
        # 3. before a barrier nothing stays in flight
        if self._barriers.is_due(number):
            while self._forwarded:
                self._backward()
            while self._done:
                state = self._update(state, found)
        self._last = (state.step, number)
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
        step, number = self._last
        if state.step is step:
            return number
        # the state of another segment of the run
        assert not self._forwarded
        assert not self._done
        self._weights = None
        self._updates = self._merge.steps_done(state)
        return self._updates

    def _forward(self, state: State, batch: Batch, number: int) -> None:
        if self._weights is None:
            self._weights = self._own_params(state)
        params = self._borrowed.exchange(self._weights)
        key = step_key(state.seed, jnp.int32(number - 1))
        programs = self._programs.copy_for_batch(params, state.local.model_state, key, batch)
        self._turns.once("training tasks", programs.compile)
        executor = self._executors[number % len(self._executors)]
        executor.run(programs, "forward")
        self._forwarded.append(Forwarded(number, programs, executor))

    def _backward(self) -> None:
        number, programs, executor = self._forwarded.popleft()
        executor.run(programs, "backward")
        grads, borrowed, loss_sums = self._gradient_programs.reduced(programs.take_sums())
        self._borrowed.return_gradients(borrowed)
        # the losses come with the cotangents, from the last stage; the squares of the norm grow on the way
        own = jax.device_get(loss_sums) if self._stages.is_last else self._no_losses
        losses = self._stages.send_up(f"the losses of step {number}", own)
        count = np.float32(losses["count"])
        grads = self._gradient_programs.scaled(grads, self._borrowed.receive_gradients(), count)
        rest = {
            "squares": float(self._gradient_programs.squares(grads)),
            "wants": float(self._barriers.is_requested),
        }
        rest = self._stages.send_up(f"the gradient norm of step {number}", rest)
        self._done.append(Done(number, grads, {"losses": losses, **rest}))

    def _update(self, state: State, metrics: list[Metrics]) -> State:
        """Update by the oldest gradient, with the sums of all stages, and end a wave; append the metrics."""
        number, grads, sums = self._done.popleft()
        # the first stage has the sums of all
        sums = self._stages.send_down(f"the sums of step {number}", sums)
        losses = jax.tree.map(np.float32, sums["losses"])
        squares = np.float32(sums["squares"])
        state, own = self._own_update(state, grads, state.local.model_state, losses, squares, losses["count"])
        self._updates, self._weights = number, None
        self._stages.requests_barrier = sums["wants"] > 0
        state, found = self._merge.merge(state, number)
        # the step of a requested barrier was not started yet, so that the pipeline can be drained there
        assert self._barriers.requested_step <= number or self._barriers.requested_step > self._last[1]
        metrics.append({**own, **found})
        return state
