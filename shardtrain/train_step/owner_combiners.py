"""Combine the gradients of a stage with the owners of the same blocks in the other pipelines.

Next: `owner_transfers.py`, who they are; `stage_step.py`, which uses it.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine import Combiner
from shardtrain.functional.model import Tree
from shardtrain.train_step.island_combiner import IslandCombiner
from shardtrain.train_step.island_totals import average_model_state
from shardtrain.train_step.owner_transfers import OwnerTransfers
from shardtrain.train_step.placement import Placement


class OwnerCombiners:
    """A combiner for each group of owners that a stage is in: where all pipelines are cut alike, one.

    Args:
      combiner: any; where pipelines are cut differently, a mean or sum.
      placement: of the stage's own parameters on this island.
      owners: the groups, and the transfer in each.

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
          grads: those of the mean loss of this pipeline.
          combine_state: from `init`, or of the step before.
          count: this pipeline's examples.
          model_state: of this pipeline; averaged by examples.
        """
        on_mesh = jax.device_put(count, self._whole)
        values, states, metrics = [], [], []
        # group after group, in the same order on all islands: none waits for another in a ring
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
