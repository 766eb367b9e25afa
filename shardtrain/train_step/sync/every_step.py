"""Combine the islands' gradients in every step, and update alike on all of them; or make local steps.

Next: `local_steps.py`; `waves.py`, which needs more than these.
"""

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.loss import Batch
from shardtrain.train_step.island_compute import IslandCompute
from shardtrain.train_step.island_step import IslandStep
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import Metrics, State
from shardtrain.train_step.sync.local_steps import LocalSteps


class EveryStep(IslandStep):
    """Islands that combine their gradients in every step.

    Args:
      compute: what this island computes.
    """

    def __init__(self, compute: IslandCompute | StageCompute) -> None:
        super().__init__(compute, compute.exchange.combiners)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""
        return self.compute.step_together(state, batch)


def make_sync(
    compute: IslandCompute | StageCompute, synchronisation: Synchronisation, last_step: int = -1
) -> IslandStep:
    """Make the step of an island by a synchronisation without a `distance`.

    Args:
      compute: what this island computes.
      synchronisation: how islands are synchronised.
      last_step: the last step of the run, see `step.make_step`.
    """
    if synchronisation.on_deltas:
        return LocalSteps(compute, synchronisation, last_step)
    return EveryStep(compute)
