"""Compute an island's own gradients in one program or in parts, and make the combiners that send them.

Next: `gradient_pieces.py`, the parts; `island_compute.py`, which runs them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.combiner import mask_without_examples
from shardtrain.combine.fragments import group_by_path
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.frozen import drop_paths
from shardtrain.functional.loss import Batch
from shardtrain.functional.rng import step_key
from shardtrain.functional.sums import Sums
from shardtrain.train_step.gradient_pieces import (
    GradientPart,
    GradientParts,
    GradientPiece,
    Pack,
    PartPlan,
    PiecePlan,
    join_pieces,
    plan_pieces,
)
from shardtrain.train_step.island_combiner import Channel, IslandCombiner
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.state import State, get_scale, is_overflow

Gradients = Callable[..., Sums]
"""See `gradients.make_gradients`."""


class IslandGradients:
    """The program of an island's gradients, and a combiner for the gradients of each of its parts.

    Args:
      gradients: returns sums over examples for a mean, else the mean, see `make_gradients`.
      placement: the placement of this island.
      channel: to the other islands.
      synchronisation: how islands are synchronised.
      batch: an example, arrays or shapes; only needed for several parts.

    Attributes:
      combiners: the combiner of each part.
      shardings: for each part, name -> sharding of what it sends.
      are_sums: whether gradients are sums over examples, which are divided after they are combined.
    """

    def __init__(
        self,
        gradients: Gradients,
        placement: Placement,
        channel: Channel,
        synchronisation: Synchronisation,
        batch: Batch | None,
    ) -> None:
        mesh, specs, dtype, num_parts = placement.mesh, placement.specs, channel.dtype, channel.num_parts
        local = _make_local(gradients, placement, synchronisation, dtype)
        # a mean sends sums over examples: they are already weighted, and divided where they are used
        self.are_sums = synchronisation.is_mean
        assert num_parts == 1 or self.are_sums
        self._plan: PiecePlan = []
        if num_parts > 1:
            assert batch is not None
            planned = plan_parts(gradients, placement, synchronisation, dtype, num_parts, batch)
            # all ranks use the pieces of rank 0
            plan = channel.all_gather("parts of the gradients", planned.pieces)[0]
            self._plan = [[GradientPiece(*piece) for piece in part] for part in plan]
        params = group_by_path(specs.abstract.params)
        shapes: list[dict[str, jax.ShapeDtypeStruct] | None] = [
            {p.name: jax.ShapeDtypeStruct(p.shape(params[p.path].shape), jnp.float32) for p in part}
            for part in self._plan
        ]
        combiner, transfer = synchronisation.combiner, channel.transfer
        self.combiners = [
            IslandCombiner(combiner, placement, transfer, sent, of_sums=self.are_sums, dtype=dtype)
            for sent in shapes or [None]
        ]
        whole = NamedSharding(mesh, PartitionSpec())
        # an island without examples adds nothing, whatever its gradients are
        packs: list[Pack] = [partial(each.packing.pack, whole=whole) for each in self.combiners]

        def packed(state: State, batch: Batch, first_row: jax.Array) -> Any:
            found, own = local(state, batch, first_row)
            return found._replace(grads=packs[0](found.grads, found.count)), own

        # gradients stay sharded until they are sent; everything else is replicated
        by_name = group_by_path(drop_paths(specs.sharded, specs.frozen))
        by_name |= {piece.name: piece.spec(by_name[piece.path]) for part in self._plan for piece in part}
        sharded = {name: NamedSharding(mesh, spec) for name, spec in by_name.items()}
        self.shardings = [each.packing.shardings(sharded, whole) for each in self.combiners]
        is_one = len(self.combiners) == 1
        returned = Sums._make([whole, whole, whole, self.shardings[0] if is_one else whole, whole, whole])
        self._whole_program = jax.jit(
            packed if is_one else local,
            in_shardings=(placement.state._replace(combine_state=whole), placement.batch, whole),
            out_shardings=(returned, whole),
            compiler_options=placement.compiler_options,
        )
        self._parts = None
        if not is_one:
            self._parts = GradientParts(self._whole_program, self._plan, packs, self.shardings[-1], whole)

    def __call__(self, state: State, batch: Batch, first_row: Any) -> Iterator[GradientPart]:
        """Start the program, and yield what each part of it sends, without waiting."""
        if self._parts is not None:
            yield from self._parts(state, batch, first_row)
        else:
            found, own = self._whole_program(state, batch, first_row)
            yield GradientPart(found.grads, found.count, (found._replace(grads={}), own))

    def joined(self, combined: Sequence[dict[str, jax.Array]]) -> dict[str, jax.Array]:
        """Return path -> combined gradient, float32, in a jit, from what was combined of each part."""
        grads: dict[str, jax.Array] = {}
        for combiner, part in zip(self.combiners, combined, strict=True):
            grads |= combiner.packing.unpack(part)
        grads = join_pieces(self._plan, grads) if self._plan else grads
        return {path: g.astype(jnp.float32) for path, g in grads.items()}

    def lowered(self, state: State, batch: Batch, first_row: Any) -> jax.stages.Lowered:
        """Return the program as one, for arrays or shapes; its memory is about that of its parts."""
        return self._whole_program.lower(state, batch, first_row)


def plan_parts(
    gradients: Gradients,
    placement: Placement,
    synchronisation: Synchronisation,
    dtype: str,
    num_parts: int,
    batch: Mapping[str, Any],
) -> PartPlan:
    """Plan the gradients that an island sends after each of the programs that compute them, and when.

    Nothing is computed, so the mesh of the placement may be abstract.

    Args:
      gradients: returns sums over examples, see `make_gradients`.
      placement: the placement of this island.
      synchronisation: how islands are synchronised.
      dtype: the dtype of what is sent.
      num_parts: the largest number of programs.
      batch: an example, arrays or shapes (microbatches, rows, ...).
    """
    local = _make_local(gradients, placement, synchronisation, dtype)
    return plan_pieces(local, num_parts, placement.specs.abstract, batch, _count_replicas(placement))


def _count_replicas(placement: Placement) -> int:
    return math.prod(placement.mesh.shape[axis] for axis in placement.layout.batch_axes)


def _make_local(
    gradients: Gradients, placement: Placement, synchronisation: Synchronisation, dtype: str
) -> Callable[..., Any]:
    """Return the whole program, before packing, see `gradient_pieces.Local`."""
    # with inside "sum" an island sends the sum over its replicas: their mean times their number
    factor = _count_replicas(placement) if synchronisation.inside == "sum" else 1

    def local(state: State, batch: Batch, first_row: jax.Array) -> tuple[Sums, dict[str, jax.Array]]:
        key, scale = step_key(state.seed, state.step), get_scale(state.loss_scale)
        found = gradients(state.params, state.model_state, key, batch, first_row, scale)
        grads = drop_paths(found.grads, placement.specs.frozen)
        grads = jax.tree.map(lambda g: g * factor, grads)
        own = {}
        if state.loss_scale:
            counted = jax.tree.map(lambda g: mask_without_examples(g, found.count), grads)
            own["finite"] = jnp.isfinite(optax.tree.norm(counted))
            over = placement.in_float16 & is_overflow(state.loss_scale, found.loss_sum, own["finite"])
            own["overflowed"] = jnp.float32(over)
        # what is sent is rounded here, so that 32 bits of it are never written
        return found._replace(grads=group_by_path(jax.tree.map(lambda g: g.astype(dtype), grads))), own

    return local
