"""The training step of several islands: two compiled programs, with the transfer between them.

An island's own gradient (or its delta, after local steps) is sent bucket by bucket and combined, and every
island makes the same update of the result. A run of one island uses `step.py` alone.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.options import Combine
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import step_key
from shardtrain.islands.transfer import Transfer
from shardtrain.train_step.gradients import Gradients, make_gradients
from shardtrain.train_step.island_combiner import IslandCombiner, by_path, joined_metrics, like_paths
from shardtrain.train_step.island_totals import Totals, all_reduce_totals
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, apply_gradients, compiled, unless_skipped


def make_island_step(
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    transfer: Transfer,
    *,
    combine: Combine = Combine(),
    learning_rate: optax.Schedule | None = None,
    start_row: int = 0,
    barrier: Callable[[str], None] = lambda name: None,
) -> "IslandStep":
    """Make the training step of one island among several.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      placement: the placement of this model and optimizer on this island, whose own replicas are averaged.
      transfer: to the other islands.
      combine: how islands are combined.
      learning_rate: the optimizer's schedule, to have it among the metrics.
      start_row: the number of this island's first row in the whole batch.
      barrier: called with a name before each collective over islands; it can say which rank is missing, which
        MPI in a compiled program cannot.

    Returns:
      (state, batch) -> (state, metrics), as `step.make_step` has it; metrics are those of all islands. With
      local steps those of the loss come with the step that combines, and have count 0 until then;
      learning_rate, and grad_norm and skipped until then, are the island's own. It remembers the local steps
      since the last combination: give it the states that it returns.
    """
    assert placement.combine.is_mean
    kind = _DeltaStep if combine.on_deltas else _GradientStep
    return kind(
        model=model,
        loss=loss,
        optimizer=optimizer,
        placement=placement,
        transfer=transfer,
        combine=combine,
        learning_rate=learning_rate,
        start_row=start_row,
        barrier=barrier,
    )


class IslandStep(ABC):
    """A step of one island among several; see `make_island_step`."""

    def __init__(
        self,
        *,
        model: Model,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        placement: Placement,
        transfer: Transfer,
        combine: Combine,
        learning_rate: optax.Schedule | None,
        start_row: int,
        barrier: Callable[[str], None],
    ) -> None:
        self._transfer, self._combine, self._placement = transfer, combine, placement
        self._barrier = barrier
        self._combiner = IslandCombiner(combine.combiner, placement, transfer)
        self.labels = self._combiner.labels
        self._make(model, loss, optimizer, learning_rate, start_row)

    def init_combine_state(self) -> list[Any]:
        """Create the combiner's state on this island, for `State.combine_state`."""
        return self._combiner.init()

    @property
    def keeps_state(self) -> bool:
        """Whether the combiner has a state."""
        return self._combiner.keeps_state

    def combines(self, step: int) -> bool:
        """Whether islands are combined at the end of this step (counted from 1)."""
        return step % self._combine.local_steps == 0

    def forget(self) -> None:
        """Forget the local steps: the next state is not the one that was returned last."""
        return

    @abstractmethod
    def _make(self, model: Model, loss: Loss, optimizer: Any, learning_rate: Any, start_row: int) -> None: ...

    @abstractmethod
    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""


class _GradientStep(IslandStep):
    """A step that combines the islands' gradients, once for all microbatches."""

    def _make(self, model: Model, loss: Loss, optimizer: Any, learning_rate: Any, start_row: int) -> None:
        placement, combine, mesh = self._placement, self._combine, self._placement.mesh
        gradients = make_gradients(model, loss, placement, start_row)
        # with inside "sum" an island sends the sum over its replicas: their mean times their number
        sizes = [mesh.shape[axis] for axis in placement.layout.batch_axes]
        factor = math.prod(sizes) if combine.inside == "sum" else 1

        def local(state: State, batch: Batch) -> Gradients:
            found = gradients(state.params, state.model_state, step_key(state.seed, state.step), batch)
            return found._replace(grads=jax.tree.map(lambda g: g * factor, found.grads))

        def update(state: State, found: Gradients, combine_state: Any, extra: Any) -> tuple[State, Metrics]:
            new, metrics = apply_gradients(optimizer, placement, state, found)
            new = new._replace(combine_state=combine_state)
            return unless_skipped(state, new, {**metrics, **joined_metrics(extra)}, learning_rate)

        # between the two programs gradients stay sharded; everything else is replicated
        whole = NamedSharding(mesh, PartitionSpec())
        sharded = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            placement.specs.sharded,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        state = placement.state._replace(combine_state=whole)
        shardings = Gradients._make([whole] * len(Gradients._fields))._replace(grads=sharded)
        self._local = jax.jit(local, in_shardings=(state, placement.batch), out_shardings=shardings)
        self._update = jax.jit(
            update,
            in_shardings=(state, shardings, whole, whole),
            out_shardings=(state, whole),
            donate_argnums=0,
        )

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""
        # computed before the barrier, so that a slow island is one that arrives late there
        found = jax.block_until_ready(self._local(state, batch))
        grads = by_path(found.grads)
        self._barrier("combine gradients")
        # the sums and the model state are reduced while buckets of gradients are under way
        started = self._combiner.start(grads, found.count, state.combine_state)
        sums = {"loss_sum": found.loss_sum, "count": found.count, "metrics": found.metrics}
        totals = all_reduce_totals(self._transfer, Totals(sums, found.model_state), found.count)
        combined = self._combiner.finish(grads, started)
        # every island makes the same update
        found = Gradients(
            grads=like_paths(found.grads, combined.value), model_state=totals.model_state, **totals.sums
        )
        return self._update(state, found, combined.state, combined.metrics)


class _DeltaStep(IslandStep):
    """A step with the island's own optimizer; every `local_steps` steps the islands' deltas are combined."""

    def _make(self, model: Model, loss: Loss, optimizer: Any, learning_rate: Any, start_row: int) -> None:
        placement = self._placement
        gradients = make_gradients(model, loss, placement, start_row)
        # since the last combination: the parameters that all islands had then, steps done, and the sums
        self._common: Any = None
        self._done = 0
        self._sums: Any = None

        def step(state: State, batch: Batch) -> tuple[State, Metrics]:
            key = step_key(state.seed, state.step)
            found = gradients(state.params, state.model_state, key, batch)
            new, metrics = apply_gradients(optimizer, placement, state, found)
            # an island without examples leaves its state as it is
            new = jax.tree.map(lambda n, o: jnp.where(found.count > 0, n.astype(o.dtype), o), new, state)
            return unless_skipped(state, new, metrics, learning_rate)

        def delta(params: Any, common: Any) -> Any:
            return jax.tree.map(lambda p, c: p.astype(jnp.float32) - c.astype(jnp.float32), params, common)

        def merged(common: Any, deltas: Any) -> Any:
            return jax.tree.map(lambda c, d: (c.astype(jnp.float32) + d).astype(c.dtype), common, deltas)

        params = placement.state.params
        self._step = compiled(step, placement)
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=params)
        self._delta = jax.jit(delta, out_shardings=params)
        self._merged = jax.jit(merged, out_shardings=params)

    def forget(self) -> None:
        """See `IslandStep.forget`."""
        self._common = self._sums = None
        self._done = 0

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""
        # the combiner's state is no part of the local step's program
        combine_state, state = state.combine_state, state._replace(combine_state=())
        # the first local step: keep a copy of the common parameters, as the step donates its state
        if self._sums is None:
            self._common, self._done = self._copy(state.params), int(state.step)
        state, metrics = self._step(state, batch)
        self._done += 1
        sums = _step_sums(metrics)
        self._sums = sums if self._sums is None else jax.tree.map(jnp.add, self._sums, sums)
        if not self.combines(self._done):
            nothing = _loss_metrics(jax.tree.map(jnp.zeros_like, sums))
            return state._replace(combine_state=combine_state), {**metrics, **nothing}
        # the last local step: combine what every island changed, and add it to the common parameters
        deltas = by_path(jax.block_until_ready(self._delta(state.params, self._common)))
        self._barrier("combine deltas")
        count = self._sums["count"]
        started = self._combiner.start(deltas, count, combine_state)
        totals = all_reduce_totals(self._transfer, Totals(self._sums, state.model_state), count)
        combined = self._combiner.finish(deltas, started)
        params = self._merged(self._common, like_paths(state.params, combined.value))
        self._common = self._sums = None
        state = state._replace(params=params, model_state=totals.model_state, combine_state=combined.state)
        others = {
            "grad_norm": jnp.sqrt(totals.sums["squares"] / jnp.maximum(totals.sums["steps"], 1)),
            "skipped_by_islands": totals.sums["skipped"],
        }
        return state, {**metrics, **_loss_metrics(totals.sums), **others, **joined_metrics(combined.metrics)}


def _step_sums(metrics: Metrics) -> dict[str, Any]:
    """Return the sums of a step to add up over local steps; 0 but for "skipped" if it was skipped."""
    skipped = metrics["skipped"]
    sums = {
        "loss_sum": metrics["loss_sum"],
        "count": metrics["count"],
        "metrics": {name: value for name, value in metrics.items() if isinstance(value, tuple)},
        "squares": metrics["grad_norm"] ** 2,
        "steps": jnp.where(metrics["count"] > 0, 1.0, 0.0),
    }
    return {**jax.tree.map(lambda x: jnp.where(skipped > 0, 0, x), sums), "skipped": skipped}


def _loss_metrics(sums: dict[str, Any]) -> Metrics:
    """Return the sums that are metrics of the loss."""
    return {"loss_sum": sums["loss_sum"], "count": sums["count"], **sums["metrics"]}
