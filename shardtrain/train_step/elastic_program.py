"""The step of a mesh for an elastic run: slots are parts of the rows of a batch, as equal as they can be.

Next: `elastic/island.py`, which asks for slots and for updates.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data.batches import Batches
from shardtrain.data.row_split import RowSplit
from shardtrain.elastic.epoch import find_next
from shardtrain.errors.messages import refuse
from shardtrain.optim.scaling import RATES
from shardtrain.train_step.elastic_exchange import (
    CODED,
    Rate,
    add_outer_state,
    find_exchange_problems,
    find_exchange_shardings,
    make_exchange,
    split_codec,
)
from shardtrain.train_step.island_compute import Training
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.slot_rows import SlotProgram, SlotRows
from shardtrain.train_step.state import State


class ElasticProgram(SlotProgram):
    """What the islands of an elastic run train together, on the mesh of each; see `elastic.program.Program`.

    A row's sample and its dropout depend on the step and its number in the batch, so on any number of islands
    the losses are those of one device.

    Args:
      training: model, loss, optimizer and schedule.
      placement: the placement on this island's mesh, whose own replicas take the mean; meshes may differ.
      batches: the whole batches, equal on all islands, from their first one on.
      num_slots: number of slots of a batch; at most its rows.
      state: the state before the first step, of `init_state`; equal seeds make equal states.
      synchronisation: how slots are synchronised, each a replica; its `every` is that of `Membership`.
      members: most members, if a step reads a batch for each (`Membership.batch` "members"); 1 for one batch.
      rate: how the learning rate grows with the batches of a step, of `optim.scaling.RATES`. The optimizer
        must apply its rate last, as those of `st.Optimizer` do.

    Attributes:
      metrics: of the last exchange, as those of `make_step`; with local steps, sums over them. {} before it.
      codecs: see `elastic.program.Program`.
      recent: number of steps done and metrics, of the newest exchanges.

    Raises:
      ValueError: there are more slots than rows, slots cannot be synchronised like this, statistics of the
        model would depend on the mesh, its stages are unequal, or the samples are of a stream.
    """

    def __init__(
        self,
        training: Training,
        placement: Placement,
        batches: Batches,
        num_slots: int,
        state: State,
        synchronisation: Synchronisation = Synchronisation(),
        members: int = 1,
        rate: str = "none",
    ) -> None:
        problems = find_exchange_problems(synchronisation)
        if members > 1 and synchronisation.on_deltas:
            problems.append(
                "replicas take local steps, and a step reads a batch for each member; use one batch"
            )
        problems += _find_problems(placement, batches, num_slots, state, synchronisation)
        refuse("an elastic run cannot train this", problems)
        codec, synchronisation = split_codec(synchronisation)
        self._members, self._every = members, synchronisation.every
        state = add_outer_state(state, synchronisation, placement)
        rows = SlotRows(batches, num_slots, placement, every=self._every)
        super().__init__(rows, state, find_exchange_shardings(synchronisation, placement))
        self._exchange = make_exchange(
            training, placement, synchronisation, num_slots * members, _make_rate(rate, num_slots, members)
        )
        self._add = jax.jit(lambda total, more: jax.tree.map(jnp.add, total, more), donate_argnums=0)
        updated = jax.jit(
            self._exchange.update,
            in_shardings=(self._shardings, None),
            out_shardings=(self._shardings, NamedSharding(placement.mesh, PartitionSpec())),
            donate_argnums=0,
            compiler_options=placement.compiler_options,
        )
        # compiled before the island joins, as the others would wait for it
        number = np.uint32(0)
        total = self._exchange.contribute(state, [self._rows.load_first()], number, number, jax.eval_shape)
        self._update = updated.lower(state, total).compile()
        self.codecs = {
            name: jax.tree.map(lambda _, name=name: codec if name in CODED else "", each)
            for name, each in total.items()
        }

    def compute(self, step: int, slots: Sequence[int], batches: range | None = None) -> Any:
        """Return what the exchange sums, see `make_exchange`, over some slots until the next exchange.

        Args:
          step: the first step.
          slots: their numbers; in steps of several batches slots of the second one follow those of the first.
          batches: numbers of the batches of this step; None for the batch of each step's own number.

        Raises:
          ValueError: there are more batches than `members`.
        """
        if len(batches or ()) > self._members:
            raise ValueError(
                f"a step of {len(batches or ())} batches, and members is {self._members}; make it more"
            )

        def contribute(found: tuple[int, np.uint32, Iterator[Any]]) -> Any:
            slot, first_row, rows = found
            return self._exchange.contribute(self.state, rows, first_row, np.uint32(slot))

        return reduce(self._add, map(contribute, self._rows.iterate(step, slots, batches)))

    def apply(self, step: int, total: Any) -> None:
        """Update the state by the sums over a whole batch, or all batches until the exchange."""
        self._state, self.metrics = self._update(self.state, total)
        self.recent.append((find_next(step, self._every), self.metrics))

    def save(self, folder: Path) -> None:
        """Save the state into a folder, by Orbax."""
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.resolve() / "state", self.state)

    def restore(self, folder: Path) -> None:
        """Set the state that `save` wrote, also on another mesh."""
        with ocp.StandardCheckpointer() as checkpointer:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
            self._state = checkpointer.restore(folder.resolve() / "state", like)


def _make_rate(rule: str, num_slots: int, members: int) -> Rate | None:
    """Return number of slots of a step -> factor of its learning rate; None if that stays."""
    factors = [RATES[rule](number) for number in range(members + 1)]
    if rule == "none":
        return None
    return lambda slots: jnp.array(factors, jnp.float32)[jnp.round(slots / num_slots).astype(jnp.int32)]


def _find_problems(
    placement: Placement, batches: Batches, num_slots: int, state: State, synchronisation: Synchronisation
) -> list[str]:
    """Return why slots of these batches cannot be trained on a mesh."""
    problems = []
    if num_slots > batches.batch:
        problems.append(f"a batch of {batches.batch} rows has no {num_slots} slots; use fewer")
    if state.model_state and (problem := _find_statistics_problem(placement, batches.batch, num_slots)):
        problems.append(problem)
    if not placement.synchronisation.is_mean:
        problems.append("the replicas of its mesh are combined by another combiner; use the mean there")
    if state.loss_scale and synchronisation.on_deltas:
        problems.append("replicas that take local steps in float16 have scales of their own; use bfloat16")
    if placement.stages is not None and not placement.stages.is_plain:
        problems.append(
            "the stages of its mesh store the blocks in another order than other meshes do; use equal"
            " stages, without virtual ones"
        )
    if getattr(batches.source, "is_stream", False):
        problems.append("the samples are of a stream, of which no batch can be read again; use a file")
    return problems


def _find_statistics_problem(placement: Placement, rows: int, num_slots: int) -> str:
    """Return why statistics over the rows of a slot would depend on the mesh; "" if they do not."""
    sizes, layout = placement.mesh.shape, placement.layout
    if replicas := [axis for axis in layout.replica_axes if sizes[axis] > 1]:
        return (
            "the model has a state, such as statistics of a batch, which replicas of the mesh would compute"
            f" of parts of a slot; use a mesh without {', '.join(replicas)}"
        )
    if rows % (num_slots * RowSplit.of(sizes, layout.batch_axes).multiple):
        return (
            "the model has a state, such as statistics of a batch, in which rows of padding would count; use"
            f" a batch that {num_slots} slots divide, and the mesh then too, instead of {rows} rows"
        )
    return ""
