"""The functions that one pipeline stage across islands compiles: forward and backward of its parts.

All arrays have a leading dim of the island's own replicas (its data axis), as in `gradients.py`.
Next: `stage_programs.py`, which calls them task by task.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain import axes
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.float_gradients import vjp
from shardtrain.functional.loss import Batch
from shardtrain.functional.model import Tree, group_by_path, path_text
from shardtrain.functional.rng import row_key
from shardtrain.functional.sums import Sums, add_loss
from shardtrain.jaxpr.deferred_outputs import Deferred, defer
from shardtrain.pipeline.flow import Flow
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.sharding.specs import add_leading_dim
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.replica_sums import map_replicas, split_by_replica


class TaskInputs(NamedTuple):
    """The inputs of a task of a stage.

    Args:
      params: the parameters of the stage, with borrowed ones.
      model_state: the model state of the stage before the part's forward; each array (R, ...).
      key: the random key of the step.
      first_rows: uint32 (M, R), the number of each replica's first row.
      batch: every array (M, R, rows, ...).
      microbatch: int32 scalar.
      inputs: the values that the part reads, in the order of `Flow.reads`; each (R, rows, ...).
      cotangents: the cotangents of the values that it writes, in the order of `Flow.writes`.
    """

    params: Tree
    model_state: Tree
    key: jax.Array
    first_rows: jax.Array
    batch: Batch
    microbatch: Any
    inputs: Sequence[Any] = ()
    cotangents: Sequence[Any] = ()


class StageFunctions:
    """The functions that a stage compiles for each of its parts.

    Args:
      stage_model: the parts of the model on this stage.
      flow: the values between the parts of the whole model.
      placement: the placement of the stage's own parameters on this island.
      borrowed: path -> PartitionSpec of a parameter that another stage owns.
      train: whether there is dropout and backward tasks; otherwise only losses.
    """

    def __init__(
        self,
        stage_model: StageModel,
        flow: Flow,
        placement: Placement,
        borrowed: Mapping[str, PartitionSpec],
        train: bool,
    ) -> None:
        self.stage_model, self.flow, self.placement, self.train = stage_model, flow, placement, train
        layout, mesh = placement.layout, placement.mesh
        self.replica_axes = layout.replica_axes
        self.num_replicas = math.prod(mesh.shape[axis] for axis in self.replica_axes)
        self._rules = layout.rules_of_replica()
        self.rows = PartitionSpec(self.replica_axes, self._rules[axes.BATCH])
        self._borrowed = borrowed

    def compile_part(self, function: Callable[..., Any], part: int, **options: Any) -> Callable[..., Any]:
        """Compile one of the functions (part, ...) below for one part."""

        def run(*arguments: Any) -> Any:
            with activation_rules(self._rules, self.placement.mesh, *self.placement.layout.tracing):
                return function(part, *arguments)

        run.__name__ = function.__name__
        return jax.jit(run, compiler_options=self.placement.compiler_options, **options)

    # -- before the tasks of a step --

    def split_by_replica(
        self, batch: Batch, first_row: jax.Array, model_state: Tree
    ) -> tuple[Batch, jax.Array, Tree]:
        """Return the batch (M, R, rows, ...), first rows (M, R) and model state (R, ...) by replica."""
        # random keys depend on the number of a row in the whole batch, not on the pipeline
        first_rows, batch = split_by_replica(batch, first_row, self.placement)
        state = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_replicas, *x.shape)), model_state)
        return batch, first_rows, state

    def initial_sums(self, last: int, task: TaskInputs) -> Sums:
        """Return zeros for the sums of a step.

        Args:
          last: the last part of this stage.
          task: without inputs.
        """
        grads = jax.tree.map(lambda x: jnp.zeros((self.num_replicas, *x.shape), jnp.float32), task.params)
        grads = self._constrain_grads(grads) if self.train else {}
        zeros = self._shard_by_rows(jnp.zeros(self.num_replicas))
        metrics: Any = {}
        if last == self.stage_model.last_part:
            # only the loss knows which metrics it has
            values = (self.flow.shapes[value] for value in self.flow.reads[last])
            inputs = [
                jax.ShapeDtypeStruct(
                    (self.num_replicas, x.shape[0] // self.num_replicas, *x.shape[1:]), x.dtype
                )
                for x in values
            ]
            found, _ = jax.eval_shape(partial(self._run, last, train=False), task._replace(inputs=inputs))
            metrics = self._shard_by_rows(
                jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), found[1][1])
            )
        return Sums(zeros, zeros, metrics, grads)

    # -- tasks --

    def forward(self, part: int, task: TaskInputs) -> tuple[Any, Tree]:
        """Return the values that a part writes (the last part: losses as `Sums`), and the new model state."""
        found, model_state = self._run(part, task, self.train)
        if part < self.stage_model.last_part:
            return found, model_state
        loss_sum, (count, metrics) = found
        return Sums(*self._shard_by_rows((loss_sum, count, metrics)), grads={}), model_state

    def backward(self, part: int, sums: Sums, task: TaskInputs) -> tuple[Any, Sums, Tree]:
        """Return the cotangents of a part's inputs, the sums with its gradients, and the model state."""
        grads, cotangents, loss, model_state = self._vjp(part, task)
        sums = sums._replace(grads=self._add_grads(part, sums.grads, grads))
        return cotangents, self._add_loss(sums, loss), model_state

    def input_backward(self, part: int, sums: Sums, task: TaskInputs) -> tuple[Any, Sums, Tree, Deferred]:
        """Do what `backward` does, but defer the gradients to the weight task."""

        def halves(task: TaskInputs) -> tuple[Any, Tree]:
            grads, cotangents, loss, model_state = self._vjp(part, task)
            # other parts get the model state from their forward
            return (cotangents, loss, model_state if part == self.stage_model.last_part else {}), grads

        (cotangents, loss, model_state), grads = defer(halves)(task)
        return cotangents, self._add_loss(sums, loss), model_state, grads

    def weight(self, part: int, sums: Sums, grads: Deferred) -> Sums:
        """Return the sums with the deferred gradients of a part added."""
        return sums._replace(grads=self._add_grads(part, sums.grads, grads.compute()))

    def _run(self, part: int, task: TaskInputs, train: bool) -> tuple[Any, Tree]:
        return self._each_replica(part, self._replica_run(part, task.key, train), task, task.inputs)

    def _replica_run(self, part: int, key: jax.Array, train: bool) -> Callable[..., Any]:
        """Return the function (params, model state, first row, batch, inputs) -> values, of one replica."""

        def run(params: Tree, model_state: Tree, first_row: Any, batch: Batch, inputs: Any) -> Any:
            num_rows = jax.tree.leaves(batch)[0].shape[0]
            rng = row_key(key, first_row, num_rows, self.stage_model.model.draws)
            entering = self._entering(part, inputs, num_rows)
            found, changed = self.stage_model.run(part, params, model_state, rng, train, batch, entering)
            # a replica whose rows are all padding does not change the model state
            is_real = batch["weights"].sum() > 0 if "weights" in batch else jnp.bool_(True)
            changed = jax.tree.map(lambda new, old: jnp.where(is_real, new, old), changed, model_state)
            if part < self.stage_model.last_part:
                leaves = jax.tree.leaves(found)
                found = [leaves[value.leaf] for value in self.flow.writes[part]]
            return found, changed

        return run

    def _vjp(self, part: int, task: TaskInputs) -> tuple[Tree, list[jax.Array], Any, Tree]:
        """Return (gradients, cotangents of the inputs, the loss, model state); XLA drops unused results.

        The forward is recomputed from its inputs and its model state.
        """
        is_last = part == self.stage_model.last_part
        # masks and integers have no cotangent: they are closed over
        is_float = [self.flow.has_cotangent(value) for value in self.flow.reads[part]]
        has_cotangent = [self.flow.has_cotangent(value) for value in self.flow.writes[part]]
        run = self._replica_run(part, task.key, self.train)

        # the backward of one replica; vmap runs it for all of them
        def replica(
            params: Tree, model_state: Tree, first_row: Any, batch: Batch, inputs: Any, cotangents: Any
        ) -> tuple[Tree, list[jax.Array], Any, Tree]:
            def outputs(params: Tree, floats: Sequence[Any]) -> Any:
                left = iter(floats)
                given = [next(left) if yes else x for x, yes in zip(inputs, is_float, strict=True)]
                found, changed = run(params, model_state, first_row, batch, given)
                if is_last:
                    return found[0], (found[1], changed)
                return list(compress(found, has_cotangent)), ((), changed)

            floats = list(compress(inputs, is_float))
            out, pull, (counted, changed) = vjp(outputs, params, floats)
            # the last part starts from its loss, others from the cotangents that arrived
            grads, found = pull(jnp.ones_like(out) if is_last else cotangents)
            return grads, found, (out, *counted) if is_last else (), changed

        return self._each_replica(part, replica, task, task.inputs, task.cotangents)

    def _entering(self, part: int, inputs: Sequence[jax.Array], num_rows: int) -> Any:
        """Make the activations that enter a part; leaves that it does not read are zeros."""
        given = dict(zip(self.flow.reads[part], inputs, strict=True))
        leaves, structure = jax.tree.flatten(self.flow.activations[part])
        found = [
            given[value] if value in given else jnp.zeros((num_rows, *leaf.shape[1:]), leaf.dtype)
            for value, leaf in zip(self.flow.sources[part], leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    def _each_replica(
        self, part: int, function: Callable[..., Any], task: TaskInputs, *values: Sequence[Any]
    ) -> Any:
        """Call the function (params, model state, first row, batch, *values) of one replica for all."""
        # a deferred backward is cut in two
        placement, in_axes = replace(self.placement, in_parts=True), (None, 0, 0, 0, *[0] * len(values))
        mapped = map_replicas(function, in_axes, placement, self.stage_model.model.axis_name)
        params = self.stage_model.part_params(task.params, part)
        rows = jax.tree.map(lambda x: x[task.microbatch], (task.first_rows, task.batch))
        return mapped(params, task.model_state, *rows, *map(list, values))

    def _add_grads(self, part: int, grads: Tree, found: Tree) -> Tree:
        return self._constrain_grads(
            jax.vmap(lambda g, f: self.stage_model.add_grads(g, part, f))(grads, found)
        )

    def _add_loss(self, sums: Sums, loss: Any) -> Sums:
        """Add the loss of the last part to the sums; other parts have none."""
        if not loss:
            return sums
        sums = add_loss(sums, *loss)
        return sums._replace(**self._shard_by_rows(sums.of_loss))

    def _constrain_grads(self, grads: Tree) -> Tree:
        specs = add_leading_dim(self.placement.specs.params, self.replica_axes)
        known = group_by_path(specs)
        known |= add_leading_dim(dict(self._borrowed), self.replica_axes)

        def constrain(path: Any, x: jax.Array) -> jax.Array:
            spec = known[path_text(path)]
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.placement.mesh, spec))

        return jax.tree.map_with_path(constrain, grads)

    def _shard_by_rows(self, tree: Any) -> Any:
        """Shard sums (R,) like rows: with other shardings, programs would be compiled again."""
        sharding = NamedSharding(self.placement.mesh, PartitionSpec(self.replica_axes))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), tree)
