"""`shardtrain checkpoint COMMAND ...`: list, show, compare, verify and prune checkpoints.

`checkpoint_files.py` exports and imports them. Next: `checkpoints/reader.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardtrain.checkpoints.evaluations import find_best_saved, read_evaluations
from shardtrain.checkpoints.paths import delete, partial_folders, refuse_other_run
from shardtrain.checkpoints.policy import CheckpointPolicy, select_steps_to_delete
from shardtrain.checkpoints.reader import CheckpointReader, visible_readers
from shardtrain.cli.arguments import Subcommands, run_subcommand
from shardtrain.cli.checkpoint_files import Export, Import, export_checkpoint, import_checkpoint
from shardtrain.cli.checkpoint_path import CheckpointPath, find_checkpoint_path
from shardtrain.report.checkpoints import diff_text, list_text, show_text
from shardtrain.report.quantities import bytes_text
from shardtrain.system import terminal
from shardtrain.system.run_lock import LOCK, hold_locks

Where = Annotated[str, tyro.conf.arg(metavar="RUN")]
"""A run's folder, its folder of checkpoints, or the folder of a step; PATH@STEP names a step, PATH@best the
best step."""

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
    """Show the arrays of a step, and the options of the run that saved it.

    Args:
      run: a run's folder, its folder of checkpoints, or the folder of a step; RUN@20 names step 20.
      step: number of the step. None means the newest.
    """

    run: tyro.conf.Positional[Where]
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Compare the arrays, values and run options of two steps.

    Args:
      first: the first step: a run's folder (its newest step), RUN@STEP, or the folder of a step.
      second: the step to compare with the first, in the same forms.
    """

    first: tyro.conf.Positional[Where]
    second: tyro.conf.Positional[Where]


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare every file with its saved size and checksum; exit with code 1 if one differs.

    Args:
      run: a run's folder, its folder of checkpoints, or the folder of a step.
      step: number of the step. None means all steps.
    """

    run: tyro.conf.Positional[Where]
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Delete old steps, but never the newest valid step, nor the best step if the run records it.

    Args:
      run: a run's folder, or its folder of checkpoints.
      keep: number of the newest valid steps to keep.
      keep_every: also keep steps that are multiples of this number.
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
    return run_subcommand("shardtrain checkpoint", "COMMAND", COMMANDS, arguments)


def _ls(options: Ls) -> int:
    path = find_checkpoint_path(options.run)
    readers = visible_readers(path.folder)
    found = [each for each in readers if path.step in (None, each.step)]
    best = find_best_saved(path.folder, [each.step for each in readers if not each.missing])
    terminal.out(list_text(found, partial_folders(path.folder), best))
    return 0


def _show(options: Show) -> int:
    terminal.out(show_text(find_checkpoint_path(options.run, options.step).reader()))
    return 0


def _diff(options: Diff) -> int:
    first, second = (find_checkpoint_path(each).reader() for each in (options.first, options.second))
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
    # the newest valid steps, the newest first; older ones are not read
    whole: list[CheckpointReader] = []
    for reader in reversed(found):
        if len(whole) < policy.keep and not reader.problems():
            whole.append(reader)
    if not whole:
        why = f" ({found[-1].problems()[0]})" if found else ""
        raise ValueError(
            f"no step in {checkpoints.folder} is whole, so none is deleted{why}; see: verify"
            f" {checkpoints.folder}"
        )
    # steps that the policy counts: the whole ones, and older ones that miss no part
    counted = [each for each in found if each in whole or (each.step < whole[-1].step and not each.missing)]
    old = set(select_steps_to_delete(policy, [each.step for each in counted]))
    # the best step stays, as in a run that keeps it; a damaged file might have named any step
    evaluations = read_evaluations(checkpoints.folder)
    best = None if evaluations is None else evaluations.best([each.step for each in counted])
    old -= set() if best is None else {best.step}
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


def _exclusive(folder: Path) -> AbstractContextManager[None]:
    """Lock a folder of checkpoints and the folder of its run.

    Raises:
      ValueError: another process has one of the locks, or the folder belongs to another run.
    """
    refuse_other_run(folder)
    run = folder.resolve().parent
    # a run of an earlier version locks only the first folder
    folders = [folder, run] if (run / LOCK).is_file() else [folder]
    return hold_locks(
        folders,
        f"a process is training in {run}, and deletes old checkpoints itself (--checkpoints.keep); wait for"
        " it, or stop it first",
    )


COMMANDS: Subcommands = {
    "ls": (Ls, _ls),
    "show": (Show, _show),
    "diff": (Diff, _diff),
    "verify": (Verify, _verify),
    "export": (Export, export_checkpoint),
    "import": (Import, import_checkpoint),
    "prune": (Prune, _prune),
}
