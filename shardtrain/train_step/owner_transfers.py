"""Split the arrays of a stage by the owners of its blocks in other pipelines, and combine each group.

If pipelines cut a model differently, a stage shares its first blocks with one stage of another pipeline and
the next blocks with another stage. Next: `stage_compute.py`, `trainer/synchronisation.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
from shardtrain.train_step.island_combiner import IslandCombiner
from shardtrain.train_step.island_totals import average_model_state
from shardtrain.train_step.placement import Placement

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
      labels: names of the entries of a metric (L,), group by group.
      keeps_state: whether the combiner has a state.
    """

    def __init__(self, combiner: Combiner, placement: Placement, owners: OwnerTransfers) -> None:
        self._owners, self._whole = owners, NamedSharding(placement.mesh, PartitionSpec())
        shapes = owners.shapes(placement.specs.abstract.params)
        self._combiners = [
            IslandCombiner(combiner, placement, transfer, own)
            for transfer, own in zip(owners.transfers, shapes, strict=True)
        ]
        self.labels = [label for each in self._combiners for label in each.labels]
        self.keeps_state = any(each.keeps_state for each in self._combiners)

    def init(self) -> list[Any]:
        """Create the combiner's state, group by group."""
        return [each.init() for each in self._combiners]

    def wanted(self) -> list[Any]:
        """Return the shapes, dtypes and shardings of the combiner's state."""
        return [each.wanted() for each in self._combiners]

    def combine(
        self, grads: Tree, combine_state: list[Any], count: np.float32, model_state: Tree
    ) -> tuple[Tree, list[Any], list[Any], Tree]:
        """Return (combined gradients, combiner states, metrics by bucket, averaged model state).

        Args:
          grads: gradients of the mean loss of this pipeline.
          combine_state: from `init`, or from the previous step.
          count: this pipeline's examples.
          model_state: the model state of this pipeline; it is averaged by examples.
        """
        on_mesh = jax.device_put(count, self._whole)
        values, states, metrics = [], [], []
        # all islands go through their groups in the same order, so that none waits for another in a ring
        parts = self._owners.split(grads)
        for number, (combiner, sent) in enumerate(zip(self._combiners, parts, strict=True)):
            started = combiner.start(sent, on_mesh, combine_state[number])
            if number == 0:
                # the model state is averaged while buckets of gradients are under way
                model_state = average_model_state(self._owners.transfers[0], model_state, on_mesh)
            combined = combiner.finish(sent, started)
            values.append({**sent, **combined.value})
            states.append(combined.state)
            metrics += combined.metrics
        return self._owners.join(grads, values), states, metrics, model_state
