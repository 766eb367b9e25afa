"""The step of a mesh for an elastic run: slots are equal parts of the rows of a batch.

Next: `elastic/island.py`, which asks for slots and for updates.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.data.batches import Batches, Position
from shardtrain.data.placement import place
from shardtrain.errors.messages import refuse
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import step_key
from shardtrain.functional.sums import Sums
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.loss_scale import get_scale
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.state import Metrics, State
from shardtrain.train_step.update import apply_gradients, compute_gradient_metrics, keep_unless_skipped


class ElasticProgram:
    """What the islands of an elastic run train together, on the mesh of each; see `elastic.island.Program`.

    A row's sample and its dropout depend on the step and its number in the batch, so on any number of islands
    the losses are those of one device.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      placement: the placement on this island's mesh; meshes of islands may differ.
      batches: the whole batches, equal on all islands, from their first one on.
      num_slots: number of slots of a batch; it divides the rows.
      state: the state before the first step, of `init_state`; equal seeds make equal states.
      after_step: called with the number of steps done and the metrics of `make_step`, on each island.

    Raises:
      ValueError: rows do not divide, the model has a state such as running statistics, or another combiner
        than the mean.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        placement: Placement,
        batches: Batches,
        num_slots: int,
        state: State,
        after_step: Callable[[int, Metrics], None] = lambda step, metrics: None,
    ) -> None:
        problems = []
        if batches.batch % num_slots:
            problems.append(
                f"{num_slots} slots do not divide a batch of {batches.batch} rows:"
                f" {batches.batch} % {num_slots} = {batches.batch % num_slots}"
            )
        if state.model_state:
            problems.append("the model has a state, such as running statistics; use a norm without them")
        if not placement.synchronisation.is_mean:
            problems.append("replicas are combined by another combiner; use the mean, the default")
        refuse("an elastic run cannot train this", problems)
        self._placement, self._state, self._after_step = placement, state, after_step
        self._rows = batches.batch // num_slots
        self._batches = [
            replace(batches, rows=range(slot * self._rows, (slot + 1) * self._rows))
            for slot in range(num_slots)
        ]
        gradients = make_gradients(model, loss, placement, mean=False)

        def compute(state: State, batch: Batch, first_row: jax.Array) -> dict[str, Any]:
            key, scale = step_key(state.seed, state.step), get_scale(state.loss_scale)
            found = gradients(state.params, state.model_state, key, batch, first_row, scale)
            return {**found.of_loss, "grads": found.grads}

        def update(state: State, total: dict[str, Any]) -> tuple[State, Metrics]:
            found = Sums(**total, model_state=state.model_state).of_mean_loss
            metrics = compute_gradient_metrics(found)

            def apply(state: State) -> State:
                return apply_gradients(optimizer, placement, state, found, metrics["grad_norm"])

            return keep_unless_skipped(apply, placement, state, metrics, None)

        whole, options = NamedSharding(placement.mesh, PartitionSpec()), placement.compiler_options
        self._compute = jax.jit(
            compute, in_shardings=(placement.state, placement.batch, whole), compiler_options=options
        )
        self._add = jax.jit(lambda total, more: jax.tree.map(jnp.add, total, more), donate_argnums=0)
        updated = jax.jit(
            update,
            in_shardings=(placement.state, None),
            out_shardings=(placement.state, whole),
            donate_argnums=0,
            compiler_options=options,
        )
        # compiled before the island joins, as the others would wait for it
        total = jax.eval_shape(self._compute, state, self._load(0, 0), np.uint32(0))
        self._update = updated.lower(state, total).compile()

    @property
    def state(self) -> State:
        """The state after the steps so far; numpy arrays may be set."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = jax.device_put(state, self._placement.state)

    def compute(self, step: int, slots: Sequence[int]) -> dict[str, Any]:
        """Return loss, count, metrics and gradients, summed over the rows of some slots."""
        found = (
            self._compute(self._state, self._load(step, slot), np.uint32(slot * self._rows)) for slot in slots
        )
        return reduce(self._add, found)

    def apply(self, step: int, total: dict[str, Any]) -> None:
        """Update the state by the sums over a whole batch."""
        self._state, metrics = self._update(self._state, total)
        self._after_step(step + 1, metrics)

    def save(self, folder: Path) -> None:
        """Save the state into a folder, by Orbax."""
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.resolve() / "state", self._state)

    def restore(self, folder: Path) -> None:
        """Set the state that `save` wrote, also on another mesh."""
        with ocp.StandardCheckpointer() as checkpointer:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._state)
            self._state = checkpointer.restore(folder.resolve() / "state", like)

    def _load(self, step: int, slot: int) -> Batch:
        batches = self._batches[slot]
        batch = batches.load(batches.advance(Position(epoch=0, index=0), step))
        return place(batch, self._placement.mesh, self._placement.layout.batch_axes)
