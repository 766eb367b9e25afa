"""Where a run begins, and where it is saved: from its newest checkpoint, or from the start, on all islands.

What each island keeps of its own (an optimizer on deltas, what a compression left out) lies in a folder
of its own beside that of island 0. Next: `trainer.py`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from shardtrain.across import AcrossStep
from shardtrain.checkpoint import Checkpoints
from shardtrain.config import Run, differences
from shardtrain.data import Position
from shardtrain.saved import from_saved, saved_state, to_saved
from shardtrain.state import Placement, State
from shardtrain.together import Together

BLOCKS_OF_PARTS = "pipeline.blocks"
"""In the description of a run whose islands hold stages: how many blocks each part has."""

BEGINNING = Position(epoch=0, index=0)
CHECKPOINTS = "checkpoints"


def has_own_state(run: Run, across: AcrossStep | None) -> bool:
    """Each island keeps something of its own that a checkpoint must hold."""
    return across is not None and (run.strategy.combine.on_deltas or across.keeps_state)


def island_checkpoints(
    run: Run, folder: Path, together: Together, has_own: bool, note: Callable[[str], None]
) -> Checkpoints | None:
    """Those of this island: of what all have in common in one folder, of what each has in one each."""
    seats = together.seats
    name = CHECKPOINTS if seats is None else f"{CHECKPOINTS}-stage-{seats.stage}-of-{seats.num_stages}"
    _refuse_other_cut(folder, re.sub("stage-[0-9]+", "stage-*", name))
    if together.writes:
        return Checkpoints(folder / name, run.checkpoints, report=note)
    if not has_own:
        return None
    assert together.islands is not None
    name = f"{CHECKPOINTS}-island-{together.islands.seat.island}"
    return Checkpoints(folder / name, run.checkpoints, report=note)


def _refuse_other_cut(folder: Path, mine: str) -> None:
    """Stages save what each owns; a run that is cut in another way cannot read that yet.

    Raises:
      ValueError: the folder has checkpoints of another cut.
    """
    found = [path for path in sorted(folder.glob(f"{CHECKPOINTS}*")) if next(path.iterdir(), None)]
    kinds = {re.sub("stage-[0-9]+", "stage-*", path.name) for path in found if "-island-" not in path.name}
    if others := kinds - {mine}:
        of = {kind.rpartition("-of-")[2] for kind in others if "-of-" in kind}
        use = f"--across pipeline --partitions {', '.join(sorted(of))}" if of else "no --across pipeline"
        raise ValueError(
            f"{folder} has {', '.join(sorted(others))}, and this run would read {mine}: a pipeline across"
            f" islands resumes with the same number of partitions. Use {use}, or another --run-dir"
        )


class InOrder:
    """Checkpoints of a state whose blocks are saved in the model's order.

    Args:
      checkpoints: where to.
      placement: of the state.
    """

    def __init__(self, checkpoints: Checkpoints, placement: Placement) -> None:
        self._checkpoints, self._to_saved = checkpoints, to_saved(placement)
        self.latest, self.wait = checkpoints.latest, checkpoints.wait

    def save(self, step: int, state: State, extra: Any) -> None:
        """See `Checkpoints.save`."""
        self._checkpoints.save(step, self._to_saved(state), extra)


class Elsewhere:
    """Checkpoints that another island writes."""

    def __init__(self) -> None:
        self._latest: int | None = None

    def latest(self) -> int | None:
        """The step that was saved last."""
        return self._latest

    def save(self, step: int, state: Any, extra: Any) -> None:
        """Another island does."""
        self._latest = step

    def wait(self) -> None:
        """There is nothing to wait for."""


def made_equal(run: Run, together: Together, state: State, note: Callable[[str], None]) -> State:
    """Before a save: unequal hosts round differently, and their copies drift apart by the last bits."""
    own_optimizers = run.strategy.combine.on_deltas
    paths = together.differing(state, own_optimizers)
    if not paths:
        return state
    note(
        f"{len(paths)} parameters were not the same bits on all islands, {paths[0]} among them;"
        " all go on with those of island 0"
    )
    return together.same_state(state, own_optimizers)


def begin(
    run: Run,
    placement: Placement,
    init: Callable[[], State],
    together: Together,
    across: AcrossStep | None,
    checkpoints: Checkpoints | None,
    has_own: bool,
    description: dict[str, Any],
    note: Callable[[str], None],
) -> tuple[State, int, Position]:
    """The newest checkpoint, or the beginning."""
    kept = {} if across is None else {"combine_state": across.init_combine_state()}
    wanted = saved_state(placement)._replace(**jax.tree.map(_restorable, kept))
    try:
        restored = together.restore(checkpoints, wanted, has_own)
    except ValueError as error:
        if BLOCKS_OF_PARTS in description:
            hint = (
                "Each stage saves the blocks that it owns: go on with the same --stages and --virtual-stages."
            )
            raise ValueError(f"{error}\n{hint}") from None
        if "combine_state/" not in str(error):
            raise
        hint = "What a combiner keeps is saved by buckets: go on with the same --combine and --bucket-bytes."
        raise ValueError(f"{error}\n{hint}") from None
    found = None if restored is None else restored.state
    state = init()._replace(**kept) if found is None else from_saved(placement)(found)
    missing = together.share("own state", has_own and found is None)
    own_optimizers = run.strategy.combine.on_deltas and not any(missing)
    state = together.same_state(state, own_optimizers)
    if wrong := together.differing(state, own_optimizers):
        raise RuntimeError(f"islands have not the same bits after the broadcast from island 0: {wrong}")
    if restored is None:
        return state, 0, BEGINNING
    if any(missing):
        note(
            f"{sum(missing)} of {len(missing)} ranks found no checkpoint of their island's own of this step:"
            " all go on with the optimizer's state of island 0"
        )
    note(f"resumed from step {restored.step} in {run.run_dir}")
    before = restored.extra["run"]
    cuts = [list(each.get(BLOCKS_OF_PARTS) or ()) for each in (before, description)]
    if cuts[0] != cuts[1]:
        chunks = before["strategy.pipeline.virtual_stages"]
        raise ValueError(
            f"the checkpoint in {run.run_dir} is of stages of {cuts[0]} blocks, and this run has {cuts[1]}:"
            f" each stage saves the blocks that it owns. Use --stages {','.join(map(str, cuts[0]))}"
            f" --virtual-stages {chunks}, or another --run-dir"
        )
    if before["seed"] != run.seed:
        raise ValueError(
            f"seed is {run.seed}, but the run in {run.run_dir} began with seed"
            f" {before['seed']}: its order of samples would change. Use --seed {before['seed']}, or another"
            " --run-dir"
        )
    # through JSON, as the saved one went
    changed = differences(before, json.loads(json.dumps(description)))
    for line in changed:
        note(f"changed since then: {line}")
    position = Position(**restored.extra["position"])
    if before.get("data.fingerprint") != description["data.fingerprint"]:
        note("WARNING: the data is not that of the checkpoint: training goes on at its beginning")
        position = BEGINNING
    return state, restored.step, position


def _restorable(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
