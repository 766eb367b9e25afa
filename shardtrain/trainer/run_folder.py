"""The folder of a run: its files beside the checkpoints, its lock, and the picture of its loss.

Metrics are written by `report/metrics.py`. Next: `run_checkpoints.py`.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shardtrain.checkpoints.paths import refuse_other_run
from shardtrain.report.plots import figure
from shardtrain.report.plots.loss_curve import loss_curve
from shardtrain.report.sinks import mlflow, tensorboard
from shardtrain.report.sinks.json_lines import METRICS
from shardtrain.system.atomic_write import clear_parts, replace_file
from shardtrain.system.run_lock import Locked, locked
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.run_checkpoints import CHECKPOINTS
from shardtrain.trainer.wave_log import WAVES

CURVE = "loss.png"

WRITTEN = (tensorboard.FOLDER, WAVES, "wandb", mlflow.DATABASE, mlflow.ARTIFACTS)
"""Folders and files in a run folder that are added to under their own name."""


def check_folder(folder: Path) -> None:
    """Check that a run's folder, and that of its checkpoints, is a folder or not there, and of this run.

    Raises:
      ValueError: one is a file, or a link that leads nowhere; or what is written in it is behind a link.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run_dir {folder} is a file; give a folder, there or not: --run-dir {folder}.run")
    for each in (folder, folder / CHECKPOINTS):
        if each.is_symlink() and not each.exists():
            raise ValueError(
                f"run_dir {folder}: {each} is a link to {os.readlink(each)}, which is not there; make that"
                " folder, remove the link, or use another --run-dir"
            )
    refuse_other_run(folder / CHECKPOINTS)
    if links := [name for name in WRITTEN if (folder / name).is_symlink()]:
        raise ValueError(
            f"{folder / links[0]} is a link, which is not followed; remove it, or use another --run-dir"
        )


@contextmanager
def exclusive_folder(folder: Path) -> Iterator[None]:
    """Make and lock a run's folder: two runs in one folder would delete each other's checkpoints.

    The folder of checkpoints has a lock of its own: it may be a link, and `prune` may know it alone.

    Raises:
      ValueError: another process has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            stack.enter_context(locked(folder))
            (folder / CHECKPOINTS).mkdir(exist_ok=True)
            stack.enter_context(locked(folder / CHECKPOINTS))
            yield
    except Locked:
        raise ValueError(
            f"another process is training in {folder}; wait for it, or use another --run-dir"
        ) from None


def write_run_files(folder: Path, texts: Mapping[str, str], output: RunConsole) -> None:
    """Write files that describe the run, by name; the run continues if that fails.

    Temporary files of processes that were killed are deleted from the folder.
    """
    clear_parts(folder, "*")
    for name, text in texts.items():
        try:
            replace_file(folder / name, text.encode())
        except OSError as error:
            output.note(f"WARNING: {folder / name} cannot be written: {error}; the run continues")


def draw_curve(folder: Path, output: RunConsole) -> None:
    """Draw the loss of a run that is saved by now; a failure is only reported."""
    if not figure.is_installed():
        return
    try:
        if (folder / METRICS).stat().st_size:
            loss_curve(folder / METRICS, folder / CURVE, title=folder.name)
    except (OSError, ValueError) as error:
        output.say(f"WARNING: {folder / CURVE} is not drawn: {error}")
