"""The training step of one pipeline stage across islands, with other pipelines as replicas.

All stages execute the same table, replicas combine gradients or deltas stage by stage, and every stage
updates the parameters that it owns. Losses and the gradient's norm are those of all stages. Next:
`stage_executor.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardtrain.combine import mean
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.loss import Batch
from shardtrain.functional.model import Tree
from shardtrain.functional.rng import evaluation_key, step_key
from shardtrain.islands.transfer import Transfer
from shardtrain.pipeline.flow import Flow
from shardtrain.pipeline.in_flight import forwards_ahead
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.pipeline.table import Table
from shardtrain.train_step.barrier_schedule import BarrierSchedule
from shardtrain.train_step.borrowed_parameters import BorrowedParameters
from shardtrain.train_step.compile_turns import CompileTurns
from shardtrain.train_step.island_merge import AllGather, IslandMerge
from shardtrain.train_step.island_totals import add_island_sums, shapes_of_sums
from shardtrain.train_step.own_state import drop_local_fields, restore_local_fields
from shardtrain.train_step.owner_transfers import OwnerCombiners, OwnerTransfers
from shardtrain.train_step.pipeline_grid import PipelineGrid
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.stage_executor import Observe, StageExecutor
from shardtrain.train_step.stage_functions import StageFunctions
from shardtrain.train_step.stage_programs import StagePrograms
from shardtrain.train_step.stage_sums import StagesInFlight, StagesInStep, gather_losses, sum_losses
from shardtrain.train_step.stage_update import make_gradient_programs, make_own_update, make_update
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics
from shardtrain.train_step.unflushed_steps import UnflushedSteps
from shardtrain.train_step.wave_merge import VirtualWorker, WaveMerge

if TYPE_CHECKING:
    from shardtrain.islands.mailbox import Mailbox  # importing it starts MPI


class StageStep:
    """The step of one stage, an `island_step.IslandStep`; see there for the general step across islands.

    Args:
      stage_model: the stage's parts of the model.
      flow: the values between the parts, for the rows of this pipeline's microbatches.
      table: the tasks of all stages in a step; not of the lock-step form.
      evaluation_table: the same of an evaluation: forward tasks only.
      optimizer: of the stage's parameters; without clipping by the norm of all stages, which `clip` does.
      clip: the largest norm of the whole gradient; None does not clip.
      placement: of the stage's own parameters on this island.
      transfer: to the same stage of the other pipelines.
      grid: which island has which stage.
      mailbox: to the other stages of this pipeline.
      all_gather: gathers a value of every rank, by name.
      synchronisation: how pipelines are synchronised, stage by stage.
      learning_rate: the optimizer's schedule, to have it among the metrics.
      start_row: the first row of this pipeline in the whole batch.
      last_step, observe: see `step.make_step` and `StageExecutor`.
      in_flight, barriers: batches in the pipeline at the same time, and when it is drained of several.
      make_waves: makes what ends the waves of a synchronisation with a `distance`, for a virtual worker.
      owners: the owners of each block, where pipelines cut the model differently; None: `transfer` reaches
        those of all blocks of this stage.
      loads_programs: whether to load what the first pipeline has compiled, see `compile_turns.py`.
    """

    def __init__(
        self,
        *,
        stage_model: StageModel,
        flow: Flow,
        table: Table,
        evaluation_table: Table,
        optimizer: optax.GradientTransformation,
        clip: float | None,
        placement: Placement,
        transfer: Transfer,
        grid: PipelineGrid,
        mailbox: "Mailbox",
        all_gather: AllGather,
        synchronisation: Synchronisation = Synchronisation(),
        learning_rate: optax.Schedule | None = None,
        start_row: int = 0,
        last_step: int = -1,
        observe: Observe | None = None,
        in_flight: int = 1,
        barriers: BarrierSchedule | None = None,
        make_waves: Callable[[VirtualWorker], WaveMerge] | None = None,
        owners: OwnerTransfers | None = None,
        loads_programs: bool = False,
    ) -> None:
        self.stage_model, self.placement, self.grid, self.mailbox = stage_model, placement, grid, mailbox
        self._all_gather, self._last_stage = all_gather, stage_model.stages.part_placement.last_stage
        # tags of sums and of borrowed parameters follow those of all values
        first_tag = 2 * (len(flow.shapes) + 1) * table.num_parts * table.num_microbatches
        sums_of = StagesInStep if in_flight == 1 else StagesInFlight
        self._stage_sums = stages = sums_of(grid, mailbox, first_tag)
        self._borrowed = BorrowedParameters(stage_model, placement, mailbox, first_tag + 1)
        # training has dropout and backward tasks, evaluation forward tasks only: different programs
        functions = partial(StageFunctions, stage_model, flow, placement, self._borrowed.specs, start_row)
        self._train_programs = StagePrograms(functions(train=True))
        self._evaluation_programs = StagePrograms(functions(train=False))
        self._flow, self._observe = flow, observe
        self._turns = CompileTurns(all_gather, grid.num_replicas, loads_programs)
        self.follow(table)
        self._evaluation_executor = StageExecutor(evaluation_table, flow, mailbox)
        # gradients are combined in each step or in the first ones, then what pipelines changed in some
        self._merge: IslandMerge | WaveMerge | None = None
        self._synchronous_steps = synchronisation.synchronous_steps
        if not synchronisation.on_deltas or self._synchronous_steps:
            combiner = mean() if synchronisation.on_deltas else synchronisation.combiner
            owners = owners or OwnerTransfers.make_stage_transfers(stage_model, transfer)
            self._combiners = OwnerCombiners(combiner, placement, owners)
        if synchronisation.on_deltas:
            if make_waves is None:
                merge = IslandMerge(synchronisation, placement, transfer, all_gather, last_step)
            else:
                merge = make_waves(stages)
            self._update_alone(merge, optimizer, clip, learning_rate)
        exchange = self._merge or self._combiners
        self.labels, self.keeps_state = exchange.labels, exchange.keeps_state
        # one program for each stretch between two messages, in the order of `__call__`
        self._gradient_programs = make_gradient_programs(placement)
        self._update = make_update(optimizer, clip, placement, learning_rate)
        self._unflushed = self._make_unflushed(stages, table, in_flight, barriers)

    def _update_alone(
        self,
        merge: IslandMerge | WaveMerge,
        optimizer: optax.GradientTransformation,
        clip: float | None,
        learning_rate: optax.Schedule | None,
    ) -> None:
        """Let this pipeline update parameters of its own, which are merged with those of the others."""
        self._merge, self._sums = merge, shapes_of_sums(self.stage_model.traced.losses[2])
        shardings = merge.shardings(self.placement.state, self._sums)._replace(combine_state=())
        self._own_params, self._own_update = make_own_update(
            optimizer, clip, self.placement, learning_rate, shardings
        )

    def _make_unflushed(
        self,
        stages: StagesInStep | StagesInFlight,
        table: Table,
        in_flight: int,
        barriers: BarrierSchedule | None,
    ) -> UnflushedSteps | None:
        """Make the steps of several batches in the pipeline at the same time; None where it has one."""
        if not isinstance(stages, StagesInFlight):
            return None
        assert isinstance(self._merge, WaveMerge)
        assert barriers is not None
        ahead = forwards_ahead(self.grid.num_stages, in_flight)[self.grid.stage]
        return UnflushedSteps(
            in_flight=in_flight,
            ahead=ahead,
            programs=self._train_programs,
            executors=[StageExecutor(table, self._flow, self.mailbox) for _ in range(ahead + 1)],
            borrowed=self._borrowed,
            gradient_programs=self._gradient_programs,
            own_params=self._own_params,
            own_update=self._own_update,
            merge=self._merge,
            stages=stages,
            barriers=barriers,
            no_losses=self._no_losses,
            turns=self._turns,
        )

    def begin(self, state: State, batch: Batch) -> State:
        """Return the state with what this stage needs for the exchange, see `IslandStep`."""
        if self._merge is None:
            return state._replace(combine_state=self._combiners.init())
        return self._merge.begin(state, self._sums)

    def wanted(self, state: State, batch: Batch) -> State:
        """Return the shapes of what `begin` returns, see `IslandStep`."""
        if self._merge is None:
            return state._replace(combine_state=self._combiners.wanted())
        return self._merge.wanted(state, self._sums)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""
        if self._merge is None:
            return self._run(state, batch)
        # the combiner's state is no part of the local update's program
        combine_state, state = state.combine_state, state._replace(combine_state=())
        if self._unflushed is not None:
            state, metrics = self._unflushed(state, batch)
            return state._replace(combine_state=combine_state), metrics
        number = self._merge.steps_done(state) + 1
        is_local = number > self._synchronous_steps
        if is_local:
            new, metrics = self._run(state, batch, is_local=True)
        else:
            # a mean keeps no arrays, so the shapes of its state are its state
            new, metrics = self._run(drop_local_fields(state, self._combiners.wanted()), batch)
            new = restore_local_fields(new, state)
        # at the end of some steps a merge with the other pipelines
        new, found = self._merge.merge(new._replace(combine_state=combine_state), number)
        zeros = jax.tree.map(jnp.zeros_like, new.local.sums)
        return new, add_island_sums(metrics, found, zeros) if is_local else metrics

    def _run(self, state: State, batch: Batch, *, is_local: bool = False) -> tuple[State, Metrics]:
        """Run the tasks of a batch and an update: of this pipeline's own parameters, or common to all."""
        programs, grid = self._train_programs, self.grid
        # 1. the tasks of all microbatches, which exchange activations and cotangents with the other stages
        own, own_state = state.params, state.model_state
        if is_local:
            own, own_state = self._own_params(state), state.local.model_state
        params = self._borrowed.exchange(own)
        key = step_key(state.seed, state.step)
        programs.begin(params, own_state, key, batch, self._table.has_weight)
        self._turns.once("training tasks", programs.compile)
        self._train_executor.run(programs)
        # 2. gradients of this island's replicas, and of stages that borrowed; the last stage knows the count
        grads, borrowed, loss_sums = self._gradient_programs.reduced(programs.take_sums())
        self._borrowed.return_gradients(borrowed)
        count, totals = self._losses(loss_sums, is_local)
        grads = self._gradient_programs.scaled(grads, self._borrowed.receive_gradients(), count)
        model_state = self._merge_state(programs.model_state, batch)
        # 3. an update of this pipeline's own
        if is_local:
            squares = self._stage_sums.add("gradient norms", float(self._gradient_programs.squares(grads)))
            sums = totals, np.float32(squares), count
            return self._turns.call("own update", self._own_update, state, grads, model_state, *sums)
        # 4. or gradients combined with the owners of the same blocks in all pipelines, and one update
        combine_state, combine_metrics = state.combine_state, []
        if grid.num_replicas > 1:
            found = self._combiners.combine(grads, combine_state, count, model_state)
            grads, combine_state, combine_metrics, model_state = found
        squares = self._gather_squares(grads)
        found = model_state, totals, squares, combine_state, combine_metrics
        return self._turns.call("update", self._update, state, grads, *found)

    def follow(self, table: Table) -> None:
        """Execute another table from now on, of the same parts and microbatches."""
        assert table.part_placement == self.stage_model.stages.part_placement
        self._table = table
        self._train_executor = StageExecutor(table, self._flow, self.mailbox, self._observe)

    def evaluate(self, state: State, batch: Batch, number: int = 0, first_row: int = 0) -> Metrics:
        """Return what `make_evaluate` does, over all pipelines; each knows the number of its first row."""
        # the tasks are forwards alone; the last stages then hold the sums of the loss
        programs = self._evaluation_programs
        params = self._borrowed.exchange(state.params)
        programs.begin(params, state.model_state, evaluation_key(number), batch)
        self._turns.once("evaluation tasks", programs.compile)
        self._evaluation_executor.run(programs)
        own = self._gradient_programs.loss_sums(programs.take_sums())
        found = gather_losses("held-out losses", own, self.grid, self._last_stage, self._all_gather)
        totals = sum_losses(found)
        return {**totals.pop("metrics"), **totals}

    def close(self) -> None:
        """End the mailbox's thread, and what the merge keeps open."""
        if self._merge:
            self._merge.close()
        self.mailbox.close()

    def _losses(self, loss_sums: dict[str, Any], is_local: bool) -> tuple[np.float32, dict[str, Any]]:
        """Return (the count of this pipeline, sums of the loss): its own, or those of all by gradients."""
        if not is_local:
            losses = gather_losses("losses", loss_sums, self.grid, self._last_stage, self._all_gather)
            return np.float32(losses[self.grid.replica]["count"]), sum_losses(losses)
        own = jax.device_get(loss_sums) if self.grid.stage == self._last_stage else self._no_losses
        totals = jax.tree.map(np.float32, self._stage_sums.add("losses", own))
        return totals["count"], totals

    @property
    def _no_losses(self) -> dict[str, Any]:
        losses = {"loss_sum": 0, "count": 0, "metrics": self.stage_model.traced.losses[2]}
        return jax.tree.map(lambda _: 0.0, losses)

    def _gather_squares(self, grads: Tree) -> np.float32:
        """Return the square of the norm of the gradient of all stages.

        A combined gradient is the same in all pipelines, but its sum over stages that were cut otherwise is
        rounded otherwise: so all take that of the first pipeline.
        """
        squares = self._all_gather("gradient norms", float(self._gradient_programs.squares(grads)))
        return np.float32(np.sum(self.grid.select_replica(squares, 0)))

    def _merge_state(self, model_state: Tree, batch: Batch) -> Tree:
        """Average the model state over this island's own replicas, weighted by their numbers of real rows."""
        if not jax.tree.leaves(model_state):
            return model_state
        rows = batch["weights"]
        real = rows.reshape(len(rows), self._train_programs.num_replicas, -1).sum((0, 2))
        weights = jnp.where(real.sum() > 0, real / real.sum(), 1 / len(real))
        return self._gradient_programs.merged_state(model_state, weights)
