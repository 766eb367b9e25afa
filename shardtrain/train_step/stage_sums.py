"""Add up numbers over the stages of one pipeline, without the other pipelines. Next: `stage_step.py`."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardtrain.train_step.island_merge import AllGather
from shardtrain.train_step.pipeline_grid import PipelineGrid


def gather_losses(
    name: str, loss_sums: dict[str, Any], grid: PipelineGrid, last_stage: int, all_gather: AllGather
) -> list[dict[str, Any]]:
    """Return the sums of the loss of each pipeline, on every rank.

    Args:
      name: the name of the all-gather.
      loss_sums: those of this pipeline, on its last stage.
      grid: which island has which stage.
      last_stage: the stage that computes the loss.
      all_gather: gathers a value of every rank, by name.
    """
    own = jax.tree.map(float, jax.device_get(loss_sums)) if grid.stage == last_stage else None
    found = all_gather(name, own)
    return [grid.select_replica(found, replica)[last_stage] for replica in range(grid.num_replicas)]


def sum_losses(by_replica: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the sums of the loss over pipelines, in their order: the same on every rank."""
    found = [{**x, "metrics": {name: tuple(pair) for name, pair in x["metrics"].items()}} for x in by_replica]
    return jax.tree.map(lambda *x: np.float32(sum(x)), *found)


if TYPE_CHECKING:
    from shardtrain.islands.mailbox import Mailbox  # importing it starts MPI


class StageSums:
    """Sums over the stages of one pipeline: added up from the last stage to the first, and passed on to all.

    Args:
      grid: which island has which stage.
      mailbox: to the other stages of this pipeline.
      tag: MPI tag of the messages.
    """

    def __init__(self, grid: PipelineGrid, mailbox: "Mailbox", tag: int) -> None:
        self._grid, self._mailbox, self._tag = grid, mailbox, tag

    @property
    def is_last(self) -> bool:
        """Whether this is the stage with the highest number."""
        return self._grid.stage == self._grid.num_stages - 1

    def send_up(self, name: str, tree: Any) -> Any:
        """Add numbers to those of later stages, send the sums to the stage before, and return them.

        Args:
          name: what is added up, for the message where a stage is missing.
          tree: numbers, the same structure on all stages; sums are in float64.
        """
        leaves, structure = jax.tree.flatten(tree)
        values, stage = np.array(leaves, np.float64), self._grid.stage
        if not self.is_last:
            values = values + self._receive(name, values, stage + 1)
        if stage > 0:
            self._mailbox.send(values, stage - 1, self._tag)
        return jax.tree.unflatten(structure, values.tolist())

    def send_down(self, name: str, tree: Any) -> Any:
        """Return the numbers of the first stage, and pass them on.

        Args:
          name: what they are, for the message where a stage is missing.
          tree: numbers, the same structure on all stages; only those of the first stage matter.
        """
        leaves, structure = jax.tree.flatten(tree)
        values, stage = np.array(leaves, np.float64), self._grid.stage
        if stage > 0:
            values = self._receive(name, values, stage - 1)
        if not self.is_last:
            self._mailbox.send(values, stage + 1, self._tag)
        return jax.tree.unflatten(structure, values.tolist())

    def add(self, name: str, tree: Any) -> Any:
        """Return the sums over all stages, the same on all of them; see `up` for the arguments."""
        return self.send_down(name, self.send_up(name, tree))

    def _receive(self, name: str, like: np.ndarray, source: int) -> np.ndarray:
        return self._mailbox.receive(like.shape, like.dtype, source, self._tag, f"{name} from stage {source}")


class StagesInStep(StageSums):
    """A virtual worker whose stages are all at the end of the same step (`wave_merge.VirtualWorker`)."""

    def any_requests_barrier(self, own: bool) -> bool:
        """Ask all stages."""
        return self.add("the request of a barrier", float(own)) > 0

    def find_barrier(self, answered: int) -> int:
        """Return the answer of the first stage."""
        return int(self.send_down("the next barrier", float(answered)))


class StagesInFlight(StageSums):
    """A virtual worker whose stages are at different batches (`wave_merge.VirtualWorker`).

    Attributes:
      requests_barrier: whether a stage requested a barrier at its backward of the batch that is updated.
    """

    requests_barrier = False

    def any_requests_barrier(self, own: bool) -> bool:
        """Return what came with the cotangents."""
        return self.requests_barrier

    def find_barrier(self, answered: int) -> int:
        """Return the answer of the first stage."""
        return int(self.send_down("the next barrier", float(answered)))
