"""`shardtrain checkpoint COMMAND ...`: list, show, compare, verify, prune and convert checkpoints.

Converters of files are imported by name (`checkpoint_files.py`). Next: `checkpoints/reader.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shardtrain.checkpoints.evaluations import find_best_saved
from shardtrain.checkpoints.paths import delete, partial_folders, refuse_other_run
from shardtrain.checkpoints.policy import CheckpointPolicy, steps_to_delete
from shardtrain.checkpoints.reader import CheckpointReader, visible_readers
from shardtrain.cli.checkpoint_files import Export, Import, export_checkpoint, import_checkpoint
from shardtrain.cli.checkpoint_path import CheckpointPath, find_checkpoint_path
from shardtrain.cli.command_help import usage_text
from shardtrain.errors.messages import near
from shardtrain.report.checkpoints import diff_text, list_text, show_text
from shardtrain.report.quantities import bytes_text
from shardtrain.system import terminal
from shardtrain.system.run_lock import LOCK, Locked, hold_lock

Where = Annotated[str, tyro.conf.arg(metavar="RUN")]
"""A run's folder, its folder of checkpoints, or the folder of a step; PATH@STEP is a step of it, and
PATH@best the best one."""

DAMAGED = 1


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List the steps of a run.

    Args:
      run: a run's folder, its folder of checkpoints, or the folder of a step.
    """

    run: tyro.conf.Positional[Where]


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show a step: its arrays, and the run that saved it.

    Args:
      run: a run's folder, its folder of checkpoints, or the folder of a step; RUN@20 is step 20 of it.
      step: the number of the step; None: the newest.
    """

    run: tyro.conf.Positional[Where]
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Compare two steps: arrays, values and options of the run.

    Args:
      first: a run's folder (the newest step), or RUN@STEP, or the folder of a step.
      second: the step to compare it with, in the same forms.
    """

    first: tyro.conf.Positional[Where]
    second: tyro.conf.Positional[Where]


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare every file with its saved size and checksum; exit code 1 if one differs.

    Args:
      run: a run's folder, its folder of checkpoints, or the folder of a step.
      step: the number of the step; None: all steps.
    """

    run: tyro.conf.Positional[Where]
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Delete old steps; the newest valid one is always kept, and the best one of a run that records it.

    Args:
      run: a run's folder, or its folder of checkpoints.
      keep: how many of the newest valid steps to keep.
      keep_every: also keep the steps that are multiples of this number.
      dry_run: print what would be deleted without deleting it.
    """

    run: tyro.conf.Positional[Where]
    keep: int
    keep_every: int | None = None
    dry_run: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run one of `COMMANDS`.

    Returns:
      0; 1 if `verify` found a broken step.
    """
    wants_help = bool({"-h", "--help"} & set(arguments))
    if not arguments or (wants_help and arguments[0] not in COMMANDS):
        terminal.out(usage())
        return 0 if wants_help else 2
    name, *rest = arguments
    if name not in COMMANDS:
        raise ValueError(f"there is no command {near(name, COMMANDS)}\n{usage()}")
    kind, work = COMMANDS[name]
    return work(tyro.cli(kind, args=rest, prog=f"shardtrain checkpoint {name}"))


def usage() -> str:
    """Return the text of --help."""
    kinds = {name: kind for name, (kind, _) in COMMANDS.items()}
    return usage_text("shardtrain checkpoint", "COMMAND", kinds)


def _ls(options: Ls) -> int:
    path = find_checkpoint_path(options.run)
    found = [each for each in visible_readers(path.folder) if path.step in (None, each.step)]
    best = find_best_saved(
        path.folder, [each.step for each in visible_readers(path.folder) if not each.missing]
    )
    terminal.out(list_text(found, partial_folders(path.folder), best))
    return 0


def _show(options: Show) -> int:
    terminal.out(show_text(find_checkpoint_path(options.run, options.step).reader()))
    return 0


def _diff(options: Diff) -> int:
    first, second = (
        find_checkpoint_path(options.first).reader(),
        find_checkpoint_path(options.second).reader(),
    )
    terminal.out(diff_text(first, second))
    return 0


def _verify(options: Verify) -> int:
    num_broken = 0
    for reader in find_checkpoint_path(options.run, options.step).readers():
        problems = reader.problems()
        num_broken += bool(problems)
        if problems:
            terminal.out(f"step {reader.step}: broken\n" + "".join(f"  {line}\n" for line in problems))
        else:
            files = sum(len(manifest.files) for manifest in reader.manifests.values())
            size = bytes_text(reader.num_bytes)
            terminal.out(f"step {reader.step}: valid, {files} files, {size}\n")
    return DAMAGED if num_broken else 0


def _prune(options: Prune) -> int:
    policy = CheckpointPolicy(keep=options.keep, keep_every=options.keep_every)
    path = find_checkpoint_path(options.run)
    if path.step is not None:
        raise ValueError(f"{options.run} is one step; give the run's folder to prune it")
    if options.dry_run:
        return _prune_steps(path, policy, lambda folder: None)
    with _exclusive(path.folder):
        return _prune_steps(path, policy, delete)


def _prune_steps(
    checkpoints: CheckpointPath, policy: CheckpointPolicy, remove: Callable[[Path], None]
) -> int:
    found = checkpoints.readers()
    whole = _find_newest_whole(found, policy.keep)
    if not whole:
        why = f" ({found[-1].problems()[0]})" if found else ""
        raise ValueError(
            f"no step in {checkpoints.folder} is whole, so none is deleted{why}; see: verify"
            f" {checkpoints.folder}"
        )
    # steps that the policy counts: the whole ones, and older ones that miss no part
    counted = [each for each in found if each in whole or (each.step < whole[-1].step and not each.missing)]
    old = set(steps_to_delete(policy, [each.step for each in counted]))
    # the best step stays, as in a run that keeps it
    if (best := find_best_saved(checkpoints.folder, [each.step for each in counted])) is not None:
        old.discard(best.step)
    freed = 0
    for reader in found:
        if reader.step > whole[0].step or (reader in whole) or (reader in counted and reader.step not in old):
            continue
        for folder in reader.folders.values():
            freed += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            remove(folder)
        why = "" if reader in counted else " (broken)"
        terminal.out(f"step {reader.step}: {'deleted' if remove is delete else 'would be deleted'}{why}\n")
    kept = [each.step for each in found if each in counted and each.step not in old]
    terminal.out(f"{bytes_text(freed)}; kept: {', '.join(map(str, kept))}\n")
    return 0


def _find_newest_whole(found: Sequence[CheckpointReader], number: int) -> list[CheckpointReader]:
    """Return the newest valid steps, the newest first; older ones are not read."""
    whole: list[CheckpointReader] = []
    for reader in reversed(found):
        if len(whole) < number and not reader.problems():
            whole.append(reader)
    return whole


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Lock a folder of checkpoints, and the folder of its run.

    Raises:
      ValueError: another process has one of the locks, or the folder is that of another run.
    """
    refuse_other_run(folder)
    run = folder.resolve().parent
    try:
        with ExitStack() as stack:
            stack.enter_context(hold_lock(folder))
            if (run / LOCK).is_file():
                # a run of an earlier version locks only this folder
                stack.enter_context(hold_lock(run))
            yield
    except Locked:
        raise ValueError(
            f"a process is training in {run}, and deletes old checkpoints itself"
            " (--checkpoints.keep); wait for it, or stop it first"
        ) from None


COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "ls": (Ls, _ls),
    "show": (Show, _show),
    "diff": (Diff, _diff),
    "verify": (Verify, _verify),
    "export": (Export, export_checkpoint),
    "import": (Import, import_checkpoint),
    "prune": (Prune, _prune),
}
"""Name -> the class of its options, and the function that runs it and returns the exit code."""
