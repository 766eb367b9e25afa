"""Write the program that is compiled or first run to `program.json`, in case XLA ends the process there.

XLA raises no exception then. The next start reads the file, says which program it was and what to change, and
continues. Next: `train.py`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shardtrain.plan.space import mesh_text
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.run_lock import LockHeld, hold_lock
from shardtrain.system.untrusted_files import read_json
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.strategy import Strategy

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
