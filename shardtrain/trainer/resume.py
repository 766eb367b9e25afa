"""Where a run begins, and where it is saved: at its newest checkpoint, at another run's, or at the start.

Any layout reads the checkpoint of any other: meshes, islands, stages, replicas. Which options may differ is
said here, and what becomes of state that belongs to a layout. Next: `train.py`.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shardtrain.checkpoints.checkpointer import Checkpoints, SaveFailed
from shardtrain.checkpoints.flatten import restorable
from shardtrain.checkpoints.manifest import COMMON, WHOLE, ArrayOrigin, Leaf, WriterPart, matches
from shardtrain.checkpoints.origins import KEPT, lies, saved_part, wanted_state
from shardtrain.checkpoints.reader import CheckpointReader, find_readers
from shardtrain.checkpoints.restore import Allow, check_state, restore_arrays, widened
from shardtrain.data import Position
from shardtrain.errors.messages import problems_error
from shardtrain.functional.model import path_text
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.system.untrusted_files import whole_number
from shardtrain.train_step.island_step import IslandStep
from shardtrain.train_step.state import Placement, State
from shardtrain.trainer.config import Run, describe, differences
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.loop import HELD

BEGINNING = Position(epoch=0, index=0)
CHECKPOINTS = "checkpoints"

FREE = (
    *("batch", "steps", "strategy.*", "optimizer", "optimizer.*", "scaling.*", "nonfinite"),
    *(
        "log_every",
        "evaluate_every",
        "evaluate_batches",
        "evaluate_with",
        "checkpoints.*",
        "run_dir",
        "sample",
        "unit",
    ),
    *("names.*", "allow.*", "start_from.*", "recovery.*", "data", "data.*", "watch.*", "time_limit*"),
)
"""Options that may differ from those of the checkpoint, which is told; data that differs begins at its
beginning. Any other must be the same, or stand in `Allow.changed`."""

SEED = "seed"
MOST_INDEX = 1 << 62


class Saving:
    """The checkpoints of a run, as one island reads and writes them.

    Args:
      run: the run.
      folder: of the run.
      together: this island, and the others.
      placement: of the state.
      held: the stage that this island holds, if any.
      across: the step across islands, None for one that is alone.
      note: told what people must see.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        together: Coordination,
        placement: Placement,
        held: StageModel | None,
        across: IslandStep | None,
        note: Callable[[str], None],
    ) -> None:
        self.has_own = across is not None and (run.strategy.combine.on_deltas or across.keeps_state)
        self.own_optimizers = run.strategy.combine.on_deltas and across is not None
        self.together, self.placement, self.note = together, placement, note
        seat = None if together.islands is None else together.islands.seat
        _refuse_old_parts(folder)
        self.island = (0, 1) if seat is None else (seat.island, seat.num_islands)
        self._part = self._find_part()
        self.checkpoints = Checkpoints(
            folder / CHECKPOINTS, run.checkpoints, self._part or WHOLE, report=note
        )
        self._lies = lies(placement, held, self.island, self.own_optimizers)
        self.layout = _layout(run, placement, self.island[1])
        self._latest: int | None = None

    def _find_part(self) -> WriterPart | None:
        """Which part of a step this island saves; None: another saves all."""
        seats = self.together.seats
        if self.has_own:
            return WriterPart(*self.island)
        if self.together.writes:
            return WHOLE if seats is None else WriterPart(seats.stage, seats.num_stages)
        return None

    def lies_of(self, state: State) -> dict[str, ArrayOrigin]:
        """Path -> which piece of the whole an array is."""
        return self._lies(state)

    def latest(self) -> int | None:
        """The step that was saved last."""
        return self._latest if self._part is None else self.checkpoints.latest()

    def save(self, step: int, state: State, extra: dict[str, Any]) -> None:
        """See `Checkpoints.save`."""
        self._latest = step
        if self._part is not None:
            chosen = saved_part(state, own=not self.together.writes)
            if not (self.together.writes or self.own_optimizers):
                chosen = chosen._replace(opt_state=())
            self.checkpoints.save(step, chosen, {**extra, "layout": self.layout}, self._lies(chosen))

    def wait(self) -> None:
        """See `Checkpoints.wait`."""
        if self._part is not None:
            self.checkpoints.wait()

    def settle(self) -> None:
        """Wait for a save under way, if there is one, and tell if it failed."""
        try:
            self.wait()
        except SaveFailed as failure:
            self.note(f"WARNING: {failure}")

    def drop_after(self, step: int) -> None:
        """Delete this island's part of later steps."""
        if self._part is not None:
            self.checkpoints.drop_after(step)

    def confirm(self, step: int | None) -> None:
        """See `Checkpoints.confirm`."""
        if self._part is not None:
            self.checkpoints.confirm(step)


def _refuse_old_parts(folder: Path) -> None:
    """Before schema 2 each stage had a folder of its own.

    Raises:
      ValueError: there is one.
    """
    if found := sorted(path.name for path in folder.glob("checkpoints-stage-*")):
        raise ValueError(
            f"{folder} has {', '.join(found)}, which an earlier shardtrain wrote and this one cannot read."
            " Use that one, or another --run-dir"
        )


def _layout(run: Run, placement: Placement, num_islands: int) -> dict[str, Any]:
    """On what the arrays depend that a combiner keeps."""
    strategy, stages = run.strategy, placement.stages
    facts = {
        "mesh": dict(placement.mesh.shape),
        "islands": num_islands,
        "blocks": None if stages is None else list(stages.counts),
        **describe(strategy.layout, "layout"),
        **describe(strategy.combine, "combine"),
        **{name: getattr(strategy.across, name) for name in ("axis", "partitions", "bucket_bytes")},
        "first_bucket_bytes": strategy.across.first_bucket_bytes,
    }
    return json.loads(json.dumps(facts))


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Where a run begins.

    Args:
      state: the state.
      step: steps done.
      position: in the data.
      held: metrics of that step, which were to be written after its evaluation.
    """

    state: State
    step: int
    position: Position
    held: Mapping[str, Any] | None = None


def synchronised(run: Run, together: Coordination, state: State, note: Callable[[str], None]) -> State:
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
    saving: Saving,
    init: Callable[[], State],
    across: IslandStep | None,
    description: dict[str, Any],
    newest: int | None = None,
) -> StartPoint:
    """The newest checkpoint, or that of another run, or the beginning; the same on all islands.

    Args:
      run: the run.
      saving: its checkpoints.
      init: makes the state before the first step.
      across: the step across islands, None for one that is alone.
      description: of the run, see `config.describe`.
      newest: go back to this step, or before it; None takes the newest.

    Raises:
      ValueError: every checkpoint is broken, or the newest is of another model or another run.
      FloatingPointError: there are checkpoints, and none as old as asked for.
    """
    together, note = saving.together, saving.note
    saving.settle()
    together.meet("saves are finished")
    saving.checkpoints.save_id = together.look("save", lambda island: uuid.uuid4().hex)[0]
    chosen = saving.checkpoints.choose(newest, together.look)
    if newest is not None and chosen.step is not None:
        # what was found bad must not be gone on from by the next start
        saving.drop_after(chosen.step)
    if chosen.step is None and chosen.broken and newest is not None:
        raise FloatingPointError(
            f"no checkpoint is as old as step {newest}: those of steps {sorted(chosen.broken)} are newer."
            " Keep more of them: --checkpoints.keep"
        )
    kept = None if across is None else across.init_combine_state()
    archive = None
    wanted = wanted_state(saving.placement, kept)
    # what could not be saved is refused before the first step
    restorable(saved_part(wanted))
    extra = chosen.extra
    if chosen.step is not None:
        if not (extra.get("position") and extra.get("run")):
            raise ValueError(
                f"{run.run_dir} holds imported parameters, and no run that goes on; use another --run-dir and"
                f" begin with them: --start-from.checkpoint {run.run_dir}"
            )
        _check_run(extra["run"], description, run, note)
        archive = chosen.archive(saving.checkpoints.folders)
    elif run.start_from.checkpoint is not None:
        archive = find_start(run.start_from.checkpoint, run.start_from.step)
        note(f"begins with the parameters of step {archive.step} in {run.start_from.checkpoint}")
        wanted = State((), (), wanted.params, wanted.model_state, ())
    arrays: dict[str, jax.Array] = {}
    if archive is not None:
        arrays = _read(run, saving, archive, wanted, extra)
    state = _assembled(wanted_state(saving.placement, kept), arrays, kept, init)
    state = _common(run, saving, state, arrays, resumed=chosen.step is not None)
    if chosen.step is None:
        return StartPoint(state=state, step=0, position=BEGINNING)
    note(f"resumed from step {chosen.step} in {run.run_dir}")
    position = _position(extra["position"])
    if extra["run"].get("data.fingerprint") != description["data.fingerprint"]:
        note("WARNING: the data is not that of the checkpoint: training goes on at its beginning")
        position = BEGINNING
    return StartPoint(state=state, step=chosen.step, position=position, held=extra.get(HELD))


def _position(saved: Mapping[str, Any]) -> Position:
    """Where the data was.

    Raises:
      ValueError: it is not of the form that was saved.
    """
    epoch, index = (
        whole_number(saved.get(name), f"position/{name}", MOST_INDEX) for name in ("epoch", "index")
    )
    return Position(epoch=epoch, index=index)


def find_start(path: Path, step: int | None = None) -> CheckpointReader:
    """A step to begin with.

    Args:
      path: a run's folder, its folder of checkpoints, or the folder of a step.
      step: which; None takes the newest.

    Raises:
      ValueError: there is none, or it is broken.
    """
    folders = (path / CHECKPOINTS, path, path.parent)
    found = [each for folder in folders[:2] for each in find_readers(folder)]
    found = found or [each for each in find_readers(path.parent) if path in each.folders.values()]
    steps = [each.step for each in found]
    found = [each for each in found if step in (None, each.step)]
    if not found:
        have = f"it has steps {steps}" if steps else "it has no finished one"
        raise ValueError(
            f"{path} holds no whole checkpoint{'' if step is None else f' of step {step}'}: {have}; give the"
            " folder of a run, of its checkpoints or of a step"
        )
    if wrong := found[-1].problems():
        raise problems_error(f"step {found[-1].step} in {path} is broken; give another", wrong)
    return found[-1]


def _check_run(
    before: Mapping[str, Any], description: Mapping[str, Any], run: Run, note: Callable[[str], None]
) -> None:
    """What differs from the run that saved is told, where it may; else it is refused.

    Raises:
      ValueError: everything that may not differ, and does.
    """
    seed = before.get("seed")
    if seed != run.seed and not matches(SEED, run.allow.changed):
        raise ValueError(
            f"seed is {run.seed}, but the run in {run.run_dir} began with seed {seed}: its order of samples"
            f" would change. Use --seed {seed}, or another --run-dir"
        )
    # through JSON, as the saved one went
    now = json.loads(json.dumps(dict(description)))
    refused = []
    for name in dict.fromkeys([*before, *now]):
        for line in differences(*({name: each[name]} if name in each else {} for each in (before, now))):
            if matches(name, (*FREE, *run.allow.changed)):
                note(f"changed since then: {line}")
            else:
                refused.append(f"{line}; put it back, or allow it: --allow.changed {name}")
    if refused:
        raise problems_error(f"the checkpoint in {run.run_dir} is of another run", refused)


def _read(
    run: Run, saving: Saving, archive: CheckpointReader, wanted: State, extra: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """What this island reads of a checkpoint; what islands have in common it may get from another."""
    together = saving.together
    wanted = _readable(saving, saved_part(wanted), archive, extra)
    leaves = {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(wanted)}
    where = saving.lies_of(wanted)
    # of another run only parameters are asked for, and of its own all
    ignored = [path for path in archive.pieces if not extra and not path.startswith(PARAMETERS)]
    unused = (*run.allow.unused, f"{KEPT}*", *ignored)
    if together.seats is not None:
        # a stage uses a part of what was saved; all of it must be used by some
        told = together.look(
            "arrays", lambda island: [_whole_shapes(leaves, where), _whole_shapes(archive.leaves, {})]
        )
        asked, saved = (_united([each[i] for each in told]) for i in (0, 1))
        check_state(archive, widened(saved, asked), asked, Allow(missing=run.allow.missing, unused=unused))
        unused = ("*",)
    if not together.writes:
        own = _readable(saving, saved_part(wanted, own=True), archive, extra)
        mine = {path_text(path) for path, _ in jax.tree.leaves_with_path(own)}
        leaves = {path: leaf for path, leaf in leaves.items() if saving.has_own and path in mine}
        unused = ("*",)
    if not leaves:
        return {}
    try:
        found = restore_arrays(
            archive, leaves, where, Allow(missing=run.allow.missing, unused=unused), saving.note
        )
    except ValueError:
        if together.writes:
            raise
        # this island has a disk of its own, and not what it saved; the way out is in `_common`
        return {}
    _tell_replicas(saving, archive, where)
    return found


PARAMETERS = ("params/", "model_state/")


def _readable(saving: Saving, wanted: State, archive: CheckpointReader, extra: Mapping[str, Any]) -> State:
    """Without what belongs to the layout that saved it, if this is another, or to one replica alone."""
    if saving.together.islands is not None and not saving.own_optimizers and not saving.together.writes:
        wanted = wanted._replace(opt_state=())
    # each island saved its own part, on a mesh that need not be that of the others
    own = archive.manifests.get(saving.island[0] if saving.has_own else 0)
    if not extra or (own.extra if own else extra).get("layout") == saving.layout:
        return wanted
    if any(path.startswith(KEPT) for path in archive.pieces) and jax.tree.leaves(wanted.combine_state):
        saving.note(
            "what compression had left out is given up: it lies by the buckets and devices of the layout that"
            " was saved, and this is another"
        )
    return wanted._replace(combine_state=())


def _whole_shapes(leaves: Mapping[str, Any], where: Mapping[str, ArrayOrigin]) -> dict[str, Any]:
    return {
        path: [where.get(path, COMMON).whole(tuple(x.shape)), getattr(x.dtype, "name", x.dtype)]
        for path, x in leaves.items()
        if not path.startswith(KEPT)
    }


def _united(of_islands: Sequence[Mapping[str, Any]]) -> dict[str, Leaf]:
    return {
        path: Leaf(shape=tuple(shape), dtype=dtype)
        for each in of_islands
        for path, (shape, dtype) in each.items()
    }


def _tell_replicas(saving: Saving, archive: CheckpointReader, where: Mapping[str, ArrayOrigin]) -> None:
    """The rule for optimizers of replicas, where their number has changed."""
    path = next((path for path in archive.pieces if path.startswith("opt_state/")), None)
    if path is None:
        return
    before = archive.pieces[path][0].leaf.lie.num_replicas
    now = where.get(path, COMMON).num_replicas
    if before != now:
        saving.note(
            f"{before or 1} optimizer states were saved, and this run has {now or 1}: replica r goes on with"
            f" that of replica r % {before or 1}"
        )


def _assembled(wanted: State, arrays: Mapping[str, jax.Array], kept: Any, init: Callable[[], State]) -> State:
    """What was read, and from the beginning what was not."""
    if all(path_text(path) in arrays for path, _ in jax.tree.leaves_with_path(wanted)):
        return jax.tree.map_with_path(lambda path, _: arrays[path_text(path)], wanted)
    state = init()
    state = state if kept is None else state._replace(combine_state=kept)
    return jax.tree.map_with_path(lambda path, x: arrays.get(path_text(path), x), state)


def _common(
    run: Run, saving: Saving, state: State, arrays: Mapping[str, jax.Array], *, resumed: bool
) -> State:
    """What islands have in common, as island 0 has it."""
    together = saving.together
    lost = saving.own_optimizers and resumed and not any(path.startswith("opt_state/") for path in arrays)
    missing = together.share("own state", lost)
    own_optimizers = run.strategy.combine.on_deltas and not any(missing)
    state = together.same_state(state, own_optimizers)
    if wrong := together.differing(state, own_optimizers):
        raise RuntimeError(f"islands have not the same bits after the broadcast from island 0: {wrong}")
    if any(missing):
        saving.note(
            f"{sum(missing)} of {len(missing)} ranks found no checkpoint of their island's own of this step:"
            " all go on with the optimizer's state of island 0"
        )
    return state
