"""The training step of one island among several: compiled programs with transfers between them.

An island's own gradient (or, after local steps, what it changed) is sent bucket by bucket and combined, and
every island makes the same update. A run of one island only uses `step.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.fragments import group_by_path, restore_paths
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.functional.sums import Sums
from shardtrain.islands.transfer import Transfer
from shardtrain.train_step.delta_island_step import DeltaIslandStep
from shardtrain.train_step.gradient_parts import GradientPart
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.island_combiner import CombinedTree, join_metrics
from shardtrain.train_step.island_gradients import IslandGradients
from shardtrain.train_step.island_merge import AllGather, IslandMerge, gather_alone
from shardtrain.train_step.island_totals import average_model_state
from shardtrain.train_step.offload import offload_optimizer
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, apply_gradients, compute_gradient_metrics, keep_unless_skipped
from shardtrain.train_step.wave_merge import WaveMerge


class IslandStep(Protocol):
    """The training step of one island among several: (state, batch) -> (state, metrics).

    Attributes:
      labels: names of the entries of a combiner's metric (L,).
      keeps_state: whether the combiner has a state.
    """

    labels: list[str]
    keeps_state: bool

    def begin(self, state: State, batch: Batch) -> State:
        """Return the state before the first step with what this island needs for the exchange.

        Args:
          state: of `init_state`.
          batch: arrays or shapes.
        """
        ...

    def wanted(self, state: State, batch: Batch) -> State:
        """Return the shapes, dtypes and shardings of what `begin` returns, for those of `init_state`."""
        ...

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""
        ...

    def close(self) -> None:
        """End the threads of this step, if it has any."""
        ...


def make_island_step(
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    transfer: Transfer,
    *,
    synchronisation: Synchronisation = Synchronisation(),
    reduce_dtype: str = "float32",
    learning_rate: optax.Schedule | None = None,
    start_row: int = 0,
    last_step: int = -1,
    all_gather: AllGather = gather_alone,
    waves: WaveMerge | None = None,
    num_parts: int = 1,
    batch: Batch | None = None,
) -> IslandStep:
    """Make the training step of one island among several.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      placement: the placement of model and optimizer on this island, whose own replicas are averaged.
      transfer: to the other islands.
      synchronisation: how islands are synchronised.
      reduce_dtype: the dtype of the gradients that are sent, see `islands.options.Across`.
      learning_rate: the optimizer's schedule, to add the rate to the metrics; None adds none.
      start_row: the number of this island's first row in the whole batch.
      last_step: the last step of the run, see `step.make_step`.
      all_gather: gathers a value of every rank, by name, before each collective over islands; it reports
        which rank is missing, which MPI in a compiled program cannot.
      waves: the merge of a synchronisation with a `distance`.
      num_parts: the largest number of programs that compute the gradients of a mean: what one has computed
        is sent while the next ones compute, see `gradient_parts.py`.
      batch: an example, arrays or shapes (microbatches, rows, ...); only needed for several parts.

    Returns:
      (state, batch) -> (state, metrics), see `step.make_step`; metrics are over all islands. With local
      steps the metrics of the loss come with the step that merges, and have count 0 until then;
      learning_rate, and grad_norm and skipped until then, are the island's own. The first state is
      `init_state` after `begin`.
    """
    assert placement.synchronisation.is_mean
    assert (waves is None) == (synchronisation.distance is None)

    def make_gradient_step(synchronisation: Synchronisation) -> GradientIslandStep:
        placed = replace(placement, in_parts=num_parts > 1)
        gradients = IslandGradients(
            make_gradients(model, loss, placed, mean=not synchronisation.is_mean),
            placement,
            transfer,
            synchronisation,
            reduce_dtype,
            num_parts,
            batch,
            all_gather,
        )
        return GradientIslandStep(
            gradients, optimizer, placement, transfer, learning_rate, all_gather, start_row
        )

    if not synchronisation.on_deltas:
        return make_gradient_step(synchronisation)
    return DeltaIslandStep(
        gradients=make_gradients(model, loss, placement),
        first_row=start_row,
        optimizer=optimizer,
        placement=placement,
        merge=waves or IslandMerge(synchronisation, placement, transfer, all_gather, last_step),
        synchronous=make_gradient_step(Synchronisation()) if synchronisation.synchronous_steps else None,
        learning_rate=learning_rate,
    )


class GradientIslandStep:
    """A step that combines the islands' gradients, once for all microbatches; see `make_island_step`.

    Attributes:
      first_row: uint32, the number of this island's first row in a batch; it may change between steps.
      part_bytes: the bytes that each part of the program of the gradients sends.
    """

    def __init__(
        self,
        gradients: IslandGradients,
        optimizer: optax.GradientTransformation,
        placement: Placement,
        transfer: Transfer,
        learning_rate: optax.Schedule | None,
        all_gather: AllGather,
        first_row: int,
    ) -> None:
        self._gradients, self._transfer, self._all_gather = gradients, transfer, all_gather
        self.first_row = np.uint32(first_row)
        self._combiners = gradients.combiners
        self.labels = [label for each in self._combiners for label in each.labels]
        self.keeps_state = any(each.keeps_state for each in self._combiners)
        self.part_bytes = [each.num_bytes for each in self._combiners]

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
                new = apply_gradients(optimizer, placement, state, found, metrics["grad_norm"])
                return new._replace(combine_state=combine_state)

            return keep_unless_skipped(update_state, placement, state, metrics, learning_rate, finite)

        # between the two programs gradients stay sharded; everything else is replicated
        self._whole = whole = NamedSharding(placement.mesh, PartitionSpec())
        state = placement.state._replace(combine_state=whole)
        shardings = Sums._make([whole, whole, whole, gradients.shardings, whole, whole])
        self._update = jax.jit(
            offload_optimizer(update, state),
            in_shardings=(state, shardings, whole, whole, whole),
            out_shardings=(state, whole),
            donate_argnums=0,
        )

    def begin(self, state: State, batch: Batch) -> State:
        """Return the state with the state of the combiners, see `IslandStep`."""
        return state._replace(combine_state=[each.init() for each in self._combiners])

    def wanted(self, state: State, batch: Batch) -> State:
        """Return the shapes of what `begin` returns, see `IslandStep`."""
        return state._replace(combine_state=[each.wanted() for each in self._combiners])

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""
        parts, started = [], []
        # all parts are started; each is sent when it is computed, while later ones compute
        for part in self._gradients(state, batch, self.first_row):
            # computed before the exchange, so that a slow island is one that arrives late
            jax.block_until_ready((part.grads, part.others))
            self._all_gather("combine gradients", None)
            number = len(parts)
            combiner, own_state = self._combiners[number], state.combine_state[number]
            started.append(combiner.start(part.grads, part.count, own_state, _list_sums(part)))
            parts.append(part)
        found, own = parts[-1].others
        model_state = average_model_state(self._transfer, found.model_state, found.count)
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
        return self._combiners[number].finish(like, started, _list_sums(part))

    def _find_landed(self, number: int, grads: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and shardings of a part's combined gradients on the mesh."""
        shardings = self._gradients.shardings[number]
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
            for name, x in grads.items()
        }

    def lowered(self, state: State, batch: Batch) -> list[jax.stages.Lowered]:
        """Return the programs of the gradients and of the update, for arrays or shapes.

        A step does not trace them again. Gradients in several parts are lowered as one program.
        """
        gradients = self._gradients.lowered(state, batch, self.first_row)
        whole = self._whole
        found, own = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), gradients.out_info
        )
        combined = [each.shapes() for each in self._combiners]
        grads = [self._find_landed(number, each.value) for number, each in enumerate(combined)]
        found = found._replace(grads=grads)
        metrics = [bucket for each in combined for bucket in each.metrics]
        return [gradients, self._update.lower(state, found, [each.state for each in combined], metrics, own)]

    def close(self) -> None:
        """Do nothing: this step has no threads."""


def _list_sums(part: GradientPart) -> Any:
    """Return the sums that are sent with the last part; () for the others."""
    if part.others is None:
        return ()
    found, own = part.others
    over = {name: x for name, x in own.items() if name == "overflowed"}
    return {**found.of_loss, "squares": found.squares, **over}
