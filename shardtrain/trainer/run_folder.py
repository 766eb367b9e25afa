"""The folder of a run: its files beside the checkpoints, its lock, and the picture of its loss.

Metrics are written by `report/metrics.py`. Next: `run_checkpoints.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shardtrain.report.plots import figure
from shardtrain.report.plots.loss_curve import loss_curve
from shardtrain.report.sinks.json_lines import METRICS
from shardtrain.system.atomic_write import clear_parts, replace_file
from shardtrain.system.run_lock import Locked, locked
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.run_checkpoints import CHECKPOINTS

CURVE = "loss.png"


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
