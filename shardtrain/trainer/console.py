"""Print the notes and warnings of a run, without breaking its progress display.

`report/progress.py` formats numbers and bars. Next: `train.py`.
"""

from collections.abc import Mapping
from typing import Self

import jax
from rich.console import Console

from shardtrain.islands.membership import Islands
from shardtrain.report.progress import Progress
from shardtrain.system import terminal
from shardtrain.system.standard_streams import escape_unencodable
from shardtrain.system.terminal import printable


def say(console: Console, text: str) -> None:
    """Print text literally on any terminal; control characters are escaped."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class RunConsole:
    """The output of one process of a run.

    Only the first process of all prints. The others write their warnings to standard error.

    Args:
      console: where to print; None means the terminal.
      islands: the islands of the run; None for a run of one island.
      holds: whether to keep all text until `release`, because it is not known yet which process prints.
    """

    def __init__(self, console: Console | None, islands: Islands | None, *, holds: bool = False) -> None:
        escape_unencodable()
        is_first = jax.process_index() == 0 if islands is None else islands.is_first
        self.console = (console or Console()) if is_first else Console(quiet=True)
        self._name = None if is_first or islands is None else islands.control.names[islands.environment.rank]
        self._pending: list[str] = []
        self._holds, self._was_quiet = holds, self.console.quiet
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._holds:
            self.release(True)
        for text in self._pending:
            self.say(text)
        self.console.quiet = self._was_quiet

    def say(self, text: str) -> None:
        """Print text at once."""
        if self._holds:
            self._pending.append(text)
        else:
            say(self.console, text)

    def release(self, is_first: bool, name: str = "") -> None:
        """Print what was held if this process prints for all; else forget it."""
        if self._holds:
            self._holds = False
            pending, self._pending = self._pending, []
            for text in pending if is_first else ():
                self.say(text)
        self.show(is_first, name)

    def show(self, is_first: bool, name: str = "") -> None:
        """Print from now on if this process prints for all; else only warnings, under a name."""
        if not self._holds:
            self.console.quiet, self._name = not is_first, None if is_first else name

    def note(self, text: str) -> None:
        """Print a note or a warning above the progress display, or keep it until there is one."""
        if self._name is not None:
            if text.startswith("WARNING"):
                terminal.err(f"{self._name}: {text}\n")
        elif self._progress is None:
            self._pending.append(text)
        else:
            self._progress.note(text)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of a step, see `report.progress.Progress`."""
        assert self._progress is not None
        self._progress.update(step, values)

    def attach(self, progress: Progress) -> None:
        """Print pending notes, and all that follow, above a progress display."""
        self._progress = progress
        for text in self._pending:
            progress.note(text)
        self._pending.clear()

    def detach(self) -> None:
        """Keep notes for the next progress display, or for the end."""
        self._progress = None
