"""What connects a stage to other islands: its place in the grid, its mailbox, sums over stages and pipelines.

Next: `stage_compute.py`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from shardtrain.train_step.channel import AllGather
from shardtrain.train_step.owner_transfers import OwnerTransfers

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

    @property
    def is_last(self) -> bool:
        """Whether this is the stage with the highest number."""
        return self._grid.stage == self._grid.num_stages - 1

    def send_up(self, name: str, tree: Any) -> Any:
        """Add numbers to the sums of later stages, send the sums to the previous stage, and return them.

        Args:
          name: what is added up, for the message if a stage is missing.
          tree: numbers, with the same structure on all stages; sums are in float64.
        """
        leaves, structure = jax.tree.flatten(tree)
        values, stage = np.array(leaves, np.float64), self._grid.stage
        if not self.is_last:
            values = values + self._receive(name, values, stage + 1)
        if stage > 0:
            self._mailbox.send(values, stage - 1, self._tag)
        return jax.tree.unflatten(structure, values.tolist())

    def send_down(self, name: str, tree: Any) -> Any:
        """Broadcast the numbers of the first stage to all stages; `name` and `tree` are as for `send_up`."""
        leaves, structure = jax.tree.flatten(tree)
        values, stage = np.array(leaves, np.float64), self._grid.stage
        if stage > 0:
            values = self._receive(name, values, stage - 1)
        if not self.is_last:
            self._mailbox.send(values, stage + 1, self._tag)
        return jax.tree.unflatten(structure, values.tolist())

    def add(self, name: str, tree: Any) -> Any:
        """Return the sums over all stages on each of them; the arguments are those of `send_up`."""
        return self.send_down(name, self.send_up(name, tree))

    def _receive(self, name: str, like: np.ndarray, source: int) -> np.ndarray:
        return self._mailbox.receive(like.shape, like.dtype, source, self._tag, f"{name} from stage {source}")
