"""Save this island's part of each checkpoint of a run: all of it, some arrays, or nothing.

Checkpoints are restored in `resume.py`. Next: `checkpoints/checkpointer.py`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax

from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.manifest_entries import WHOLE, WriterPart
from shardtrain.checkpoints.origins import make_find_origins, select_saved_state
from shardtrain.checkpoints.paths import CHECKPOINTS
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.checkpoints.save import SaveFailed
from shardtrain.functional.frozen import drop_paths
from shardtrain.functional.model import path_text
from shardtrain.functional.rng import new_key
from shardtrain.islands.buckets import FIRST_BYTES
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.state import State
from shardtrain.trainer.config import Run, describe
from shardtrain.trainer.pretrained import BASE, find_base_arrays, make_entry

if TYPE_CHECKING:
    from shardtrain.trainer.prepared_run import PreparedRun  # which imports this module

UNLOGGED = "held"
"""Key in a checkpoint: the metrics of its step, which are written once it is evaluated."""

WALL_SECONDS = "wall_seconds"
"""Key in a checkpoint: the seconds from the beginning of the run to its save."""


class RunCheckpoints:
    """The checkpoints of a run on one island.

    Args:
      prepared: the run.
      note: receives lines for the user.

    Attributes:
      run: the run.
      has_own: whether each island saves arrays that differ per island.
      own_optimizers: whether each island has its own optimizer state.
      island: (number of this island, number of islands).
      origins: state -> path -> origin of this island's array in the whole model.
      layout: the facts on which the arrays of a combiner depend.
      left_out: paths of the parameters that are not saved.
      base: entry of the extra data about them, see `pretrained.py`; None if everything is saved.
    """

    def __init__(self, prepared: "PreparedRun", note: Callable[[str], None]) -> None:
        run, setup, island_step = prepared.run, prepared.setup, prepared.island_step
        coordination = prepared.coordination
        self.run = run
        self.has_own = island_step is not None and (
            run.strategy.synchronisation.on_deltas or island_step.keeps_state or run.strategy.scales_loss
        )
        self.own_optimizers = run.strategy.synchronisation.on_deltas and island_step is not None
        self.coordination, self.placement, self.note = coordination, setup.placement, note
        self.island = (coordination.island, coordination.num_islands)
        grid, self._part = setup.grid, None
        # the part of a step that this island saves; None if it saves nothing
        if self.has_own:
            self._part = WriterPart(*self.island)
        elif coordination.writes:
            self._part = WHOLE if grid is None else WriterPart(grid.stage, grid.num_stages)
        self.checkpoints = Checkpoints(
            prepared.folder / CHECKPOINTS, run.checkpoints, self._part or WHOLE, report=note
        )
        self.origins = make_find_origins(
            setup.placement,
            setup.stage_model,
            self.island,
            self.own_optimizers,
            None if grid is None else (grid.replica, grid.num_replicas),
        )
        self.layout = _layout_facts(run, setup.placement, self.island[1])
        self._latest: int | None = None
        self._model = setup.whole_model
        self.left_out: tuple[str, ...] = ()
        self.base: dict[str, Any] | None = None

    def leave_out(self, base: CheckpointReader, folder: Path) -> None:
        """Leave out frozen parameters that are in the base checkpoint.

        Args:
          base: the reader of the base checkpoint, from which the run started.
          folder: the folder of the base checkpoint.

        Raises:
          ValueError: there are none.
        """
        shapes = jax.eval_shape(self._model.init, new_key(0))[0]
        by_path = {path_text(path): x.shape for path, x in jax.tree.leaves_with_path(shapes)}
        self.left_out = tuple(find_base_arrays(self._model.frozen, by_path, base))
        self.base = make_entry(base, list(self.left_out), folder)

    def __enter__(self) -> Self:
        self.checkpoints.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.checkpoints.__exit__(*exception)

    def latest(self) -> int | None:
        """Return the step that was saved last."""
        return self._latest if self._part is None else self.checkpoints.latest()

    def complete(self, by_all: int | None) -> int | None:
        """Return the newest step that is complete on the disk.

        Args:
          by_all: the newest step that all islands have saved; used if several islands save parts.
        """
        if self._part is not None and self._part.count == 1:
            return self.checkpoints.newest_finished_step()
        return by_all

    def find_folder(self, step: int) -> Path:
        """Return the folder in which this island's part of a step was saved."""
        return self.checkpoints.find_folder(step)

    def save(self, step: int, state: State, extra: dict[str, Any]) -> None:
        """Save this island's part of a step, see `Checkpoints.save`."""
        self._latest = step
        if self._part is not None:
            part = select_saved_state(state, own=not self.coordination.writes)
            if not (self.coordination.writes or self.own_optimizers):
                part = part._replace(opt_state=())
            if self.base is not None:
                part = part._replace(params=part.params and drop_paths(part.params, self.left_out))
                extra = {**extra, BASE: self.base}
            self.checkpoints.save(step, part, {**extra, "layout": self.layout}, self.origins(part))

    def is_best(self, step: int) -> bool:
        """Return whether the step that was evaluated last is better than all that this island saved."""
        return self._part is not None and self.checkpoints.best_evaluated() == step

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Record the held-out values of a step, see `Checkpoints.evaluated`."""
        if self._part is not None:
            self.checkpoints.evaluated(step, values)

    def wait(self) -> None:
        """Wait for the save under way, see `Checkpoints.wait`."""
        if self._part is not None:
            self.checkpoints.wait()

    def settle(self) -> None:
        """Wait for the save under way, and report if it failed."""
        try:
            self.wait()
        except SaveFailed as failure:
            self.note(f"WARNING: {failure}")

    def drop_after(self, step: int) -> None:
        """Delete this island's part of all later steps."""
        if self._part is not None:
            self.checkpoints.drop_after(step)

    def confirm(self, step: int | None) -> None:
        """Allow older steps to be deleted, see `Checkpoints.confirm`."""
        if self._part is not None:
            self.checkpoints.confirm(step)


def _layout_facts(run: Run, placement: Placement, num_islands: int) -> dict[str, Any]:
    """Return the facts on which the arrays of a combiner depend, as JSON holds them."""
    strategy, stages = run.strategy, placement.stages
    first_bytes = strategy.across.first_bucket_bytes
    facts = {
        "mesh": dict(placement.mesh.shape),
        "islands": num_islands,
        "blocks": None if stages is None else list(stages.stored_blocks),
        **describe(strategy.layout, "layout"),
        **describe(strategy.synchronisation, "synchronisation"),
        **{name: getattr(strategy.across, name) for name in ("axis", "partitions", "bucket_bytes")},
        # None means the default size
        "first_bucket_bytes": FIRST_BYTES if first_bytes is None else first_bytes,
    }
    if run.elastic.islands:
        # any island of any mesh continues with all arrays
        facts = {name: facts[name] for name in describe(strategy.synchronisation, "synchronisation")}
    return json.loads(json.dumps(facts))
