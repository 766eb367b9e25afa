"""The step of one island among several: what it computes, and how it synchronises with the others.

Next: `island_compute.py` (an island with the whole model) and `stage_compute.py` (a pipeline stage), which
compute; `sync/`, the ways to synchronise.
"""

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.loss import Batch
from shardtrain.train_step.channel import Channel
from shardtrain.train_step.island_compute import IslandCompute, Training
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import Metrics, State
from shardtrain.train_step.sync.every_step import EveryStep
from shardtrain.train_step.sync.island_sync import IslandSync
from shardtrain.train_step.sync.local_steps import LocalSteps
from shardtrain.train_step.sync.merge import Merge


class IslandStep:
    """The step of one island: (state, batch) -> (state, metrics).

    Metrics are those of `step.make_step`, over all islands. With local steps the metrics of the loss come
    with the step that merges, and have count 0 until then; learning_rate, and grad_norm and skipped until
    then, are the island's own.

    Args:
      compute: what this island computes.
      sync: how it synchronises.

    Attributes:
      labels: names of the entries of a combiner's metric (L,).
      keeps_state: whether the combiner has a state.
    """

    def __init__(self, compute: IslandCompute | StageCompute, sync: IslandSync) -> None:
        self.compute, self.sync = compute, sync
        self.labels, self.keeps_state = sync.labels, sync.keeps_state

    def begin(self, state: State, batch: Batch) -> State:
        """Return the state before the first step with what this island needs for the exchange.

        Args:
          state: of `init_state`.
          batch: arrays or shapes.
        """
        return self.sync.begin(state, self.compute.find_sum_shapes(state, batch))

    def wanted(self, state: State, batch: Batch) -> State:
        """Return the shapes, dtypes and shardings of what `begin` returns, for those of `init_state`."""
        return self.sync.wanted(state, self.compute.find_sum_shapes(state, batch))

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""
        return self.sync.run(self.compute, state, batch)

    def close(self) -> None:
        """End the threads of this step."""
        self.sync.close()
        self.compute.close()


def make_island_step(
    training: Training,
    placement: Placement,
    channel: Channel,
    synchronisation: Synchronisation = Synchronisation(),
    *,
    start_row: int = 0,
    last_step: int = -1,
    merge: Merge | None = None,
    batch: Batch | None = None,
) -> IslandStep:
    """Make the training step of one island that has the whole model.

    Args:
      training: model, loss and optimizer.
      placement: the placement of model and optimizer on this island, whose own replicas are averaged.
      channel: to the other islands.
      synchronisation: how islands are synchronised.
      start_row: the number of this island's first row in the whole batch.
      last_step: the last step of the run, see `step.make_step`.
      merge: the merge of a synchronisation with a `distance`; None makes that of other synchronisations.
      batch: an example, arrays or shapes (microbatches, rows, ...); only needed for gradients in several
        programs.
    """
    assert placement.synchronisation.is_mean
    compute = IslandCompute(training, placement, channel, synchronisation, start_row, batch)
    return IslandStep(compute, make_sync(compute, synchronisation, last_step, merge))


def make_sync(
    compute: IslandCompute | StageCompute,
    synchronisation: Synchronisation,
    last_step: int = -1,
    merge: Merge | None = None,
) -> IslandSync:
    """Make the behaviour of a synchronisation; the arguments are those of `make_island_step`."""
    assert (merge is None) == (synchronisation.distance is None)
    if not synchronisation.on_deltas:
        return EveryStep(compute)
    return merge or LocalSteps(synchronisation, compute.placement, compute.channel, last_step)
