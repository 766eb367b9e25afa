"""What one stage of a pipeline across islands compiles: its parts forward and backward, on its own mesh.

The island's own replicas (its data axis) are a leading dim of everything, as in `gradients.py`.
Next: `stage_step.py`, the step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain import axes
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.loss import Batch
from shardtrain.functional.model import Tree, path_text
from shardtrain.functional.rng import row_key
from shardtrain.pipeline.flow import Flow, Value
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.sharding.specs import with_leading_dim
from shardtrain.train_step.gradients import constrained
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.stage_executor import Arrays


class Sums(NamedTuple):
    """What a stage computed of a batch; every array begins with a dim of the island's own replicas, R.

    Args:
      grads: like the stage's parameters, borrowed ones among them; float32, of loss_sum.
      loss_sum: float32 (R,), on the last stage, like count and metrics.
      count: float32 (R,).
      metrics: name -> (sums, counts).
    """

    grads: Any
    loss_sum: jax.Array
    count: jax.Array
    metrics: dict[str, tuple[jax.Array, jax.Array]]


class StagePrograms:
    """The compiled parts of one stage, and what they work on in a step.

    Args:
      held: what the stage has.
      flow: of the whole model.
      placement: of the stage's own parameters on this island.
      borrowed: path -> PartitionSpec of a parameter that another stage owns.
      start_row: where the rows of this pipeline begin in the whole batch.
      train: with dropout and backward tasks, or only losses.
    """

    def __init__(
        self,
        held: StageModel,
        flow: Flow,
        placement: Placement,
        borrowed: Mapping[str, PartitionSpec],
        start_row: int = 0,
        train: bool = True,
    ) -> None:
        self.held, self.flow, self.placement, self.train = held, flow, placement, train
        layout, mesh = placement.layout, placement.mesh
        self.replica_axes = layout.replica_axes
        self.num_replicas = math.prod(mesh.shape[axis] for axis in self.replica_axes)
        self.rules = layout.rules_of_replica()
        self.rows = PartitionSpec(self.replica_axes, self.rules[axes.BATCH])
        self.start_row, self.borrowed = start_row, borrowed
        self._forwards = {part: self._compiled(self._forward, part) for part in held.parts}
        self._backwards, self._input_backwards, self._weights = (
            {part: self._compiled(function, part, donate_argnums=0) for part in held.parts}
            for function in (self._backward, self._input_backward, self._weight)
        )
        self._zeros = self._compiled(self._no_sums, held.parts[-1])
        self._add = jax.jit(lambda trees: jax.tree.map(lambda *x: sum(x[1:], x[0]), *trees))
        self._split = jax.jit(self._by_replica)

    def begin(
        self, params: Tree, model_state: Tree, key: jax.Array, batch: Batch, has_weight: bool = False
    ) -> None:
        """Before the tasks of a step.

        Args:
          params: of the stage, borrowed ones among them.
          model_state: of the stage.
          key: of the step.
          batch: every array (M, rows, ...) on the mesh.
          has_weight: the table has weight tasks.
        """
        self.params, self.key, self.has_weight = params, key, has_weight
        self.batch, self.first_rows, self.model_state = self._split(batch, model_state)
        self._before: dict[tuple[int, int], Tree] = {}
        self._made: Any = ()
        self.sums: Sums = self._zeros(params, self.model_state, self.batch, self.first_rows)

    def taken(self) -> Sums:
        """What the tasks of a step added up; the programs let go of it."""
        sums = self.sums
        del self.sums
        return sums

    # -- what the runner calls --

    def forward(self, part: int, microbatch: int, inputs: Arrays) -> Arrays:
        """See `stage_runner.Programs`."""
        if part == self.held.last_part and self.train:
            return {}  # its backward computes it again, and nobody else needs it
        self._before[part, microbatch] = self.model_state
        *arguments, _ = self._arguments(part, microbatch, inputs, {})
        found, self.model_state = self._forwards[part](*arguments)
        self._made = found
        if not self.train:
            del self._before[part, microbatch]
        if part == self.held.last_part:
            self.sums = self._add([self.sums, found])
            return {}
        return dict(zip(self.flow.writes[part], found, strict=True))

    def backward(self, part: int, microbatch: int, inputs: Arrays, errors: Arrays) -> Arrays:
        """See `stage_runner.Programs`."""
        is_last = part == self.held.last_part
        if is_last:
            # it was not forward that ran this part, but this will
            self._before[part, microbatch] = self.model_state
        backward = self._input_backwards if self.has_weight else self._backwards
        found, self.sums, model_state = backward[part](
            self.sums, *self._arguments(part, microbatch, inputs, errors)
        )
        if is_last:
            self.model_state = model_state
        if not self.has_weight:
            del self._before[part, microbatch]
        return dict(zip(filter(self.flow.has_error, self.flow.reads[part]), found, strict=True))

    def weight(self, part: int, microbatch: int, inputs: Arrays, errors: Arrays) -> None:
        """See `stage_runner.Programs`."""
        arguments = self._arguments(part, microbatch, inputs, errors)
        self.sums = self._weights[part](self.sums, *arguments)
        del self._before[part, microbatch]

    def _arguments(self, part: int, microbatch: int, inputs: Arrays, errors: Arrays) -> tuple[Any, ...]:
        listed = [inputs[value] for value in self.flow.reads[part]]
        found = [errors[value] for value in self.flow.writes[part] if value in errors]
        state = self._before[part, microbatch]
        return (
            self.params,
            state,
            self.key,
            self.first_rows,
            self.batch,
            np.int32(microbatch),
            listed,
            found,
        )

    def landed(self, value: Value, array: np.ndarray) -> jax.Array:
        """Rows of a microbatch, as the replicas of this island share them: (R, rows, ...)."""
        array = array.reshape(self.num_replicas, -1, *array.shape[1:])
        return jax.device_put(array, NamedSharding(self.placement.mesh, self.rows))

    def sendable(self, array: jax.Array) -> jax.Array:
        """Its bytes are those of (rows, ...)."""
        return array

    def added(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """See `stage_runner.Programs`."""
        return self._add(list(arrays))

    def wait(self) -> None:
        """See `stage_runner.Programs`."""
        jax.block_until_ready((self._made, self.sums, self.model_state))

    # -- what is compiled --

    def _compiled(self, function: Callable[..., Any], part: int, **options: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with activation_rules(self.rules, self.placement.mesh, self.placement.layout.unnamed):
                return function(part, *arguments)

        return jax.jit(run, **options)

    def _by_replica(self, batch: Batch, model_state: Tree) -> tuple[Batch, jax.Array, Tree]:
        """What each replica of the island has: batch (M, R, rows, ...), first rows (M, R), model state."""
        count = self.num_replicas
        num_microbatches, num_rows = jax.tree.leaves(batch)[0].shape[:2]
        batch = jax.tree.map(lambda x: x.reshape(x.shape[0], count, -1, *x.shape[2:]), batch)
        spec = PartitionSpec(None, *self.rows)
        batch = constrained(batch, jax.tree.map(lambda _: spec, batch), self.placement.mesh)
        shares = jnp.arange(num_microbatches * count, dtype=jnp.uint32)
        first_rows = (self.start_row + shares * (num_rows // count)).reshape(num_microbatches, count)
        state = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), model_state)
        return batch, first_rows, state

    def _no_sums(
        self, last: int, params: Tree, model_state: Tree, batch: Batch, first_rows: jax.Array
    ) -> Sums:
        grads = jax.tree.map(lambda x: jnp.zeros((self.num_replicas, *x.shape), jnp.float32), params)
        grads = self._constrained(grads) if self.train else ()
        zeros = self._by_rows(jnp.zeros(self.num_replicas))
        metrics: Any = {}
        if last == self.held.last_part:
            forward = partial(self._forward_of, last, train=False)
            example = self._example(params, model_state, batch, first_rows)
            (_, (_, found)), _ = jax.eval_shape(forward, *example)
            metrics = self._by_rows(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), found))
        return Sums(grads, zeros, zeros, metrics)

    def _example(self, params: Tree, model_state: Tree, batch: Batch, first_rows: jax.Array) -> Any:
        inputs = [
            jax.ShapeDtypeStruct((self.num_replicas, x.shape[0] // self.num_replicas, *x.shape[1:]), x.dtype)
            for x in (self.flow.shapes[value] for value in self.flow.reads[self.held.last_part])
        ]
        return params, model_state, jax.random.key(0), first_rows, batch, jnp.int32(0), inputs

    def _constrained(self, grads: Tree) -> Tree:
        specs = with_leading_dim(self.placement.specs.params, self.replica_axes)
        known = {path_text(path): spec for path, spec in jax.tree.leaves_with_path(specs, is_leaf=_is_spec)}
        known |= with_leading_dim(dict(self.borrowed), self.replica_axes)

        def constrain(path: Any, x: jax.Array) -> jax.Array:
            spec = known[path_text(path)]
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.placement.mesh, spec))

        return jax.tree.map_with_path(constrain, grads)

    def _forward(self, part: int, *arguments: Any) -> tuple[Any, Tree]:
        found, model_state = self._forward_of(part, *arguments, train=self.train)
        if part < self.held.last_part:
            return found, model_state
        loss_sum, (count, metrics) = found
        return Sums((), *self._by_rows((loss_sum, count, metrics))), model_state

    def _forward_of(
        self,
        part: int,
        params: Tree,
        model_state: Tree,
        key: jax.Array,
        first_rows: jax.Array,
        batch: Batch,
        microbatch: jax.Array,
        inputs: Sequence[jax.Array],
        train: bool,
    ) -> tuple[Any, Tree]:
        run = self._replica_run(part, key, train)
        taken = self.held.taken(params, part)
        rows = jax.tree.map(lambda x: x[microbatch], (first_rows, batch))
        return self._vmapped(run, (None, 0, 0, 0, 0))(taken, model_state, *rows, list(inputs))

    def _replica_run(self, part: int, key: jax.Array, train: bool) -> Callable[..., Any]:
        """(taken, model state, first row, batch, inputs) -> what the part writes, of one replica."""

        def run(taken: Tree, model_state: Tree, first_row: Any, batch: Batch, inputs: Any) -> Any:
            num_rows = jax.tree.leaves(batch)[0].shape[0]
            rng = row_key(key, first_row, num_rows)
            stream = self._stream(part, inputs, num_rows)
            found, changed = self.held.run(part, taken, model_state, rng, train, batch, stream)
            # a share that is all padding leaves no trace
            is_real = batch["weights"].sum() > 0 if "weights" in batch else jnp.bool_(True)
            changed = jax.tree.map(lambda new, old: jnp.where(is_real, new, old), changed, model_state)
            if part < self.held.last_part:
                leaves = jax.tree.leaves(found)
                found = [leaves[value.leaf] for value in self.flow.writes[part]]
            return found, changed

        return run

    def _backward(self, part: int, sums: Sums, *arguments: Any) -> tuple[Any, Sums, Tree]:
        grads, errors, loss, model_state = self._pulled(part, *arguments)
        sums = sums._replace(grads=self._grads_added(part, sums.grads, grads))
        return errors, self._with_loss(sums, loss), model_state

    def _input_backward(self, part: int, sums: Sums, *arguments: Any) -> tuple[Any, Sums, Tree]:
        _, errors, loss, model_state = self._pulled(part, *arguments)
        return errors, self._with_loss(sums, loss), model_state

    def _weight(self, part: int, sums: Sums, *arguments: Any) -> Sums:
        grads, *_ = self._pulled(part, *arguments)
        return sums._replace(grads=self._grads_added(part, sums.grads, grads))

    def _grads_added(self, part: int, grads: Tree, found: Tree) -> Tree:
        return self._constrained(jax.vmap(lambda g, f: self.held.added(g, part, f))(grads, found))

    def _pulled(
        self,
        part: int,
        params: Tree,
        model_state: Tree,
        key: jax.Array,
        first_rows: jax.Array,
        batch: Batch,
        microbatch: jax.Array,
        inputs: Sequence[jax.Array],
        errors: Sequence[jax.Array],
    ) -> tuple[Tree, list[jax.Array], Any, Tree]:
        """(gradients, errors of what was read, the loss, model state); what is not used costs nothing."""
        is_last = part == self.held.last_part
        is_float = [self.flow.has_error(value) for value in self.flow.reads[part]]
        has_error = [self.flow.has_error(value) for value in self.flow.writes[part]]
        run = self._replica_run(part, key, self.train)

        def replica(
            taken: Tree, model_state: Tree, first_row: Any, batch: Batch, inputs: Any, errors: Any
        ) -> tuple[Tree, list[jax.Array], Any, Tree]:
            def outputs(taken: Tree, floats: Sequence[Any]) -> Any:
                left = iter(floats)
                given = [next(left) if yes else x for x, yes in zip(inputs, is_float, strict=True)]
                found, changed = run(taken, model_state, first_row, batch, given)
                if is_last:
                    return found[0], (found[1], changed)
                return list(compress(found, has_error)), ((), changed)

            out, pull, (counted, changed) = jax.vjp(
                outputs, taken, list(compress(inputs, is_float)), has_aux=True
            )
            grads, found = pull(jnp.ones_like(out) if is_last else errors)
            return grads, found, (out, counted) if is_last else (), changed

        taken = self.held.taken(params, part)
        rows = jax.tree.map(lambda x: x[microbatch], (first_rows, batch))
        in_axes = (None, 0, 0, 0, 0, 0)
        return self._vmapped(replica, in_axes)(taken, model_state, *rows, list(inputs), list(errors))

    def _with_loss(self, sums: Sums, loss: Any) -> Sums:
        """Sums with what the last part adds to them; other parts have no loss."""
        if not loss:
            return sums
        loss_sum, (count, metrics) = loss
        add = partial(jax.tree.map, lambda total, x: total + x.astype(jnp.float32))
        found = (sums.loss_sum + loss_sum, sums.count + count, add(sums.metrics, metrics))
        return Sums(sums.grads, *self._by_rows(found))

    def _by_rows(self, tree: Any) -> Any:
        """Sums (R,) that lie as rows do: always alike, or programs would be compiled for each way."""
        sharding = NamedSharding(self.placement.mesh, PartitionSpec(self.replica_axes))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), tree)

    def _vmapped(self, function: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
        return jax.vmap(
            function,
            in_axes=in_axes,
            axis_name=self.held.model.axis_name,
            spmd_axis_name=self.replica_axes or None,
        )

    def _stream(self, part: int, inputs: Sequence[jax.Array], num_rows: int) -> Any:
        """The stream that a part is given: what it does not read may be anything."""
        given = dict(zip(self.flow.reads[part], inputs, strict=True))
        leaves, structure = jax.tree.flatten(self.flow.streams[part])
        found = [
            given[value] if value in given else jnp.zeros((num_rows, *leaf.shape[1:]), leaf.dtype)
            for value, leaf in zip(self.flow.sources[part], leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, found)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
