"""Where a run starts: from its newest checkpoint, from another run's parameters, or from initial ones.

Any layout reads the checkpoint of any other: meshes, islands, stages, replicas. Next: `restore_state.py`,
`resume.py`.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardtrain.checkpoints.differences import differences, matches
from shardtrain.checkpoints.discover import Discovered
from shardtrain.checkpoints.evaluations import find_best_saved
from shardtrain.checkpoints.flatten import restorable
from shardtrain.checkpoints.origins import state_to_save
from shardtrain.checkpoints.paths import CHECKPOINTS
from shardtrain.checkpoints.reader import CheckpointReader, find_readers
from shardtrain.data import Position
from shardtrain.errors.messages import refuse
from shardtrain.imported import select_kept_tokens
from shardtrain.system.untrusted_files import check_whole_number
from shardtrain.train_step.state import State
from shardtrain.trainer.config import Run
from shardtrain.trainer.pretrained import (
    BASE,
    CONFIG,
    add_adapters,
    add_base,
    is_pretrained,
    open_pretrained,
    upcycle,
)
from shardtrain.trainer.restore_state import apply_new_values, assemble, read_arrays, synchronise_restored
from shardtrain.trainer.run_checkpoints import UNLOGGED, WALL_SECONDS, RunCheckpoints
from shardtrain.trainer.setup import FIRST_POSITION
from shardtrain.trainer.sources import has_other_heldout, is_other_data
from shardtrain.trainer.usage import read_wall_seconds

MOST_INDEX = 1 << 62


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Where a run starts.

    Args:
      state: the state.
      step: steps done.
      position: the position in the data.
      extra: what the checkpoint holds beside arrays; without one the special tokens of what it starts from.
    """

    state: State
    step: int
    position: Position
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unlogged(self) -> Mapping[str, Any] | None:
        """Metrics of that step that were to be written after its evaluation."""
        return self.extra.get(UNLOGGED)

    @property
    def wall_seconds(self) -> float:
        """The wall time of the run when it was saved."""
        return read_wall_seconds(self.extra.get(WALL_SECONDS))


def find_start_point(
    run: Run,
    checkpoints: RunCheckpoints,
    init: Callable[[], State],
    wanted: State,
    description: dict[str, Any],
    newest: int | None = None,
) -> StartPoint:
    """Restore the newest checkpoint of the run, or another run's parameters, or initialise the state.

    All islands start from the same step.

    Args:
      run: the run.
      checkpoints: the checkpoints of the run.
      init: makes the state before the first step.
      wanted: its shapes, dtypes and shardings.
      description: the description of the run, see `config.describe`.
      newest: roll back to this step or an earlier one; None: use the newest.

    Raises:
      ValueError: every checkpoint is broken, or the newest is of another model or another run.
      FloatingPointError: there are checkpoints, but none is as old as `newest`.
    """
    found = _discover(checkpoints, newest)
    # a state that could not be saved is refused before the first step
    restorable(state_to_save(wanted))
    # frozen parameters may be in no checkpoint of the run: they are where it started
    base = _find_base(run) if run.checkpoints.trained_only or BASE in found.extra else None
    if run.checkpoints.trained_only:
        assert base is not None
        assert run.start_from.checkpoint is not None
        checkpoints.leave_out(base, run.start_from.checkpoint)
    # find what to read: a checkpoint of this run, or else the parameters that it starts from
    reader, read, note = None, wanted, checkpoints.note
    if found.step is not None:
        _check_resumable(run, checkpoints, found, description)
        reader = found.reader(checkpoints.checkpoints.folders)
        reader = add_base(reader, base, "give --start-from.checkpoint FOLDER as before")
    elif run.start_from.checkpoint is not None:
        reader = _find_start(run, run.start_from.checkpoint, note)
        read = State((), (), wanted.params, wanted.model_state, ())
    # read it, initialise the rest, and synchronise all islands
    arrays = {} if reader is None else read_arrays(run, checkpoints, reader, read, found.extra)
    state = assemble(wanted, arrays, init)
    state = synchronise_restored(run, checkpoints, state, arrays, resumed=found.step is not None)
    if found.step is None:
        # the tokens that end a text are those of the model that it starts from
        extra = {} if reader is None else select_kept_tokens(reader.extra)
        return StartPoint(state=state, step=0, position=FIRST_POSITION, extra=extra)
    state = apply_new_values(state, found.extra["run"], description, note)
    note(f"resumed from step {found.step} in {run.run_dir}")
    position = _next_position(run, found.extra, description, note)
    return StartPoint(state=state, step=found.step, position=position, extra=found.extra)


def _discover(checkpoints: RunCheckpoints, newest: int | None) -> Discovered:
    """Find the checkpoint to resume from, the same on all islands; drop later ones after a rollback."""
    coordination, store = checkpoints.coordination, checkpoints.checkpoints
    # all ranks must finish their saves before any rank lists the checkpoints
    checkpoints.settle()
    coordination.gather_after_work("saves are finished")
    store.save_id = coordination.gather_islands("save", lambda island: uuid.uuid4().hex)[0]
    found = store.discover(newest, coordination.gather_islands)
    if newest is not None and found.step is not None:
        # the next start must not resume from a bad step
        checkpoints.drop_after(found.step)
    if found.step is None and found.broken and newest is not None:
        raise FloatingPointError(
            f"no checkpoint is as old as step {newest}: those of steps {sorted(found.broken)} are newer."
            " Keep more of them: --checkpoints.keep"
        )
    return found


def _check_resumable(
    run: Run, checkpoints: RunCheckpoints, found: Discovered, description: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint of imported parameters or of another run; forget evaluations of other data.

    Raises:
      ValueError: it is one.
    """
    extra, note = found.extra, checkpoints.note
    assert found.step is not None
    if not (extra.get("position") and extra.get("run")):
        raise ValueError(
            f"{run.run_dir} holds imported parameters, and no run that can be resumed; use another --run-dir"
            f" and start from them: --start-from.checkpoint {run.run_dir}"
        )
    check_options(extra["run"], description, run, note)
    check_synchronous_steps(extra["run"], run, found.step)
    if run.checkpoints.best is not None and has_other_heldout(extra["run"], description):
        note(
            "WARNING: the held-out data is not that of the checkpoint: the best step is chosen from those"
            " that are evaluated from now on"
        )
        checkpoints.checkpoints.forget_evaluations()


def _find_start(run: Run, path: Path, note: Callable[[str], object]) -> CheckpointReader:
    """Find the parameters from which a new run starts."""
    start = run.start_from
    reader = find_parameters(path, start.step)
    if start.adapter is not None:
        reader = add_adapters(reader, start.adapter, run.model)
    if start.upcycle:
        reader = upcycle(reader, run.model)
        note("each expert starts as a copy of the feed-forward of its block, and routers at random")
    which = "" if is_pretrained(path) else f"of step {reader.step} "
    note(f"starts from the parameters {which}in {path}")
    return reader


def _next_position(
    run: Run, extra: Mapping[str, Any], description: Mapping[str, Any], note: Callable[[str], object]
) -> Position:
    """Return the position in the data where a checkpoint was saved, or the first if that is other data."""
    position = _position(extra["position"])
    if is_other_data(extra["run"], description):
        note("WARNING: the data is not that of the checkpoint: training continues from its beginning")
        return FIRST_POSITION
    if _forms_other_batches(extra["run"], run):
        note("WARNING: batches of tokens are others than before: the epoch is read from its beginning again")
        return Position(epoch=position["epoch"], index=0)
    return position


def _find_base(run: Run) -> CheckpointReader | None:
    """Find the parameters that a run started from, of which it may save only what it trains.

    Raises:
      ValueError: it saves only that, and started from none, or from copies; or as `find_parameters`.
    """
    start = run.start_from
    if run.checkpoints.trained_only and (start.checkpoint is None or start.upcycle):
        which = "copies of parameters (start_from.upcycle)" if start.upcycle else "no others"
        raise ValueError(
            f"checkpoints.trained_only is True, and this run starts from {which}; give"
            " --start-from.checkpoint FOLDER with the frozen parameters, or --checkpoints.no-trained-only"
        )
    return None if start.checkpoint is None else find_parameters(start.checkpoint, start.step)


def _forms_other_batches(saved: Mapping[str, Any], run: Run) -> bool:
    """Return whether the samples before a position are others than when it was saved."""
    before = (saved.get("batch_unit", "examples"), saved.get("batch"), saved.get(SEED))
    now = (run.batch_unit, run.batch, run.seed)
    # batches of examples are a number of samples each, so a position is the same in any order and batch
    return "tokens" in (before[0], now[0]) and before != now


def _position(saved: Mapping[str, Any]) -> Position:
    """Return the data position of a checkpoint.

    Raises:
      ValueError: it is not of the form that was saved.
    """
    epoch, index = (
        check_whole_number(saved.get(name), f"position/{name}", MOST_INDEX) for name in ("epoch", "index")
    )
    return Position(epoch=epoch, index=index)


def _best_step(path: Path, found: Sequence[CheckpointReader]) -> int:
    """Return the best step in a folder.

    Raises:
      ValueError: it is not known.
    """
    folders = [folder.parent for reader in found for folder in reader.folders.values()]
    best = find_best_saved(folders[0], [each.step for each in found]) if folders else None
    if best is None:
        raise ValueError(
            f"{path} has no best checkpoint: a run records it with --checkpoints.best heldout/loss; give a"
            " step, or None for the newest"
        )
    return best.step


def find_parameters(
    path: Path, step: int | Literal["best"] | None = None, base: Path | None = None
) -> CheckpointReader:
    """Find parameters to start from: a checkpoint, or a folder of Hugging Face.

    Args:
      path: of either.
      step: of a checkpoint, see `find_checkpoint`.
      base: what its run started from, where a checkpoint has only what was trained.

    Raises:
      ValueError: as `find_checkpoint` and `open_pretrained`.
    """
    if is_pretrained(path):
        return open_pretrained(path, step)
    found = find_checkpoint(path, step)
    return add_base(found, base and find_parameters(base), "export it with --base FOLDER, and use that")


def find_checkpoint(path: Path, step: int | Literal["best"] | None = None) -> CheckpointReader:
    """Find a complete checkpoint to start from.

    Args:
      path: a run's folder, its folder of checkpoints, or the folder of a step.
      step: the step; None: the newest; "best": the best by the metric of `CheckpointPolicy.best`.

    Raises:
      ValueError: there is none, or it is broken.
    """
    folders = (path / CHECKPOINTS, path, path.parent)
    found = [each for folder in folders[:2] for each in find_readers(folder)]
    found = found or [each for each in find_readers(path.parent) if path in each.folders.values()]
    steps = [each.step for each in found]
    if step == "best":
        step = _best_step(path, found)
    found = [each for each in found if step in (None, each.step)]
    if not found:
        raise ValueError(_nothing_found(path, step, steps))
    refuse(f"step {found[-1].step} in {path} is broken; give another", found[-1].problems())
    return found[-1]


def _nothing_found(path: Path, step: int | str | None, steps: list[int]) -> str:
    """Return the message for a path without the checkpoint that was asked for."""
    give = "give the folder of a run, of its checkpoints or of a step"
    if not path.exists():
        return f"{path} does not exist; {give}, or a folder of Hugging Face"
    if any(path.glob("*.safetensors")):
        return f"{path} has safetensors, but no {CONFIG}; put that file of the download beside them"
    have = f"it has steps {steps}" if steps else "it has no finished one"
    of_step = "" if step is None else f" of step {step}"
    return f"{path} holds no complete checkpoint{of_step}: {have}; {give}"


FREE = (
    *("batch", "batch_unit", "batch_growth", "steps", "nonfinite"),
    *("strategy.*", "optimizer", "optimizer.*", "scaling.*"),
    *("log_every", "evaluate_every", "evaluate_batches", "evaluate_with", "gradient_noise_scale"),
    "check_layout",
    *("checkpoints.*", "run_dir", "sample", "unit", "loss.metrics.*", "freeze"),
    *("names.*", "allow.*", "start_from.*", "recovery.*", "data", "data.*", "watch.*", "time_limit*"),
    *("loading.*", "hooks", "hook_errors", "sinks", "replay", "model.loss_chunk"),
)
"""Options that may differ from those of the checkpoint; each change is reported. Data that differs is read
from its beginning. Any other option must be the same, or be allowed by `Allow.changed`."""

NOTHING: tuple[Any, ...] = (None, "", [])
"""Values by which an option that a checkpoint does not know changes nothing."""

SEED = "seed"


def check_options(
    saved: Mapping[str, Any], description: Mapping[str, Any], run: Run, note: Callable[[str], None]
) -> None:
    """Report the options that differ from those of the checkpoint, and refuse those that may not.

    Args:
      saved: description of the run that saved, see `config.describe`.
      description: the description of this run.
      run: this run.
      note: receives a line for each option that may differ, and does.

    Raises:
      ValueError: lists every option that may not differ, and does.
    """
    seed = saved.get(SEED)
    if seed != run.seed and not matches(SEED, run.allow.changed):
        raise ValueError(
            f"seed is {run.seed}, but the run in {run.run_dir} started with seed {seed!r}: its order of"
            f" samples would change. Use --seed {seed}, or another --run-dir"
        )
    # the saved description went through JSON
    now = json.loads(json.dumps(dict(description)))
    refused = []
    for name in dict.fromkeys([*saved, *now]):
        if name not in saved and (now[name] in NOTHING or now[name] is False):
            continue  # an option that earlier versions had not
        for line in differences(*({name: each[name]} if name in each else {} for each in (saved, now))):
            if matches(name, (*FREE, *run.allow.changed)):
                note(f"changed since then: {line}")
            else:
                refused.append(f"{line}; put it back, or allow it: --allow.changed {name}")
    refuse(f"the checkpoint in {run.run_dir} is of another run", refused)


def check_synchronous_steps(saved: Mapping[str, Any], run: Run, step: int) -> None:
    """Refuse synchronous steps after local ones: replicas have optimizer states of their own by then.

    Args:
      saved: description of the run that saved.
      run: this run.
      step: the step of the checkpoint.

    Raises:
      ValueError: the run would go back from local steps to synchronous ones.
    """
    names = ("strategy.synchronisation.on", "strategy.synchronisation.synchronous_steps")
    before, asked = saved.get(names[1]) or 0, run.strategy.synchronisation.synchronous_steps
    if saved.get(names[0]) == "deltas" and before < step < asked:
        raise ValueError(
            f"synchronous_steps is {asked}, but the run in {run.run_dir} is at step {step} and its steps"
            f" after {before} were local: each replica has its own state of the optimizer. Use"
            f" --synchronous-steps {step} or fewer, or another --run-dir"
        )
