"""What connects a stage to other islands: its place in the grid, its mailbox, sums over stages and pipelines.

If pipelines cut a model differently, a stage shares its first blocks with one stage of another pipeline and
the next blocks with another stage: owners of the same blocks form groups. Next: `stage_compute.py`,
`trainer/synchronisation.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine import Combiner
from shardtrain.combine.fragments import group_by_path, restore_paths
from shardtrain.functional.model import Tree
from shardtrain.islands.transfer import Transfer
from shardtrain.pipeline.stacking import OwnerGroup
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.train_step.island_combiner import AllGather, IslandCombiner, average_model_state
from shardtrain.train_step.placement import Placement

if TYPE_CHECKING:
    from shardtrain.islands.mailbox import Mailbox  # importing it starts MPI


@dataclass(frozen=True, kw_only=True)
class PipelineGrid:
    """The stage and replica of each island: i % stages and i // stages for island i, as in HyPar-Flow.

    Args:
      num_islands: number of islands of the run.
      num_stages: number of islands of one pipeline.
      island: the number of this island.

    Raises:
      ValueError: the number of islands is not a multiple of the stages.
    """

    num_islands: int
    num_stages: int
    island: int

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.num_islands % self.num_stages:
            divisors = [n for n in range(1, self.num_islands + 1) if self.num_islands % n == 0]
            raise ValueError(
                f"partitions is {self.num_stages}, and there are {self.num_islands} islands, which do not"
                f" make whole pipelines; use --partitions {' or '.join(map(str, divisors))}, or start"
                f" {-(-self.num_islands // max(self.num_stages, 1)) * max(self.num_stages, 1)} islands"
            )

    @property
    def stage(self) -> int:
        """The stage of this island."""
        return self.island % self.num_stages

    @property
    def replica(self) -> int:
        """The replica (a whole pipeline) that this island belongs to."""
        return self.island // self.num_stages

    @property
    def num_replicas(self) -> int:
        """The number of replicas, each a whole pipeline."""
        return self.num_islands // self.num_stages

    def select_replica(self, values: list[Any], replica: int | None = None) -> list[Any]:
        """Select the values of one replica's stages (by default this island's) from a list by island."""
        first = (self.replica if replica is None else replica) * self.num_stages
        return values[first : first + self.num_stages]


def gather_losses(
    name: str, loss_sums: dict[str, Any], grid: PipelineGrid, last_stage: int, all_gather: AllGather
) -> list[dict[str, Any]]:
    """All-gather the loss sums of each pipeline.

    Args:
      name: the name of the all-gather.
      loss_sums: the sums of this pipeline; only those of its last stage are used.
      grid: the stage and replica of each island.
      last_stage: the stage that computes the loss.
      all_gather: gathers a value of every rank, by name.
    """
    own = jax.tree.map(float, jax.device_get(loss_sums)) if grid.stage == last_stage else None
    found = all_gather(name, own)
    return [grid.select_replica(found, replica)[last_stage] for replica in range(grid.num_replicas)]


def sum_losses(by_replica: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the loss sums of all pipelines in their order, so that every rank gets the same bits."""
    found = [{**x, "metrics": {name: tuple(pair) for name, pair in x["metrics"].items()}} for x in by_replica]
    return jax.tree.map(lambda *x: np.float32(sum(x)), *found)


class StageSums:
    """Sums over the stages of one pipeline, added up from the last stage to the first and then sent to all.

    Args:
      grid: the stage and replica of each island.
      mailbox: to the other stages of this pipeline.
      tag: MPI tag of the messages.

    Attributes:
      requests_barrier: whether a stage requested a barrier at its backward of the batch that is updated; None
        with one batch in flight. With several, stages are at different batches, so none can wait for the
        others at the end of a step.
    """

    def __init__(self, grid: PipelineGrid, mailbox: "Mailbox", tag: int) -> None:
        self._grid, self._mailbox, self._tag = grid, mailbox, tag
        self.requests_barrier: bool | None = None

    def send_up(self, name: str, tree: Any) -> Any:
        """Add numbers to the sums of later stages, send the sums to the previous stage, and return them.

        Args:
          name: what is added up, for the message if a stage is missing.
          tree: numbers, with the same structure on all stages; sums are in float64.
        """
        return self._relay(name, tree, -1)

    def send_down(self, name: str, tree: Any) -> Any:
        """Broadcast the numbers of the first stage to all stages; `name` and `tree` are as for `send_up`."""
        return self._relay(name, tree, 1)

    def add(self, name: str, tree: Any) -> Any:
        """Return the sums over all stages on each of them; the arguments are those of `send_up`."""
        return self.send_down(name, self.send_up(name, tree))

    def _relay(self, name: str, tree: Any, step: int) -> Any:
        """Pass numbers on to the stage `step` further; up (-1) they are added to those that arrive."""
        leaves, structure = jax.tree.flatten(tree)
        values, stages = np.array(leaves, np.float64), range(self._grid.num_stages)
        source, target = self._grid.stage - step, self._grid.stage + step
        if source in stages:
            what = f"{name} from stage {source}"
            arrived = self._mailbox.receive(values.shape, values.dtype, source, self._tag, what)
            values = values + arrived if step < 0 else arrived
        if target in stages:
            self._mailbox.send(values, target, self._tag)
        return jax.tree.unflatten(structure, values.tolist())


OF_STATE = ("params/", "opt_state/", "outer_state/")
"""Beginnings of the paths of the state's arrays that may be of parameters."""

ALL, REST = "all", "rest"
"""In place of rows: the whole array; or an array of no parameter, such as a count, which all owners have."""

Rows = tuple[int, ...] | str


class OwnerTransfers:
    """The groups of owners that a stage belongs to, in the order of blocks, and the transfer of each group.

    Args:
      stage_model: the parts of the model on this stage.
      groups: the groups of this stage.
      transfers: for each group, to its islands.
    """

    def __init__(
        self, stage_model: StageModel, groups: Sequence[OwnerGroup], transfers: Sequence[Transfer]
    ) -> None:
        assert len(groups) == len(transfers)
        self.groups, self.transfers = tuple(groups), tuple(transfers)
        self._stage_model = stage_model
        self._numbers = stage_model.block_numbers
        self._params = frozenset(group_by_path(stage_model.own(stage_model.traced.params)))
        self._programs: dict[Any, Any] = {}

    def shapes(self, params: Any) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """Return path -> shape of each group's part of a tree like the stage's parameters."""
        return jax.eval_shape(self._split, group_by_path(params))

    def split(self, tree: Any) -> list[dict[str, jax.Array]]:
        """Return path -> array of each group's part; arrays of no parameter are in every group.

        Args:
          tree: arrays on the mesh, whose paths end in the paths of parameters.
        """
        leaves = group_by_path(tree)
        if len(self.groups) == 1:
            return [leaves]
        shardings = [
            {path: x.sharding for path, x, _ in self._list_group(number, leaves)}
            for number in range(len(self.groups))
        ]
        return self._compile("split", self._split, leaves, shardings)(leaves)

    def _split(self, leaves: Mapping[str, jax.Array]) -> list[dict[str, jax.Array]]:
        return [
            {
                path: x if isinstance(rows, str) else jnp.take(x, jnp.asarray(rows), axis=0)
                for path, x, rows in self._list_group(number, leaves)
            }
            for number in range(len(self.groups))
        ]

    def join(self, tree: Any, parts: Sequence[Mapping[str, jax.Array]]) -> Any:
        """Join the parts of all groups, the reverse of `split`.

        Args:
          tree: the tree that was split.
          parts: the part of each group.
        """
        if len(self.groups) == 1:
            return restore_paths(tree, parts[0])
        leaves = group_by_path(tree)

        def join(parts: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
            found = {}
            for number in reversed(range(len(self.groups))):
                for path, x, rows in self._list_group(number, leaves):
                    if isinstance(rows, str):
                        found[path] = parts[number][path]  # of the first group, if all have it
                    else:
                        whole = found.get(path, jnp.zeros(x.shape, x.dtype))
                        found[path] = whole.at[jnp.asarray(rows)].set(parts[number][path])
            return found

        shardings = {path: x.sharding for path, x in leaves.items()}
        return restore_paths(tree, self._compile("join", join, leaves, shardings)(list(parts)))

    def _list_group(self, number: int, leaves: Mapping[str, Any]) -> list[tuple[str, Any, Rows]]:
        """Return (path, array, rows) of a group's part."""
        is_params = self._params <= leaves.keys()
        found = [
            (
                path,
                x,
                self._rows(number, path, x.shape) if is_params or path.startswith(OF_STATE) else REST,
            )
            for path, x in leaves.items()
        ]
        return [(path, x, rows) for path, x, rows in found if rows]

    def _rows(self, number: int, path: str, shape: tuple[int, ...]) -> Rows:
        """Return the rows of an array that a group has; () if it has none."""
        group, keys = self.groups[number], path.split("/")
        ends = ("/".join(keys[start:]) for start in range(len(keys)))
        name = next((end for end in ends if end in self._params), None)
        if name is None:
            return REST
        if not self._stage_model.is_block(name):
            # the first stages own it in every replica, or the last ones
            return ALL if set(group.stages) == {self._stage_model.users[name][0]} else ()
        if not self._stage_model.stacked:
            return ALL if int(name.split("/")[1]) in group.blocks else ()
        if shape[:1] != (len(self._numbers),):
            return REST
        return tuple(self._numbers.index(block) for block in group.blocks)

    def _compile(self, what: str, function: Any, leaves: Mapping[str, Any], shardings: Any) -> Any:
        key = (what, *((path, x.shape, x.dtype, x.sharding) for path, x in leaves.items()))
        if key not in self._programs:
            self._programs[key] = jax.jit(function, out_shardings=shardings)
        return self._programs[key]


class OwnerCombiners:
    """A combiner for each group of owners that a stage belongs to.

    Args:
      combiner: any; a mean or sum if pipelines are cut differently.
      placement: the placement of the stage's own parameters on this island.
      owners: the groups and their transfers.

    Attributes:
      combiners: the combiner of each group.
    """

    def __init__(self, combiner: Combiner, placement: Placement, owners: OwnerTransfers) -> None:
        self._owners, self._whole = owners, NamedSharding(placement.mesh, PartitionSpec())
        shapes = owners.shapes(placement.specs.abstract.params)
        self.combiners = [
            IslandCombiner(combiner, placement, transfer, own)
            for transfer, own in zip(owners.transfers, shapes, strict=True)
        ]

    def combine(
        self, grads: Tree, combine_state: list[Any], count: np.float32, model_state: Tree
    ) -> tuple[Tree, list[Any], list[Any], Tree]:
        """Return (combined gradients, combiner states, metrics by bucket, averaged model state).

        Args:
          grads: gradients of the mean loss of this pipeline.
          combine_state: of each combiner's `init`, or from the previous step.
          count: this pipeline's examples.
          model_state: the model state of this pipeline; it is averaged by examples.
        """
        on_mesh = jax.device_put(count, self._whole)
        values, states, metrics = [], [], []
        # all islands go through their groups in the same order, so that none waits for another in a ring
        parts = self._owners.split(grads)
        for number, (combiner, sent) in enumerate(zip(self.combiners, parts, strict=True)):
            started = combiner.start(sent, on_mesh, combine_state[number])
            if number == 0:
                # the model state is averaged while buckets of gradients are under way
                model_state = average_model_state(self._owners.transfers[0], model_state, on_mesh)
            combined = combiner.finish(sent, started)
            values.append({**sent, **combined.value})
            states.append(combined.state)
            metrics += combined.metrics
        return self._owners.join(grads, values), states, metrics, model_state


class StageLinks(NamedTuple):
    """The connections of a stage to other islands.

    Args:
      grid: the stage and replica of each island.
      mailbox: to the other stages of this pipeline.
      owners: the transfers to the stages of other pipelines that own the same blocks.
      all_gather: gathers a value of every rank, by name.
      loads_programs: whether to wait for the programs that the first pipeline compiles, and load them.
    """

    grid: PipelineGrid
    mailbox: "Mailbox"
    owners: OwnerTransfers
    all_gather: AllGather
    loads_programs: bool = False
