"""The step of a stage of a pipeline across islands, with other pipelines as replicas.

All stages carry out the same table, replicas combine gradients stage by stage, and every stage updates the
parameters that it owns. Losses and the gradient's norm are all-gathered. Next: `trainer/train.py`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.options import Combine
from shardtrain.functional.loss import Batch
from shardtrain.functional.model import Tree, path_text
from shardtrain.functional.rng import step_key
from shardtrain.islands.transfer import Transfer
from shardtrain.pipeline.flow import Flow
from shardtrain.pipeline.stage_model import StageModel, nested
from shardtrain.pipeline.sums import Sums
from shardtrain.pipeline.table import Table
from shardtrain.sharding.array_dims import Named
from shardtrain.sharding.resolve import completed
from shardtrain.sharding.specs import partition_specs
from shardtrain.train_step.gradients import Gradients, merge_replicas, sum_replicas
from shardtrain.train_step.island_combiner import by_path, joined_metrics, like_paths
from shardtrain.train_step.island_step import IslandStep
from shardtrain.train_step.island_totals import average_model_state
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.seats import Seats
from shardtrain.train_step.stage_executor import Observe, StageExecutor
from shardtrain.train_step.stage_programs import StagePrograms
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, apply_gradients, unless_skipped

if TYPE_CHECKING:
    from shardtrain.islands.mailbox import Mailbox  # importing it starts MPI

Share = Callable[[str, Any], list[Any]]
"""(name, value of this rank) -> every rank's."""


class StageStep(IslandStep):
    """A step of one stage; see `island_step.make_island_step` for what a step across islands is.

    Args:
      stage_model: the stage's share of the model.
      flow: the values between the parts, for the rows of this pipeline's microbatches.
      table: the tasks of all stages in a step; not of the lock-step form.
      losses: the same for an evaluation: forward tasks only.
      optimizer: of the stage's parameters; without clipping by the norm of all stages, which `clip` does.
      clip: the largest norm of the whole gradient; None does not clip.
      placement: of the stage's own parameters on this island.
      crossing: the transfer to the same stage of the other pipelines.
      seats: which island has which stage.
      mailbox: to the other stages of this pipeline.
      share: all-gathers a value over all ranks, by name.
      combine: how the pipelines' gradients are combined.
      learning_rate: the optimizer's schedule, to be among the metrics.
      start_row: the first row of this pipeline in the whole batch.
      observe: called after each task, see `StageExecutor`.
    """

    def __init__(
        self,
        *,
        stage_model: StageModel,
        flow: Flow,
        table: Table,
        losses: Table,
        optimizer: optax.GradientTransformation,
        clip: float | None,
        placement: Placement,
        crossing: Transfer,
        seats: Seats,
        mailbox: "Mailbox",
        share: Share,
        combine: Combine = Combine(),
        learning_rate: optax.Schedule | None = None,
        start_row: int = 0,
        observe: Observe | None = None,
    ) -> None:
        self.stage_model, self.seats, self.mailbox = stage_model, seats, mailbox
        self._clip, self._share = clip, share
        self._borrowed_specs = _borrowed_specs(stage_model, placement)
        self._training = StagePrograms(stage_model, flow, placement, self._borrowed_specs, start_row)
        self._losing = StagePrograms(
            stage_model, flow, placement, self._borrowed_specs, start_row, train=False
        )
        self._flow, self._observe = flow, observe
        self.follow(table)
        self._losses = StageExecutor(losses, flow, mailbox)
        # tags of borrowed parameters follow those of all values
        self._first_tag = 2 * (len(flow.shapes) + 1) * table.num_parts * table.num_microbatches
        super().__init__(
            model=stage_model.model,
            loss=stage_model.traced.loss,
            optimizer=optimizer,
            placement=placement,
            transfer=crossing,
            combine=combine,
            learning_rate=learning_rate,
            start_row=start_row,
            barrier=lambda name: None,
        )

    def _make(self, model: Any, loss: Any, optimizer: Any, learning_rate: Any, start_row: int) -> None:
        placement, mesh = self._placement, self._placement.mesh
        specs, replica_axes = placement.specs, placement.layout.replica_axes
        owned = {path_text(path) for path, _ in jax.tree.leaves_with_path(specs.abstract.params)}

        def reduced(sums: Sums) -> tuple[Tree, dict[str, jax.Array], dict[str, Any]]:
            """(gradients of what the stage owns, of what it borrowed, the sums of the loss)."""
            found = by_path(sums.grads)
            mine = nested({path: g for path, g in found.items() if path in owned})
            mine = jax.tree.map(
                lambda g, spec: sum_replicas(g, spec, replica_axes, mesh), mine, specs.sharded
            )
            borrowed = {path: g.sum(0) for path, g in found.items() if path not in owned}
            return mine, borrowed, _counted(sums)

        def scaled(grads: Tree, returned: list[dict[str, jax.Array]], count: jax.Array) -> Tree:
            """Gradients of the mean loss, with what came back from stages that borrowed."""

            def scale(path: Any, g: jax.Array) -> jax.Array:
                more = [found[path_text(path)] for found in returned if path_text(path) in found]
                return sum(more, g) / jnp.where(count > 0, count, 1)

            return jax.tree.map_with_path(scale, grads)

        def update(
            state: State,
            grads: Tree,
            model_state: Tree,
            totals: Any,
            squares: jax.Array,
            kept: Any,
            extra: Any,
        ) -> tuple[State, Metrics]:
            norm = jnp.sqrt(squares)
            if (clip := self._clip) is not None:
                # as optax.clip_by_global_norm, with the norm of all stages
                grads = jax.tree.map(lambda g: jnp.where(norm < clip, g, g / norm * clip), grads)
            found = Gradients(grads=grads, model_state=model_state, **totals)
            new, metrics = apply_gradients(optimizer, placement, state, found)
            new = new._replace(combine_state=kept)
            metrics = {**metrics, "grad_norm": norm, **joined_metrics(extra)}
            return unless_skipped(state, new, metrics, learning_rate)

        whole = NamedSharding(mesh, PartitionSpec())
        sharded = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            specs.sharded,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        state = placement.state._replace(combine_state=whole)
        self._reduced = jax.jit(reduced, out_shardings=(sharded, whole, whole))
        self._scaled = jax.jit(scaled, out_shardings=sharded, donate_argnums=0)
        self._squares = jax.jit(lambda grads: optax.tree.norm(grads, squared=True))
        self._counts = jax.jit(_counted)
        self._merge = jax.jit(
            lambda state, shares: jax.tree.map(lambda x: merge_replicas(x, shares), state),
            out_shardings=whole,
        )
        self._update = jax.jit(
            update,
            in_shardings=(state, sharded, whole, whole, whole, whole, whole),
            out_shardings=(state, whole),
            donate_argnums=0,
        )

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """One step."""
        programs, seats = self._training, self.seats
        params = self._with_borrowed(state.params)
        key = step_key(state.seed, state.step)
        programs.begin(params, state.model_state, key, batch, self._table.has_weight)
        self._runner.run(programs)
        grads, borrowed, counted = self._reduced(programs.take_sums())
        self._give_back(borrowed)
        by_replica = self._told("losses", counted)
        count = np.float32(by_replica[seats.replica]["count"])
        grads = self._scaled(grads, self._returned(), count)
        model_state = self._merged_state(programs.model_state, batch)
        kept, extra = state.combine_state, []
        if seats.num_replicas > 1:
            grads, kept, extra, model_state = self._combined(grads, kept, count, model_state)
        squares = self._share("gradient norms", float(self._squares(grads)))
        squares = np.float32(np.sum(seats.of_replica(squares)))
        return self._update(state, grads, model_state, _totals(by_replica), squares, kept, extra)

    def follow(self, table: Table) -> None:
        """Carry out another table from now on, of the same parts and microbatches."""
        assert table.part_placement == self.stage_model.stages.part_placement
        self._table = table
        self._runner = StageExecutor(table, self._flow, self.mailbox, self._observe)

    def evaluate(self, state: State, batch: Batch) -> Metrics:
        """The losses of a batch, of all pipelines: loss_sum, count and those of the loss as (sum, count)."""
        programs = self._losing
        params = self._with_borrowed(state.params)
        programs.begin(params, state.model_state, jax.random.key(0), batch)
        self._losses.run(programs)
        totals = _totals(self._told("held-out losses", self._counts(programs.take_sums())))
        return {**totals.pop("metrics"), **totals}

    def close(self) -> None:
        """End what runs in the background."""
        self.mailbox.close()

    def _told(self, name: str, counted: dict[str, Any]) -> list[dict[str, Any]]:
        """Pipeline -> the sums of its loss, which its last stage knows."""
        seats, last_stage = self.seats, self.stage_model.stages.part_placement.last_stage
        is_last = seats.stage == last_stage
        mine = jax.tree.map(float, jax.device_get(counted)) if is_last else None
        found = self._share(name, mine)
        return [seats.of_replica(found, replica)[last_stage] for replica in range(seats.num_replicas)]

    def _combined(self, grads: Tree, kept: Any, count: np.float32, model_state: Tree) -> tuple[Any, ...]:
        """What the same stage of all pipelines has made."""
        mesh = self._placement.mesh
        on_mesh = jax.device_put(count, NamedSharding(mesh, PartitionSpec()))
        sent = by_path(grads)
        under_way = self._combiner.start(sent, on_mesh, kept)
        model_state = average_model_state(self._transfer, model_state, on_mesh)
        crossed = self._combiner.finish(sent, under_way)
        return like_paths(grads, crossed.value), crossed.state, crossed.metrics, model_state

    def _merged_state(self, model_state: Tree, batch: Batch) -> Tree:
        """What this island's own replicas have made of the model state, by their numbers of real rows."""
        if not jax.tree.leaves(model_state):
            return model_state
        weights = batch["weights"]
        real = weights.reshape(len(weights), self._training.num_replicas, -1).sum((0, 2))
        shares = jnp.where(real.sum() > 0, real / real.sum(), 1 / len(real))
        return self._merge(model_state, shares)

    def _with_borrowed(self, params: Tree) -> Tree:
        """The parameters that the stage works with; what others own travels anew in every step."""
        here = by_path(params)
        for path, stages in self.stage_model.lent.items():
            for stage in stages:
                self.mailbox.send(here[path], stage, self._tag(path))
        mesh, whole = self._placement.mesh, by_path(self.stage_model.traced.params)
        for path, owner in self.stage_model.borrowed.items():
            shape = whole[path]
            what = f"parameter {path} from stage {owner}"
            array = self.mailbox.receive(shape.shape, shape.dtype, owner, self._tag(path), what)
            here[path] = jax.device_put(array, NamedSharding(mesh, self._borrowed_specs[path]))
        return nested(here)

    def _give_back(self, borrowed: Mapping[str, jax.Array]) -> None:
        for path, owner in self.stage_model.borrowed.items():
            self.mailbox.send(borrowed[path], owner, self._tag(path))

    def _returned(self) -> list[dict[str, np.ndarray]]:
        """The gradients of those that borrowed."""
        found = []
        whole = by_path(self.stage_model.traced.params)
        for path, stages in self.stage_model.lent.items():
            for stage in stages:
                what = f"gradient of {path} from stage {stage}"
                arguments = (whole[path].shape, np.float32, stage, self._tag(path), what)
                found.append({path: self.mailbox.receive(*arguments)})
        return found

    def _tag(self, path: str) -> int:
        return self._first_tag + sorted(self.stage_model.users).index(path)


def _counted(sums: Sums) -> dict[str, Any]:
    """The sums of the loss, over this island's replicas."""
    found = {"loss_sum": sums.loss_sum, "count": sums.count, "metrics": sums.metrics}
    return jax.tree.map(lambda x: x.sum(0), found)


def _totals(by_replica: list[dict[str, Any]]) -> dict[str, Any]:
    """Added up over pipelines, in their order: the same on every rank."""
    found = [{**x, "metrics": {name: tuple(pair) for name, pair in x["metrics"].items()}} for x in by_replica]
    return jax.tree.map(lambda *x: np.float32(sum(x)), *found)


def _borrowed_specs(stage_model: StageModel, placement: Placement) -> dict[str, PartitionSpec]:
    """How what a stage borrows lies on its mesh: as its owner would place it there."""
    whole, dims = by_path(stage_model.traced.params), stage_model.model.dims
    names = {
        path_text(path): leaf
        for path, leaf in jax.tree.leaves_with_path(dims, is_leaf=lambda x: x is None or isinstance(x, tuple))
    }
    arrays = {path: Named(dims=names[path], shape=whole[path].shape) for path in stage_model.borrowed}
    sizes = dict(placement.mesh.shape)
    layout = completed(placement.layout, arrays, sizes)
    like = {path: whole[path] for path in arrays}
    return partition_specs(dict(sorted(arrays.items())), like, layout.parameter_rules, sizes, layout.unnamed)
