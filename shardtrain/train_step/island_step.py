"""The training step of several islands: compiled programs, with the transfer between them.

An island's own gradient (or, after local steps, what it changed) is sent bucket by bucket and combined, and
every island makes the same update of the result. A run of one island uses `step.py` alone.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.combiner import contribution
from shardtrain.combine.fragments import by_path, like_paths
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.frozen import without
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import step_key
from shardtrain.functional.sums import Sums
from shardtrain.islands.transfer import Transfer
from shardtrain.train_step.delta_island_step import DeltaIslandStep
from shardtrain.train_step.gradient_parts import GradientPiece, GradientParts, join_pieces, plan_pieces
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.island_combiner import IslandCombiner, joined_metrics
from shardtrain.train_step.island_merge import AllGather, IslandMerge, alone
from shardtrain.train_step.island_totals import average_model_state
from shardtrain.train_step.loss_scale import overflowed, scale_of
from shardtrain.train_step.offload import offloaded
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, apply_gradients, unless_skipped
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
    all_gather: AllGather = alone,
    waves: WaveMerge | None = None,
    num_parts: int = 1,
    batch: Any = None,
) -> IslandStep:
    """Make the training step of one island among several.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      placement: the placement of this model and optimizer on this island, whose own replicas are averaged.
      transfer: to the other islands.
      synchronisation: how islands are synchronised.
      reduce_dtype: of the gradients that are sent, see `islands.options.Across`.
      learning_rate: the optimizer's schedule, to have it among the metrics.
      start_row: the number of this island's first row in the whole batch.
      last_step: the last step of the run, see `step.make_step`.
      all_gather: gathers a value of every rank, by name, before each collective over islands; it can say
        which rank is missing, which MPI in a compiled program cannot.
      waves: ends the waves of a synchronisation with a `distance`.

    Returns:
      (state, batch) -> (state, metrics), as `step.make_step` has it; metrics are those of all islands. With
      local steps those of the loss come with the step that combines, and have count 0 until then;
      learning_rate, and grad_norm and skipped until then, are the island's own. The first state is that of
      `init_state` after `begin`.
    """
    assert placement.synchronisation.is_mean
    assert (waves is None) == (synchronisation.distance is None)

    def on_gradients(synchronisation: Synchronisation) -> GradientIslandStep:
        return GradientIslandStep(
            gradients=make_gradients(model, loss, placement, mean=not synchronisation.is_mean),
            first_row=start_row,
            optimizer=optimizer,
            placement=placement,
            transfer=transfer,
            synchronisation=synchronisation,
            reduce_dtype=reduce_dtype,
            learning_rate=learning_rate,
            all_gather=all_gather,
            num_parts=num_parts,
            batch=batch,
        )

    if not synchronisation.on_deltas:
        return on_gradients(synchronisation)
    num_first = synchronisation.synchronous_steps
    return DeltaIslandStep(
        gradients=make_gradients(model, loss, placement),
        first_row=start_row,
        optimizer=optimizer,
        placement=placement,
        merge=waves or IslandMerge(synchronisation, placement, transfer, all_gather, last_step),
        synchronous=on_gradients(Synchronisation()) if num_first else None,
        synchronous_steps=num_first,
        learning_rate=learning_rate,
    )


def contributions(grads: Any, count: jax.Array) -> Any:
    """Return gradients, or zeros without examples, see `combiner.contribution`."""
    return jax.tree.map(lambda g: contribution(g, count), grads)


class GradientIslandStep:
    """A step that combines the islands' gradients, once for all microbatches; see `make_island_step`.

    The rows of an island may change: `first_row`, uint32, is the number of its first one in a batch.
    """

    def __init__(
        self,
        *,
        gradients: Callable[..., Sums],
        first_row: int,
        optimizer: optax.GradientTransformation,
        placement: Placement,
        transfer: Transfer,
        synchronisation: Synchronisation,
        reduce_dtype: str,
        learning_rate: optax.Schedule | None,
        all_gather: AllGather,
        num_parts: int = 1,
        batch: Any = None,
    ) -> None:
        self._transfer, self._all_gather = transfer, all_gather
        self.first_row = np.uint32(first_row)
        # a mean sends sums over examples: they are weighted already, and divided where they are used
        of_sums = synchronisation.is_mean
        mesh = placement.mesh
        # with inside "sum" an island sends the sum over its replicas: their mean times their number
        sizes = [mesh.shape[axis] for axis in placement.layout.batch_axes]
        factor = math.prod(sizes) if synchronisation.inside == "sum" else 1
        whole = NamedSharding(mesh, PartitionSpec())

        def local(state: State, batch: Batch, first_row: jax.Array) -> tuple[Sums, dict[str, jax.Array]]:
            key, scale = step_key(state.seed, state.step), scale_of(state.loss_scale)
            found = gradients(state.params, state.model_state, key, batch, first_row, scale)
            grads = without(found.grads, placement.specs.frozen)
            grads = jax.tree.map(lambda g: g * factor, grads)
            own = {}
            if state.loss_scale:
                own["finite"] = jnp.isfinite(optax.tree.norm(contributions(grads, found.count)))
                over = placement.in_float16 & overflowed(state.loss_scale, found.loss_sum, own["finite"])
                own["overflowed"] = jnp.float32(over)
            # what is sent is rounded here, so that 32 bits of it are never written
            return found._replace(grads=by_path(jax.tree.map(lambda g: g.astype(reduce_dtype), grads))), own

        # what each part of the program returns: one part, all gradients, or several
        plan = None
        if num_parts > 1:
            assert batch is not None
            state = placement.specs.abstract
            plan = plan_pieces(local, num_parts, state, batch, math.prod(sizes))
            plan = [[GradientPiece(*piece) for piece in part] for part in all_gather("parts", plan)[0]]
        leaves = by_path(placement.specs.abstract.params)
        of_parts = [None] if plan is None else [
            {p.name: jax.ShapeDtypeStruct(p.shape(leaves[p.path].shape), jnp.dtype(reduce_dtype)) for p in part}
            for part in plan
        ]
        self._combiners = [
            IslandCombiner(
                synchronisation.combiner, placement, transfer, params, of_sums=of_sums, dtype=reduce_dtype
            )
            for params in of_parts
        ]
        self.labels = self._combiners[0].labels
        self.keeps_state = self._combiners[0].keeps_state
        # an island without examples adds nothing, whatever its gradients are
        packs = [partial(c.packing.pack, whole=whole) if of_sums else contributions for c in self._combiners]

        def packed(state: State, batch: Batch, first_row: jax.Array) -> tuple[Sums, dict[str, jax.Array]]:
            found, own = local(state, batch, first_row)
            return found._replace(grads=packs[0](found.grads, found.count)), own

        def update(
            state: State, found: Sums, combine_state: Any, extra: Any, own: dict[str, jax.Array]
        ) -> tuple[State, Metrics]:
            grads = {}
            for part, combiner in zip(found.grads, self._combiners, strict=True):
                grads |= combiner.packing.unpack(part) if of_sums else part
            if plan is not None:
                grads = join_pieces(plan, grads)
            grads = {path: g.astype(jnp.float32) for path, g in grads.items()}
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), placement.specs.abstract.params)
            found = found._replace(grads=like_paths(zeros, {**by_path(zeros), **grads}))
            found = found.of_mean_loss if of_sums else found
            new, metrics = apply_gradients(optimizer, placement, state, found)
            new = new._replace(combine_state=combine_state)
            metrics = {**metrics, **joined_metrics(extra), **own}
            finite = metrics.pop("finite", None)
            return unless_skipped(state, new, metrics, learning_rate, own_finite=finite)

        # between the two programs gradients stay sharded; everything else is replicated
        specs = by_path(without(placement.specs.sharded, placement.specs.frozen))
        shardings_of = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
        if plan is not None:
            shardings_of |= {
                p.name: NamedSharding(mesh, p.spec(specs[p.path])) for part in plan for p in part
            }
        sharded = [c.packing.shardings(shardings_of, whole) if of_sums else shardings_of for c in self._combiners]
        state = placement.state._replace(combine_state=whole)
        self._local = jax.jit(
            packed if plan is None else local,
            in_shardings=(state, placement.batch, whole),
            out_shardings=(
                Sums._make([whole, whole, whole, sharded[0] if plan is None else shardings_of, whole, whole]),
                whole,
            )
            if plan is None
            else None,
        )
        self._parts = None if plan is None else GradientParts(local, plan, packs, sharded, placement)
        self._update = jax.jit(
            offloaded(update, state),
            in_shardings=(state, Sums._make([whole, whole, whole, sharded, whole, whole]), whole, whole, whole),
            out_shardings=(state, whole),
            donate_argnums=0,
        )

    def begin(self, state: State, batch: Batch) -> State:
        """Return the state with that of the combiner, see `IslandStep`."""
        return state._replace(combine_state=[s for c in self._combiners for s in [c.init()]])

    def wanted(self, state: State, batch: Batch) -> State:
        """Return the shapes of what `begin` returns, see `IslandStep`."""
        return state._replace(combine_state=[c.wanted() for c in self._combiners])

    def _run_parts(self, state: State, batch: Batch) -> Any:
        if self._parts is not None:
            yield from self._parts(state, batch, self.first_row)
        else:
            found, own = self._local(state, batch, self.first_row)
            yield found.grads, (found._replace(grads={}), own)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""
        running, mine = [], ()
        for combiner, own_state, (grads, rest) in zip(
            self._combiners, state.combine_state, self._run_parts(state, batch), strict=True
        ):
            # computed before islands meet, so that a slow island is one that arrives late there
            jax.block_until_ready((grads, rest))
            self._all_gather("combine gradients", None)
            if rest is not None:
                found, own = rest
                over = {name: x for name, x in own.items() if name == "overflowed"}
                mine = {**found.of_loss, "squares": found.squares, **over}
            running.append((combiner, grads, combiner.start(grads, found.count if rest is not None else (), own_state, mine), mine))
        model_state = average_model_state(self._transfer, found.model_state, found.count)
        all_combined = [c.finish(grads, started, mine) for c, grads, started, mine in running]
        combined = all_combined[-1]
        own |= {name: combined.sums.pop(name) for name in over}
        # every island makes the same update
        found = Sums(grads=[c.value for c in all_combined], model_state=model_state, **combined.sums)
        return self._update(state, found, [c.state for c in all_combined], [m for c in all_combined for m in c.metrics], own)

    def compiled(self, state: State, batch: Batch) -> jax.stages.Compiled:
        """Return the program of the gradients, of shapes; a step of these shapes compiles it no more."""
        return self._local.lower(state, batch, self.first_row).compile()

    def close(self) -> None:
        """There is nothing to end, see `IslandStep`."""
