"""What an island that has the whole model computes in a step, and its exchange of gradients with the others.

An island's own gradient is sent bucket by bucket and combined, and every island makes the same update; or
each island has an optimizer of its own, and merges what it changed. A run of one island only uses `step.py`.
Next: `island_gradients.py`, the gradients in parts; `sync/`, the ways to synchronise.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.fragments import group_by_path, restore_paths
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import step_key
from shardtrain.functional.sums import Sums
from shardtrain.train_step.drift import make_own_params
from shardtrain.train_step.gradient_pieces import GradientPart
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.island_combiner import Channel, CombinedTree, average_model_state, join_metrics
from shardtrain.train_step.island_gradients import IslandGradients
from shardtrain.train_step.placement import Placement, attach_shardings, constrain, find_own_shardings
from shardtrain.train_step.state import Metrics, State, get_scale, offload_optimizer
from shardtrain.train_step.update import (
    apply_gradients,
    compute_gradient_metrics,
    find_sum_shapes,
    keep_unless_skipped,
    make_own_update,
)


class Training(NamedTuple):
    """What is trained, and how.

    Attributes:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      learning_rate: the optimizer's schedule, to add the rate to the metrics; None adds none.
    """

    model: Model
    loss: Loss
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule | None = None


def make_step_alone(
    training: Training, placement: Placement, synchronisation: Synchronisation
) -> tuple[Callable[[State, Batch, Any], tuple[State, Metrics]], Callable[[State, Batch], Any]]:
    """Make the compiled step of an island's own optimizer: (state, batch, first row) -> (state, metrics).

    Also return (state, batch) -> the shapes of the sums over own steps.

    Args:
      training: model, loss and optimizer.
      placement: the placement of model and optimizer on this island.
      synchronisation: how islands are synchronised, on deltas.
    """
    gradients = make_gradients(training.model, training.loss, placement)
    update = make_own_update(training.optimizer, placement, training.learning_rate)

    def step(state: State, batch: Batch, first_row: jax.Array) -> tuple[State, Metrics]:
        own = make_own_params(state.params, state.local.drift)
        own = constrain(own, placement.specs.params, placement.mesh)
        key, scale = step_key(state.seed, state.step), get_scale(state.loss_scale)
        found = gradients(own, state.local.model_state, key, batch, first_row, scale)
        new, metrics = update(state, found, optax.tree.norm(found.grads))
        shardings = find_own_shardings(synchronisation, placement, placement.state, new.local.sums)
        return jax.lax.with_sharding_constraint(new, shardings._replace(combine_state=())), metrics

    def find_sums(state: State, batch: Batch) -> Any:
        key = step_key(jnp.uint32(0), jnp.int32(0))
        found = jax.eval_shape(gradients, state.params, state.model_state, key, batch)
        return find_sum_shapes(found.metrics)

    compiled = jax.jit(
        step,
        in_shardings=(None, placement.batch, NamedSharding(placement.mesh, PartitionSpec())),
        donate_argnums=0,
        compiler_options=placement.compiler_options,
    )
    return compiled, find_sums


class IslandCompute:
    """What an island computes of its own rows.

    Args:
      training: model, loss and optimizer.
      placement: the placement of model and optimizer on this island.
      channel: to the other islands.
      synchronisation: how islands are synchronised.
      start_row: the number of this island's first row in the whole batch.
      batch: an example, arrays or shapes (microbatches, rows, ...); only needed for gradients in several
        programs.

    Attributes:
      exchange: the program of the gradients, and the combiners of its parts, if gradients are combined.
      first_row: uint32, the number of this island's first row in a batch; it may change between steps.
    """

    def __init__(
        self,
        training: Training,
        placement: Placement,
        channel: Channel,
        synchronisation: Synchronisation = Synchronisation(),
        start_row: int = 0,
        batch: Batch | None = None,
    ) -> None:
        self.placement, self.channel, self.first_row = placement, channel, np.uint32(start_row)
        self._whole = NamedSharding(placement.mesh, PartitionSpec())
        self._find_sums: Callable[[State, Batch], Any] | None = None
        if synchronisation.on_deltas:
            self._step_alone, self._find_sums = make_step_alone(training, placement, synchronisation)
        if not synchronisation.on_deltas or synchronisation.synchronous_steps:
            by = Synchronisation() if synchronisation.on_deltas else synchronisation
            placed = replace(placement, in_parts=channel.num_parts > 1)
            gradients = make_gradients(training.model, training.loss, placed, mean=not by.is_mean)
            self.exchange = IslandGradients(gradients, placement, channel, by, batch)
            self._make_update(training)

    # -- steps with an optimizer of its own --

    def find_sum_shapes(self, state: State, batch: Batch) -> Any:
        """Return the shapes of the sums over own steps; () if there are none."""
        return () if self._find_sums is None else self._find_sums(state, batch)

    def step_alone(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run a step of this island's own optimizer."""
        return self._step_alone(state, batch, self.first_row)

    # -- steps with combined gradients --

    def _make_update(self, training: Training) -> None:
        placement, gradients, whole = self.placement, self.exchange, self._whole

        def update(
            state: State, found: Sums, combine_state: Any, extra: Any, own: dict[str, jax.Array]
        ) -> tuple[State, Metrics]:
            grads = gradients.joined(found.grads)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), placement.specs.abstract.params)
            found = found._replace(grads=restore_paths(zeros, {**group_by_path(zeros), **grads}))
            found = found.of_mean_loss if gradients.are_sums else found
            metrics = {**compute_gradient_metrics(found), **join_metrics(extra), **own}
            finite = metrics.pop("finite", None)

            def update_state(state: State) -> State:
                new = apply_gradients(training.optimizer, placement, state, found, metrics["grad_norm"])
                return new._replace(combine_state=combine_state)

            return keep_unless_skipped(
                update_state, placement, state, metrics, training.learning_rate, finite
            )

        # between the two programs gradients stay sharded; everything else is replicated
        state = placement.state._replace(combine_state=whole)
        shardings = Sums._make([whole, whole, whole, gradients.shardings, whole, whole])
        self._update = jax.jit(
            offload_optimizer(update, state),
            in_shardings=(state, shardings, whole, whole, whole),
            out_shardings=(state, whole),
            donate_argnums=0,
        )

    def step_together(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run a step that combines gradients once for all microbatches."""
        parts, started, combiners = [], [], self.exchange.combiners
        # all parts are started; each is sent when it is computed, while later ones compute
        for part in self.exchange(state, batch, self.first_row):
            # computed before the exchange, so that a slow island is one that arrives late
            jax.block_until_ready((part.grads, part.others))
            self.channel.all_gather("combine gradients", None)
            own_state = state.combine_state[len(parts)]
            started.append(combiners[len(parts)].start(part.grads, part.count, own_state, _list_sums(part)))
            parts.append(part)
        found, own = parts[-1].others
        model_state = average_model_state(self.channel.transfer, found.model_state, found.count)
        combined = [
            self._finish(number, *each) for number, each in enumerate(zip(parts, started, strict=True))
        ]
        sums = combined[-1].sums
        own |= {name: sums.pop(name) for name in own if name in sums}
        # every island makes the same update
        found = Sums(grads=[each.value for each in combined], model_state=model_state, **sums)
        metrics = [bucket for each in combined for bucket in each.metrics]
        return self._update(state, found, [each.state for each in combined], metrics, own)

    def _finish(self, number: int, part: GradientPart, started: Any) -> CombinedTree:
        """Wait for a part that was started, and put it on the mesh in the shardings of the update."""
        like = self._find_landed(number, part.grads)
        return self.exchange.combiners[number].finish(like, started, _list_sums(part))

    def _find_landed(self, number: int, grads: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and shardings of a part's combined gradients on the mesh."""
        shardings = self.exchange.shardings[number]
        return attach_shardings(dict(grads), {name: shardings[name] for name in grads})

    def lowered(self, state: State, batch: Batch) -> list[jax.stages.Lowered]:
        """Return the programs of a step: that of its own, or of the gradients and the update."""
        if self._find_sums is not None:
            return [self._step_alone.lower(state._replace(combine_state=()), batch, self.first_row)]
        gradients = self.exchange.lowered(state, batch, self.first_row)
        found, own = attach_shardings(gradients.out_info, self._whole)
        combined = [each.shapes() for each in self.exchange.combiners]
        grads = [self._find_landed(number, each.value) for number, each in enumerate(combined)]
        found = found._replace(grads=grads)
        metrics = [bucket for each in combined for bucket in each.metrics]
        return [gradients, self._update.lower(state, found, [each.state for each in combined], metrics, own)]

    def close(self) -> None:
        """Do nothing: this has no threads."""


def _list_sums(part: GradientPart) -> Any:
    """Return the sums that are sent with the last part; () for the others."""
    if part.others is None:
        return ()
    found, own = part.others
    over = {name: x for name, x in own.items() if name == "overflowed"}
    return {**found.of_loss, "squares": found.squares, **over}
