"""What one pipeline stage across islands computes in a step, with other pipelines as replicas.

All stages execute the same table, replicas combine gradients or deltas stage by stage, and every stage
updates the parameters that it owns. The logged losses and gradient norm are over all stages. Next:
`stage_programs.py`, the compiled computations; `stage_links.py`, the other islands.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine import mean
from shardtrain.combine.fragments import group_by_path
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.loss import Batch
from shardtrain.functional.model import Tree, path_text
from shardtrain.functional.rng import evaluation_key, step_key
from shardtrain.pipeline.flow import Flow, Value
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.pipeline.table import Table, Task
from shardtrain.sharding.array_dims import NamedArray, is_dims
from shardtrain.sharding.resolve import complete_layout
from shardtrain.sharding.specs import partition_specs
from shardtrain.train_step.island_combiner import Channel
from shardtrain.train_step.placement import Placement, find_own_shardings
from shardtrain.train_step.stage_functions import StageFunctions
from shardtrain.train_step.stage_links import OwnerCombiners, StageLinks, StageSums, gather_losses, sum_losses
from shardtrain.train_step.stage_programs import (
    Arrays,
    CompileTurns,
    StagePrograms,
    StageUpdate,
    make_gradient_programs,
    make_stage_own_update,
    make_update,
)
from shardtrain.train_step.state import Metrics, State
from shardtrain.train_step.update import find_sum_shapes

if TYPE_CHECKING:
    from shardtrain.islands.mailbox import Mailbox  # importing it starts MPI


class StageTables(NamedTuple):
    """The tasks of all stages, as tables, and the values between them.

    Args:
      flow: the values between all parts, for the rows of this pipeline's microbatches.
      table: the tasks of a step; not in lock-step.
      evaluation_table: the tasks of an evaluation, which are forwards.
    """

    flow: Flow
    table: Table
    evaluation_table: Table


Direction = Literal["activations", "cotangents"]


class _Message(NamedTuple):
    """An array sent between two parts: a value to a part that reads it, or the cotangent from that part."""

    direction: Direction
    value: Value
    reader: int
    microbatch: int

    @property
    def sender(self) -> int:
        """The part that computes the array."""
        return self.value.part if self.direction == "activations" else self.reader

    @property
    def receiver(self) -> int:
        """The part that needs the array."""
        return self.reader if self.direction == "activations" else self.value.part


class StageExecutor:
    """Executes the tasks of one stage.

    Args:
      table: the tasks of all stages; not in lock-step.
      flow: the values between the parts of the model.
      mailbox: to the other stages.
    """

    def __init__(self, table: Table, flow: Flow, mailbox: "Mailbox") -> None:
        self._table, self._flow, self._mailbox = table, flow, mailbox
        self._order = table.order(mailbox.stage)
        self._values = sorted(flow.shapes)
        # arrays between two parts that are both on this stage
        self._local: dict[_Message, Any] = {}
        # (part, microbatch) -> the inputs of its forward, which its backward reads again
        self._inputs: dict[tuple[int, int], Arrays] = {}

    def run(self, programs: StagePrograms, kind: str | None = None) -> None:
        """Run the tasks of a step.

        Args:
          programs: the computations.
          kind: the kind of the tasks to run; None runs all kinds.
        """
        for task in self._order:
            if kind is not None and task.kind != kind:
                continue
            part = self._table.part(task)
            # the only wait: all stages follow the same table, so what a task needs is sent before it
            arrived = self._receive_all(programs, task, part)
            if task.kind == "weight":
                programs.weight(part, task.microbatch)
            else:
                run = self._forward if task.kind == "forward" else self._backward
                run(programs, part, task.microbatch, arrived)
        # whatever is left was computed for a task that the table does not have
        assert kind == "forward" or not self._local
        assert kind == "forward" or not self._inputs

    def _receive_all(self, programs: StagePrograms, task: Task, part: int) -> Arrays:
        """Wait for the arrays of other parts that a task needs, and return them by value."""
        flow, m = self._flow, task.microbatch
        if task.kind == "forward":
            return {
                value: self._receive(programs, _Message("activations", value, part, m))
                for value in flow.reads[part]
            }
        if task.kind == "weight":
            return {}  # its backward has kept what it needs
        cotangents = {}
        for value in filter(flow.has_cotangent, flow.writes[part]):
            # several parts may have read the value: their cotangents of it are added up
            found = [
                self._receive(programs, _Message("cotangents", value, reader, m))
                for reader in flow.readers(value)
            ]
            cotangents[value] = found[0] if len(found) == 1 else programs.add(found)
        return cotangents

    def _forward(self, programs: StagePrograms, part: int, microbatch: int, inputs: Arrays) -> None:
        outputs = programs.forward(part, microbatch, inputs)
        for value in self._flow.writes[part]:
            # straight to every part that reads it, also across several stages
            for reader in self._flow.readers(value):
                self._send(outputs[value], _Message("activations", value, reader, microbatch))
        if "backward" in self._table.kinds:
            self._inputs[part, microbatch] = inputs

    def _backward(self, programs: StagePrograms, part: int, microbatch: int, cotangents: Arrays) -> None:
        inputs = self._inputs.pop((part, microbatch))
        found = programs.backward(part, microbatch, inputs, cotangents)
        for value in filter(self._flow.has_cotangent, inputs):
            self._send(found[value], _Message("cotangents", value, part, microbatch))

    def _send(self, array: Any, message: _Message) -> None:
        """Send an array to the stage of its receiver; keep it here if that is this stage."""
        stage = self._table.part_placement.stage(message.receiver)
        if stage == self._mailbox.stage:
            self._local[message] = array
        else:
            self._mailbox.send(array, stage, self._tag(message))

    def _receive(self, programs: StagePrograms, message: _Message) -> Any:
        """Receive the array that `_send` sent to this stage, or kept here."""
        stage = self._table.part_placement.stage(message.sender)
        if stage == self._mailbox.stage:
            return self._local.pop(message)
        shape = self._flow.shapes[message.value]
        what = f"{message.direction} of microbatch {message.microbatch} from part {message.sender}"
        array = self._mailbox.receive(shape.shape, shape.dtype, stage, self._tag(message), what)
        return programs.to_devices(array)

    def _tag(self, message: _Message) -> int:
        """Return the MPI tag of a message; no two messages of a step have the same."""
        _, value, reader, microbatch = message
        of_value = self._values.index(value) * self._table.num_parts + reader
        of_direction = of_value * 2 + (message.direction == "cotangents")
        return of_direction * self._table.num_microbatches + microbatch


class StageCompute:
    """What one stage computes.

    Args:
      stage_model: the parts of the model on this stage.
      tasks: the tasks of all stages, see `StageTables`.
      training: how the stage updates its parameters, see `StageUpdate`.
      placement: the placement of the stage's own parameters on this island.
      links: the connections to other islands.
      synchronisation: how pipelines are synchronised, stage by stage.
      start_row: the first row of this pipeline in the whole batch.

    Attributes:
      exchange: the combiners of the gradients of this stage, if gradients are combined.
      start_row: as given.
    """

    def __init__(
        self,
        stage_model: StageModel,
        tasks: StageTables,
        training: StageUpdate,
        placement: Placement,
        links: StageLinks,
        synchronisation: Synchronisation = Synchronisation(),
        start_row: int = 0,
    ) -> None:
        self.stage_model, self.placement = stage_model, placement
        self.grid, self.mailbox, owners, self._all_gather, loads_programs = links
        self.channel = Channel(owners.transfers[0], links.all_gather)
        self._last_stage = stage_model.stages.part_placement.last_stage
        # tags of sums and of borrowed parameters follow those of all values
        self._flow, table, evaluation_table = tasks
        num_microbatches = max(table.num_microbatches, evaluation_table.num_microbatches)
        first_tag = 2 * (len(self._flow.shapes) + 1) * table.num_parts * num_microbatches
        self.sums = StageSums(self.grid, self.mailbox, first_tag)
        self.borrowed = BorrowedParameters(stage_model, placement, self.mailbox, first_tag + 1)
        # training has dropout and backward tasks, evaluation forward tasks only: different programs
        functions = partial(StageFunctions, stage_model, self._flow, placement, self.borrowed.specs)
        self.start_row = start_row
        self.programs = StagePrograms(functions(train=True))
        self._evaluation_programs = StagePrograms(functions(train=False))
        self.turns = CompileTurns(links.all_gather, self.grid.num_replicas, loads_programs)
        self.follow(table)
        self._evaluation_executor = StageExecutor(evaluation_table, self._flow, self.mailbox)
        self.gradients = make_gradient_programs(placement)
        # gradients are combined in each step, or in the first ones before deltas are
        if not synchronisation.on_deltas or synchronisation.synchronous_steps:
            combiner = mean() if synchronisation.on_deltas else synchronisation.combiner
            self.exchange = OwnerCombiners(combiner, placement, owners)
            self._update = make_update(training, placement)
        self._own_sums: Any = ()
        if synchronisation.on_deltas:
            self._own_sums = find_sum_shapes(stage_model.traced.losses[2])
            shardings = find_own_shardings(synchronisation, placement, placement.state, self._own_sums)
            shardings = shardings._replace(combine_state=())
            self.own_params, self.own_update = make_stage_own_update(training, placement, shardings)

    def find_sum_shapes(self, state: State, batch: Batch) -> Any:
        """Return the shapes of the sums over own steps; () if there are none."""
        return self._own_sums

    def step_together(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run a step that combines gradients with other pipelines."""
        return self._run(state, batch)

    def step_alone(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run a step of this pipeline's own optimizer."""
        return self._run(state, batch, is_local=True)

    def make_executor(self) -> StageExecutor:
        """Make an executor of the tasks of a step."""
        return StageExecutor(self._table, self._flow, self.mailbox)

    def lowered(self, state: State, batch: Batch) -> list[jax.stages.Lowered]:
        """Return nothing: the programs of tasks are compiled in the first step."""
        return []

    def _run(self, state: State, batch: Batch, *, is_local: bool = False) -> tuple[State, Metrics]:
        """Run the tasks of a batch and an update of this pipeline's own parameters, or of the common ones."""
        grid = self.grid
        # 1. the tasks of all microbatches, which exchange activations and cotangents with the other stages
        own, own_state = state.params, state.model_state
        if is_local:
            own, own_state = self.own_params(state), state.local.model_state
        grads, loss_sums = self._run_tasks(state, own, own_state, batch, self.start_row)
        # 2. gradients of this island's replicas, and of stages that borrowed; the last stage knows the count
        if is_local:
            totals = jax.tree.map(np.float32, self.sums.add("losses", self.own_losses(loss_sums)))
            count = totals["count"]
        else:
            losses = gather_losses("losses", loss_sums, grid, self._last_stage, self._all_gather)
            count, totals = np.float32(losses[grid.replica]["count"]), sum_losses(losses)
        grads = self.gradients.scaled(grads, self.borrowed.receive_gradients(), count)
        model_state = self._merge_state(self.programs.model_state, batch)
        # 3. an update of this pipeline's own
        if is_local:
            squares = np.float32(self.sums.add("gradient norms", float(self.gradients.squares(grads))))
            return self.turns.call("own update", self.own_update, state, grads, model_state, totals, squares)
        # 4. or gradients combined with the owners of the same blocks in all pipelines, and one update
        combine_state, combine_metrics = state.combine_state, []
        if grid.num_replicas > 1:
            found = self.exchange.combine(grads, combine_state, count, model_state)
            grads, combine_state, combine_metrics, model_state = found
        return self._update_by(state, grads, model_state, totals, combine_state, combine_metrics)

    def _run_tasks(
        self, state: State, params: Tree, model_state: Tree, batch: Batch, first_row: int
    ) -> tuple[Tree, Any]:
        """Run the tasks of a batch, and return the sums of the stage's own gradients and of losses."""
        params = self.borrowed.exchange(params)
        key = step_key(state.seed, state.step)
        self.programs.begin(params, model_state, key, batch, first_row, self._table.has_weight)
        self.turns.once("training tasks", self.programs.compile)
        self._train_executor.run(self.programs)
        grads, borrowed, loss_sums = self.gradients.reduced(self.programs.take_sums())
        self.borrowed.return_gradients(borrowed)
        return grads, loss_sums

    def sum_gradients(self, state: State, batch: Batch, first_row: int) -> dict[str, Any]:
        """Return the sums over the rows of a batch: "grads" of this stage, and losses, 0 but on the last one.

        Args:
          state: without a model state.
          batch: every array (M, rows, ...) on the mesh.
          first_row: the number of its first row in the whole batch.
        """
        grads, loss_sums = self._run_tasks(state, state.params, state.model_state, batch, first_row)
        grads = self.gradients.scaled(grads, self.borrowed.receive_gradients(), np.float32(1))
        return {"grads": grads, "losses": jax.tree.map(np.float32, self.own_losses(loss_sums))}

    def update_by_sums(self, state: State, total: Mapping[str, Any]) -> tuple[State, Metrics]:
        """Update this stage, given the sum of `sum_gradients` over a whole batch; all stages call it."""
        losses = gather_losses("losses", total["losses"], self.grid, self._last_stage, self._all_gather)
        totals = sum_losses(losses)
        grads = self.gradients.scaled(total["grads"], [], totals["count"])
        return self._update_by(state, grads, state.model_state, totals, state.combine_state, [])

    def _update_by(
        self,
        state: State,
        grads: Tree,
        model_state: Tree,
        totals: Any,
        combine_state: Any,
        combine_metrics: Any,
    ) -> tuple[State, Metrics]:
        # a combined gradient is the same in all pipelines, but those that are cut differently round its sum
        # over stages differently: so all take the sum of the first pipeline
        squares = self._all_gather("gradient norms", float(self.gradients.squares(grads)))
        norm = np.float32(np.sum(self.grid.select_replica(squares, 0)))
        found = model_state, totals, norm, combine_state, combine_metrics
        return self.turns.call("update", self._update, state, grads, *found)

    def follow(self, table: Table) -> None:
        """Execute another table from now on, of the same parts and microbatches."""
        assert table.part_placement == self.stage_model.stages.part_placement
        self._table = table
        self._train_executor = self.make_executor()

    def evaluate(self, state: State, batch: Batch, number: int = 0, first_row: int = 0) -> Metrics:
        """Return what `make_evaluate` does, over all pipelines; each knows the number of its first row."""
        programs = self._evaluation_programs
        params = self.borrowed.exchange(state.params)
        programs.begin(params, state.model_state, evaluation_key(number), batch, self.start_row)
        self.turns.once("evaluation tasks", programs.compile)
        self._evaluation_executor.run(programs)
        own = self.gradients.loss_sums(programs.take_sums())
        found = gather_losses("held-out losses", own, self.grid, self._last_stage, self._all_gather)
        totals = sum_losses(found)
        return {**totals.pop("metrics"), **totals}

    def close(self) -> None:
        """End the threads of the mailbox."""
        self.mailbox.close()

    def own_losses(self, loss_sums: dict[str, Any]) -> dict[str, Any]:
        """Return the loss sums of the last stage on the host; zeros on all other stages."""
        if self.grid.stage == self._last_stage:
            return jax.device_get(loss_sums)
        losses = {"loss_sum": 0, "count": 0, "metrics": self.stage_model.traced.losses[2]}
        return jax.tree.map(lambda _: 0.0, losses)

    def _merge_state(self, model_state: Tree, batch: Batch) -> Tree:
        """Average the model state over this island's own replicas, weighted by their numbers of real rows."""
        if not jax.tree.leaves(model_state):
            return model_state
        rows = batch["weights"]
        real = rows.reshape(len(rows), self.programs.num_replicas, -1).sum((0, 2))
        weights = jnp.where(real.sum() > 0, real / real.sum(), 1 / len(real))
        return self.gradients.merged_state(model_state, weights)


class BorrowedParameters:
    """The parameters that a stage borrows from other stages, and the parameters that it lends.

    Args:
      stage_model: the parts of the model on this stage.
      placement: the placement of the stage's own parameters on this island.
      mailbox: to the other stages of this pipeline.
      first_tag: MPI tags from here on are free.
    """

    def __init__(
        self, stage_model: StageModel, placement: Placement, mailbox: "Mailbox", first_tag: int
    ) -> None:
        self._stage_model, self._mailbox, self._first_tag = stage_model, mailbox, first_tag
        self._mesh = placement.mesh
        self.specs = _find_borrowed_specs(stage_model, placement)
        self._shapes = group_by_path(stage_model.traced.params)

    def exchange(self, params: Tree) -> Tree:
        """Send lent parameters, and return the stage's own and borrowed parameters."""
        found = group_by_path(params)
        for path, stages in self._stage_model.lent.items():
            for stage in stages:
                self._mailbox.send(found[path], stage, self._tag(path))
        for path, owner in self._stage_model.borrowed.items():
            shape = self._shapes[path]
            what = f"parameter {path} from stage {owner}"
            array = self._mailbox.receive(shape.shape, shape.dtype, owner, self._tag(path), what)
            found[path] = jax.device_put(array, NamedSharding(self._mesh, self.specs[path]))
        return unflatten_dict(found, sep="/")

    def return_gradients(self, grads: Mapping[str, jax.Array]) -> None:
        """Send the gradients of borrowed parameters, by path, to their owners."""
        for path, owner in self._stage_model.borrowed.items():
            self._mailbox.send(grads[path], owner, self._tag(path))

    def receive_gradients(self) -> list[dict[str, np.ndarray]]:
        """Receive the gradients of lent parameters: path -> gradient, one dict for each borrower."""
        found = []
        for path, stages in self._stage_model.lent.items():
            for stage in stages:
                what = f"gradient of {path} from stage {stage}"
                shape = self._shapes[path].shape
                grad = self._mailbox.receive(shape, np.float32, stage, self._tag(path), what)
                found.append({path: grad})
        return found

    def _tag(self, path: str) -> int:
        return self._first_tag + sorted(self._stage_model.users).index(path)


def _find_borrowed_specs(stage_model: StageModel, placement: Placement) -> dict[str, PartitionSpec]:
    """Return the specs that borrowed parameters would have if this stage owned them."""
    whole, dims = group_by_path(stage_model.traced.params), stage_model.model.dims
    names = {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(dims, is_leaf=is_dims)}
    arrays = {path: NamedArray(dims=names[path], shape=whole[path].shape) for path in stage_model.borrowed}
    sizes = dict(placement.mesh.shape)
    layout = complete_layout(placement.layout, arrays, sizes)
    like = {path: whole[path] for path in arrays}
    return partition_specs(dict(sorted(arrays.items())), like, layout.parameter_rules, sizes, layout.unnamed)
