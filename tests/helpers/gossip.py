"""A way to synchronise, and a combiner, that the package does not have: gossip with one neighbour."""

from dataclasses import dataclass
from typing import Literal

import jax

from shardtrain.combine import Combined, Combiner
from shardtrain.combine.synchronisation import Round, Synchronisation


def average_with_the_one_before(tree, count, state, group):
    before = [(rank - 1) % group.size for rank in range(group.size)]
    return Combined(jax.tree.map(lambda x: (x + group.exchange(x, before)) / 2, tree))


NEIGHBOUR = Combiner(lambda tree: (), average_with_the_one_before, is_common=False)


@dataclass(frozen=True, kw_only=True)
class Gossip(Synchronisation):
    """In each step a replica averages with the one before it what both changed, and every few steps with all.

    References:
      Chen et al. 2021, Accelerating gossip SGD with periodic global averaging.
    """

    on: Literal["gradients", "deltas"] = "deltas"
    every: int = 3

    @property
    def rounds(self):
        return Round(0, NEIGHBOUR), Round(0, self.combiner)

    def is_sent(self, number, step, last_step=-1):
        is_common = super().is_sent(0, step, last_step)
        return is_common == (number == 1)
