"""The step of a mesh for an elastic run: slots are parts of the rows of a batch, as equal as they can be.

Next: `elastic/island.py`, which asks for slots and for updates.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from shardtrain.data.loader import Loader, batch_shard
from shardtrain.data.row_split import RowSplit
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

KEPT_METRICS = 64


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
      num_slots: number of slots of a batch; at most its rows.
      state: the state before the first step, of `init_state`; equal seeds make equal states.
      learning_rate: the optimizer's schedule, to add the rate to the metrics; None adds none.

    Attributes:
      metrics: of the last step, as those of `make_step`; {} before the first.
      recent: number of steps done and metrics, of the newest steps.

    Raises:
      ValueError: there are more slots than rows, the model has a state such as running statistics, another
        combiner than the mean, or the samples are of a stream.
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
        learning_rate: optax.Schedule | None = None,
    ) -> None:
        problems = []
        if num_slots > batches.batch:
            problems.append(f"a batch of {batches.batch} rows has no {num_slots} slots; use fewer")
        if state.model_state:
            problems.append("the model has a state, such as running statistics; use a norm without them")
        if not placement.synchronisation.is_mean:
            problems.append("replicas are combined by another combiner; use the mean, the default")
        if getattr(batches.source, "is_stream", False):
            problems.append("the samples are of a stream, of which no batch can be read again; use a file")
        refuse("an elastic run cannot train this", problems)
        self._placement, self._state = placement, state
        self._batches = batches
        self._loaders = _make_loaders(batches, num_slots, placement)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="slots") if batches.prefetch else None
        self._ahead: dict[tuple[int, int], Future[Any]] = {}
        self.metrics: Metrics = {}
        self.recent: deque[tuple[int, Metrics]] = deque(maxlen=KEPT_METRICS)
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

            return keep_unless_skipped(apply, placement, state, metrics, learning_rate)

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
        total = jax.eval_shape(self._compute, state, self._place(0, self._load(0, 0)), np.uint32(0))
        self._update = updated.lower(state, total).compile()

    @property
    def state(self) -> State:
        """The state after the steps so far; numpy arrays may be set, and None frees it."""
        assert self._state is not None
        return self._state

    @state.setter
    def state(self, state: State | None) -> None:
        self._state = None if state is None else jax.device_put(state, self._placement.state)

    def find_position(self, step: int) -> Position:
        """Return the position in the data of the batch of a step."""
        return self._batches.advance(Position(epoch=0, index=0), step)

    def compute(self, step: int, slots: Sequence[int]) -> dict[str, Any]:
        """Return loss, count, metrics and gradients, summed over the rows of some slots."""
        taken = [(slot, self._take(step, slot)) for slot in slots]
        self._load_ahead(step + 1, slots)
        found = (
            self._compute(self.state, self._place(slot, batch), np.uint32(self._loaders[slot].shard().start))
            for slot, batch in taken
        )
        return reduce(self._add, found)

    def apply(self, step: int, total: dict[str, Any]) -> None:
        """Update the state by the sums over a whole batch."""
        self._state, self.metrics = self._update(self.state, total)
        self.recent.append((step + 1, self.metrics))

    def save(self, folder: Path) -> None:
        """Save the state into a folder, by Orbax."""
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.resolve() / "state", self.state)

    def restore(self, folder: Path) -> None:
        """Set the state that `save` wrote, also on another mesh."""
        with ocp.StandardCheckpointer() as checkpointer:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
            self._state = checkpointer.restore(folder.resolve() / "state", like)

    def _take(self, step: int, slot: int) -> Any:
        ahead = self._ahead.pop((step, slot), None)
        return self._load(step, slot) if ahead is None else ahead.result()

    def _load_ahead(self, step: int, slots: Sequence[int]) -> None:
        """Load the same slots of the next step while this one is computed."""
        # what others computed after all, or what a state from elsewhere has skipped
        self._ahead = {key: ahead for key, ahead in self._ahead.items() if key[0] == step}
        if self._background is not None:
            self._ahead |= {(step, slot): self._background.submit(self._load, step, slot) for slot in slots}

    def _load(self, step: int, slot: int) -> Any:
        return self._loaders[slot].batches.load(self.find_position(step))

    def _place(self, slot: int, batch: Any) -> Batch:
        return self._loaders[slot].place(batch)


def _make_loaders(batches: Batches, num_slots: int, placement: Placement) -> list[Loader]:
    """Return the loader of each slot; all are padded to the same rows, so one program computes them."""
    mesh, axes = placement.mesh, placement.layout.batch_axes
    rows = [batches.batch // num_slots + (slot < batches.batch % num_slots) for slot in range(num_slots)]
    capacity = RowSplit.of(mesh.shape, axes, 1).pad_rows(rows[0])
    whole = Loader(batches, {}, mesh, axes, microbatches=1)
    return [
        whole.replace_shards({batches.batch: batch_shard(rows, slot, mesh, axes, 1, capacity=capacity)})
        for slot in range(num_slots)
    ]
