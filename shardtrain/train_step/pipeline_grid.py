"""Assign the islands of a run to pipeline stages and replicas."""

from dataclasses import dataclass
from typing import Any


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
