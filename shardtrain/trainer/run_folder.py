"""Check and lock the folder of a run; write its description, environment, loss curve and mark of a program.

The mark is of a program that is compiled or first run, in case XLA ends the process there, without an
exception: the next start says which program it was and what to change, and continues.

Next: `run_checkpoints.py`.
"""

import errno
import json
import os
import platform
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import jax
import numpy as np

from shardtrain.checkpoints.paths import CHECKPOINTS, refuse_other_run
from shardtrain.islands.agreement import flags
from shardtrain.islands.membership import Islands
from shardtrain.plan.space import mesh_text
from shardtrain.report.plots import figure
from shardtrain.report.plots.loss_curve import plot_loss_curve
from shardtrain.report.sinks import mlflow, tensorboard
from shardtrain.report.sinks.json_lines import METRICS
from shardtrain.system.atomic_write import clear_parts, open_own, replace_file
from shardtrain.system.cgroup import limits
from shardtrain.system.host import infiniband_links, memory_bytes, network_links, ranges_text, system_facts
from shardtrain.system.packages import list_installed_packages
from shardtrain.system.run_lock import LockHeld, hold_lock, hold_locks
from shardtrain.system.shown_variables import shown_variables
from shardtrain.system.untrusted_files import read_json
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.waves import WAVES

CURVE = "loss.png"

WRITTEN = (tensorboard.FOLDER, WAVES, "wandb", mlflow.DATABASE, mlflow.ARTIFACTS)
"""Folders and files in a run folder that are appended to."""


def check_folder(folder: Path) -> None:
    """Check that a run can be written to its folder.

    Raises:
      ValueError: the folder is a file, or a link that leads nowhere; or a file in it is a link.
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


def check_place(folder: Path) -> None:
    """Check that the folder of a run is there or can be made, before the run is set up.

    A folder of another name is made and removed beside it: the folder itself may be made by another process
    of the run meanwhile.

    Raises:
      ValueError: it cannot be made.
    """
    try:
        if folder.is_dir():
            return
        place = next(each for each in folder.absolute().parents if each.exists())
        Path(mkdtemp(prefix=".shardtrain-", dir=place)).rmdir()
    except OSError as error:
        # /proc takes no folders, and says that there is no such file
        why = error.strerror if error.errno != errno.ENOENT else "no folders can be made there"
        raise ValueError(
            f"run_dir {folder} cannot be made: {why}; use a folder on a disk that you may write to, such as"
            " --run-dir runs/mine"
        ) from error


def lock_folder(folder: Path, *, shared: bool = False) -> AbstractContextManager[None]:
    """Make and lock a run's folder: two runs in one folder would delete each other's checkpoints.

    Islands that come and go share it.

    The folder of checkpoints has its own lock, because it may be a link, and `prune` locks only that.

    Raises:
      ValueError: another process has the lock.
    """

    def make_folders() -> Iterator[Path]:
        # the second only once the first is locked: a run that is refused leaves nothing behind
        for each in (folder, folder / CHECKPOINTS):
            each.mkdir(parents=True, exist_ok=True)
            yield each

    text = f"another process is training in {folder}; wait for it, or use another --run-dir"
    return hold_locks(make_folders(), text, shared=shared)


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
    """Draw the loss curve of a run; a failure is only reported."""
    if not figure.is_installed():
        return
    try:
        if (folder / METRICS).stat().st_size:
            plot_loss_curve(folder / METRICS, folder / CURVE, title=folder.name)
    except (OSError, ValueError) as error:
        output.say(f"WARNING: {folder / CURVE} is not drawn: {error}")


ENVIRONMENT = "environment.jsonl"


def record_environment(folder: Path, coordination: Coordination, output: RunConsole) -> None:
    """Append the environment of this start; all ranks call it, and the run continues if it fails."""
    ranks = coordination.all_gather("environment", describe_rank(coordination.islands))
    if not coordination.is_first:
        return
    line = json.dumps(make_start_record(ranks, coordination.islands), allow_nan=False)
    try:
        append_line(folder / ENVIRONMENT, line)
    except OSError as error:
        output.note(f"WARNING: {folder / ENVIRONMENT} cannot be written: {error}; the run continues")


def append_line(path: Path, line: str) -> None:
    """Append a line; a last line that a crash interrupted is ended first.

    Raises:
      OSError: the file cannot be written, or is a link.
    """
    with open_own(path, append=True) as file:
        data = line.encode() + b"\n"
        if file.tell():
            with path.open("rb") as written:
                written.seek(-1, os.SEEK_END)
                data = data if written.read(1) == b"\n" else b"\n" + data
        while data:
            data = data[file.write(data) :]


def describe_rank(islands: Islands | None) -> dict[str, Any]:
    """Return the facts of this rank and of its host: placement, devices, cores, environment variables."""
    host = socket.gethostname() if islands is None else islands.environment.host
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        "rank": 0 if islands is None else islands.environment.rank,
        "island": 0 if islands is None else islands.placement.island,
        "process": jax.process_index(),
        "host": host,
        "pid": os.getpid(),
        "devices": _devices(),
        "cores": ranges_text(cores),
        "variables": shown_variables(os.environ),
        "of_host": {
            **system_facts(),
            "cores": os.cpu_count(),
            "memory_bytes": memory_bytes("MemTotal"),
            "limits": limits(),
            "network": network_links(),
            "infiniband": infiniband_links(),
        },
    }


def _devices() -> list[dict[str, Any]]:
    """Return the kinds of this process's devices, with the number and the usable memory of each."""
    kinds = Counter(
        (d.platform, d.device_kind, (d.memory_stats() or {}).get("bytes_limit")) for d in jax.local_devices()
    )
    names = ("platform", "kind", "memory_bytes")
    return [{**dict(zip(names, kind, strict=True)), "number": number} for kind, number in kinds.items()]


def make_start_record(ranks: Sequence[Mapping[str, Any]], islands: Islands | None) -> dict[str, Any]:
    """Return the record of a start: common facts once, then the facts of hosts and ranks.

    Args:
      ranks: the results of `describe_rank`, by rank.
      islands: the islands of the run, whose packages, flags and MPI are equal on all ranks; or None.
    """
    variables = ranks[0]["variables"]
    hosts: dict[str, Any] = {}
    for rank in ranks:
        hosts.setdefault(rank["host"], rank["of_host"])
    mpi: dict[str, str] | None = None
    if islands is not None:
        from shardtrain.islands.bridge import library_facts  # MPI has started

        mpi = {**library_facts(), "launcher": islands.environment.launcher}
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "packages": list_installed_packages(sys.path),
        "mpi": mpi,
        "flags": {name.removeprefix("flags/"): value for name, value in flags(os.environ).items()},
        "variables": variables,
        "hosts": hosts,
        "ranks": [_own(rank, variables) for rank in ranks],
    }


def _own(rank: Mapping[str, Any], common: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts of a rank without its host's, with only the variables that differ from rank 0."""
    found = {name: value for name, value in rank.items() if name not in ("of_host", "variables")}
    own = rank["variables"]
    names = [name for name in sorted({*own, *common}) if own.get(name) != common.get(name)]
    return {**found, "variables": {name: own.get(name) for name in names}}


MARK = "program.json"

MOST_BYTES, MOST_CHARACTERS = 1 << 14, 400
"""Limits of the file, and of each text in it."""

TEXTS = ("program", "options", "jax")
"""Keys of the file."""


class ProgramMark(NamedTuple):
    """Marks programs in the folder of a run before they first run.

    Args:
      folder: the folder; None on ranks that mark nothing.
      options: the options of the layout, as on the command line.
    """

    folder: Path | None
    options: str

    @contextmanager
    def running(self, program: str) -> Iterator[None]:
        """Mark a program until the block ends, also by an exception."""
        if self.folder is None:
            yield
            return
        path, is_new = self.folder / MARK, not self.folder.exists()
        content = {"program": program, "options": self.options, "jax": version("jax")}
        with suppress(OSError):  # a full disk ends no run
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(content).encode())
        try:
            yield
        finally:
            remove_mark(self.folder)
            # a run that is refused leaves no folder
            if is_new:
                with suppress(OSError):
                    self.folder.rmdir()

    def first_run(self, program: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose first call is marked until its results are computed.

        Args:
          program: its name.
          call: a function; new shapes of its arguments after the first are another program.
        """
        if self.folder is None:
            return call
        seen: set[Any] = set()

        def marked(*arguments: Any) -> Any:
            shapes = tuple(np.shape(x) for x in jax.tree.leaves(arguments[1:]))
            if shapes in seen:
                return call(*arguments)
            with self.running(program):
                result = jax.block_until_ready(call(*arguments))
            seen.add(shapes)
            return result

        return marked


def make_mark(strategy: Strategy, folder: Path, coordination: Coordination) -> ProgramMark:
    """Make the mark of a run's programs, which only its first rank writes; islands that come and go none."""
    alone = coordination.is_first and coordination.is_chief is None
    return ProgramMark(folder if alone else None, format_layout_options(strategy))


def format_layout_options(strategy: Strategy) -> str:
    """Format the options of a strategy that shape its programs, as on the command line.

    >>> from shardtrain.sharding.layout import Layout
    >>> format_layout_options(Strategy(layout=Layout(mesh={"data": 2, "tensor": 1}, zero=1), accumulate=2))
    '--mesh data=2 --zero 1 --accumulate 2'
    """
    layout, default = strategy.layout, Strategy()
    sizes = {axis: size for axis, size in layout.mesh.items() if size != 1}
    words = [mesh_text(replace(layout, mesh=sizes))] if sizes else []
    for name, value in (
        ("unnamed", layout.unnamed),
        ("accumulate", strategy.accumulate),
        ("remat", strategy.remat),
        ("schedule", strategy.pipeline.schedule),
    ):
        if value not in (1, None, default.pipeline.schedule, default.layout.unnamed):
            words.append(f"--{name} {value}")
    return " ".join(words)


def remove_mark(folder: Path) -> None:
    """Remove the mark of a folder, if it has one."""
    with suppress(OSError):
        (folder / MARK).unlink(missing_ok=True)


def take_mark(folder: Path) -> str | None:
    """Read and remove the mark of a start that ended inside a program; return the note about it, or None."""
    path = folder / MARK
    if not folder.is_dir():
        return None
    try:
        # a mark of a process that trains here now is in use
        with hold_lock(folder):
            found = read_json(path, MOST_BYTES)
    except (LockHeld, FileNotFoundError):
        return None
    except ValueError as error:
        return f"WARNING: {error}; remove it"
    remove_mark(folder)
    if not _is_mark(found):
        return (
            f"WARNING: {path} is no mark of a program: it needs the texts {', '.join(TEXTS)}; it is removed"
        )
    return format_ended(found)


def _is_mark(found: Any) -> bool:
    return isinstance(found, dict) and all(
        isinstance(text := found.get(key), str) and len(text) <= MOST_CHARACTERS and text.isprintable()
        for key in TEXTS
    )


def format_ended(mark: Mapping[str, str]) -> str:
    """Return the note about a start that ended inside a program.

    >>> mark = {"program": "the step", "options": "--mesh data=2,tensor=2", "jax": "0.10.2"}
    >>> format_ended(mark).partition(". ")[0].partition("while ")[2]
    'the step was compiled or run for the first time (jax 0.10.2, --mesh data=2,tensor=2)'
    """
    options = mark["options"] or "one device"
    return (
        f"an earlier start of this run ended without an exception while {mark['program']} was"
        f" compiled or run for the first time (jax {mark['jax']}, {options}). If nobody killed it and memory"
        " was enough, XLA aborted: the last lines that it printed say so, as 'Check failed'. It would again:"
        " leave out one of these axes or options (inspect --compile cpu tries a layout on this machine), or"
        " take another jax. This start continues with the same options"
    )
