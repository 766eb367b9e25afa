"""Find the start point of a run: its newest checkpoint, another run's parameters, or initial parameters.

Any layout reads the checkpoint of any other: meshes, islands, stages, replicas. Next: `restore_state.py`.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardtrain.checkpoints.differences import compare_descriptions, matches
from shardtrain.checkpoints.discover import DiscoveredCheckpoint
from shardtrain.checkpoints.evaluations import find_best_step
from shardtrain.checkpoints.flatten import describe_restorable
from shardtrain.checkpoints.origins import select_saved_state
from shardtrain.checkpoints.paths import CHECKPOINTS
from shardtrain.checkpoints.reader import CheckpointReader, find_readers
from shardtrain.data import Position
from shardtrain.errors.messages import refuse
from shardtrain.errors.options import rewrite_texts
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
from shardtrain.trainer.run_checkpoints import RunCheckpoints
from shardtrain.trainer.setup import FIRST_POSITION
from shardtrain.trainer.sources import has_other_heldout, is_other_data

if TYPE_CHECKING:
    from shardtrain.trainer.prepared_run import PreparedRun  # which imports this module

MOST_INDEX = 1 << 62


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """The point at which a run starts.

    Args:
      state: the state.
      step: steps done.
      position: the position in the data.
      extra: the extra data of the checkpoint, or the special tokens of the model that the run starts from.
    """

    state: State
    step: int
    position: Position
    extra: Mapping[str, Any] = field(default_factory=dict)


def find_start_point(
    prepared: "PreparedRun", checkpoints: RunCheckpoints, newest: int | None = None
) -> StartPoint:
    """Restore the newest checkpoint of the run, or another run's parameters, or initialise the state.

    All islands start from the same step.

    Args:
      prepared: the run.
      checkpoints: the checkpoints of the run.
      newest: roll back to this step or an earlier one; None uses the newest.

    Raises:
      ValueError: every checkpoint is broken, or the newest is of another model or another run.
      FloatingPointError: there are checkpoints, but none is as old as `newest`.
    """
    run, wanted, description = prepared.run, prepared.wanted, prepared.description
    found = _discover(checkpoints, newest)
    # refuse a state that cannot be saved before the first step
    describe_restorable(select_saved_state(wanted))
    # frozen parameters may be in no checkpoint of the run: they are where it started
    base = leave_out_base(run, checkpoints) or (_find_base(run) if BASE in found.extra else None)
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
    arrays = {} if reader is None else read_arrays(checkpoints, reader, read, found.extra)
    state = assemble(wanted, arrays, prepared.init)
    state = synchronise_restored(checkpoints, state, arrays, resumed=found.step is not None)
    if found.step is None:
        # the tokens that end a text come from the model that it starts from
        extra = {} if reader is None else select_kept_tokens(reader.extra)
        return StartPoint(state=state, step=0, position=FIRST_POSITION, extra=extra)
    state = apply_new_values(state, found.extra["run"], description, note)
    note(f"resumed from step {found.step} in {run.run_dir}")
    position = _next_position(run, found.extra, description, note)
    return StartPoint(state=state, step=found.step, position=position, extra=found.extra)


def _discover(checkpoints: RunCheckpoints, newest: int | None) -> DiscoveredCheckpoint:
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
            f"no checkpoint is as old as step {newest}: steps {sorted(found.broken)} are newer. Keep more"
            " checkpoints: --checkpoints.keep"
        )
    return found


def _check_resumable(
    run: Run, checkpoints: RunCheckpoints, found: DiscoveredCheckpoint, description: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint of imported parameters or of another run; forget evaluations of other data.

    Raises:
      ValueError: the run cannot resume from it.
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
            "WARNING: the held-out data has changed since the checkpoint: the best step is chosen among"
            " evaluations from now on"
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
    """Return the position in the data of a checkpoint, or the first position if the data has changed."""
    position = _parse_position(extra["position"])
    if is_other_data(extra["run"], description):
        note("WARNING: the data has changed since the checkpoint: training continues from its beginning")
        return FIRST_POSITION
    # whether the samples before a position have changed: a batch of examples is a number of samples, so a
    # position is the same in any order and batch
    saved = extra["run"]
    before = (saved.get("batch_unit", "examples"), saved.get("batch"), saved.get(SEED))
    now = (run.batch_unit, run.batch, run.seed)
    if "tokens" in (before[0], now[0]) and before != now:
        note("WARNING: the token batching has changed since the checkpoint: the epoch starts again")
        return Position(epoch=position["epoch"], index=0)
    return position


def _parse_position(saved: Mapping[str, Any]) -> Position:
    """Check the data position of a checkpoint, which is untrusted."""
    epoch, index = (
        check_whole_number(saved.get(name), f"position/{name}", MOST_INDEX) for name in ("epoch", "index")
    )
    return Position(epoch=epoch, index=index)


def leave_out_base(run: Run, checkpoints: RunCheckpoints) -> CheckpointReader | None:
    """Let the checkpoints of a run that saves only trained parameters leave out the others.

    Returns:
      The reader of the base checkpoint; None if everything is saved.

    Raises:
      ValueError: there is no base checkpoint, or it lacks the parameters.
    """
    if not run.checkpoints.trained_only:
        return None
    base = _find_base(run)
    assert base is not None
    assert run.start_from.checkpoint is not None
    checkpoints.leave_out(base, run.start_from.checkpoint)
    return base


def _find_base(run: Run) -> CheckpointReader | None:
    """Find the base checkpoint from which a run started.

    Raises:
      ValueError: the run saves only trained parameters, and has no base checkpoint or changes its parameters;
        or as `find_parameters`.
    """
    start = run.start_from
    if run.checkpoints.trained_only and (start.checkpoint is None or start.upcycle):
        which = "copies of parameters (start_from.upcycle)" if start.upcycle else "no others"
        raise ValueError(
            f"checkpoints.trained_only is True, and this run starts from {which}; give"
            " --start-from.checkpoint FOLDER with the frozen parameters, or --checkpoints.no-trained-only"
        )
    return None if start.checkpoint is None else find_parameters(start.checkpoint, start.step)


def find_parameters(
    path: Path, step: int | Literal["best"] | None = None, base: Path | None = None
) -> CheckpointReader:
    """Find parameters to start from: a checkpoint, or a folder of Hugging Face.

    Args:
      path: path of either.
      step: step of a checkpoint, see `find_checkpoint`.
      base: the base checkpoint of its run, for a checkpoint with only trained parameters.

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
      step: the step; None means the newest, "best" the best by the metric of `CheckpointPolicy.best`.

    Raises:
      ValueError: there is none, or it is broken.
    """
    folders = (path / CHECKPOINTS, path, path.parent)
    found = [each for folder in folders[:2] for each in find_readers(folder)]
    found = found or [each for each in find_readers(path.parent) if path in each.folders.values()]
    steps = [each.step for each in found]
    if step == "best" and found:
        step = find_best_step(next(iter(found[0].folders.values())).parent, steps)
    found = [each for each in found if step in (None, each.step)]
    give = "give the folder of a run, of its checkpoints or of a step"
    if not found and not path.exists():
        raise ValueError(f"{path} does not exist; {give}, or a folder of Hugging Face")
    if not found and any(path.glob("*.safetensors")):
        raise ValueError(
            f"{path} has safetensors, but no {CONFIG}; put that file of the download next to them"
        )
    if not found:
        have = f"it has steps {steps}" if steps else "it has no finished one"
        of_step = "" if step is None else f" of step {step}"
        raise ValueError(f"{path} holds no complete checkpoint{of_step}: {have}; {give}")
    refuse(f"step {found[-1].step} in {path} is broken; give another", found[-1].problems())
    return found[-1]


FREE = (
    *("batch", "batch_unit", "batch_growth", "steps", "nonfinite"),
    *("strategy.*", "optimizer", "optimizer.*", "scaling.*"),
    *("log_every", "evaluate_every", "evaluate_batches", "evaluate_with", "gradient_noise_scale"),
    "check_layout",
    *("checkpoints.*", "run_dir", "sample", "unit", "loss.metrics.*", "freeze"),
    *("names.*", "allow.*", "start_from.*", "recovery.*", "watch.*", "time_limit*", "elastic.*"),
    *("data", "data.*", "loading.*", "hooks", "hook_errors", "sinks", "replay", "model.loss_chunk"),
)
"""Options that may differ from the checkpoint; each change is reported, and changed data is read from its
beginning. Any other option must be the same, or be allowed by `Allow.changed`."""

NOTHING: tuple[Any, ...] = (None, "", [])
"""Neutral values of an option that is not in a checkpoint."""

SEED = "seed"


def check_options(
    saved: Mapping[str, Any], description: Mapping[str, Any], run: Run, note: Callable[[str], None]
) -> None:
    """Report allowed changes of options since the checkpoint, and refuse others.

    Args:
      saved: description of the run that saved, see `config.describe`.
      description: the description of this run.
      run: this run.
      note: receives a line for each allowed change.

    Raises:
      ValueError: lists every option that must not change.
    """
    seed = saved.get(SEED)
    if seed != run.seed and not matches(SEED, run.allow.changed):
        raise ValueError(
            f"seed is {run.seed}, but the run in {run.run_dir} started with seed {seed!r}: its order of"
            f" samples would change. Use --seed {seed}, or another --run-dir"
        )
    saved = rewrite_texts(type(run.model), saved, "model.")
    # the saved description went through JSON
    now = json.loads(json.dumps(dict(description)))
    refused = []
    for name in dict.fromkeys([*saved, *now]):
        if name not in saved and (now[name] in NOTHING or now[name] is False):
            continue  # an option that earlier versions did not have
        for line in compare_descriptions(
            *({name: each[name]} if name in each else {} for each in (saved, now))
        ):
            if matches(name, (*FREE, *run.allow.changed)):
                note(f"changed since then: {line}")
            else:
                refused.append(f"{line}; put it back, or allow it: --allow.changed {name}")
    refuse(f"the checkpoint in {run.run_dir} is of another run", refused)


def check_synchronous_steps(saved: Mapping[str, Any], run: Run, step: int) -> None:
    """Refuse synchronous steps after local ones, when each replica has its own optimizer state.

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
