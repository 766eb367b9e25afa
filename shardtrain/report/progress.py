"""Show the progress of a run: a live bar on a terminal, plain lines elsewhere.

Numbers are formatted in `quantities.py`.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from shardtrain.report.metrics import Rate
from shardtrain.report.quantities import count_text, duration_text, loss_text
from shardtrain.system.terminal import printable


def progress(
    *,
    total_steps: int,
    start_step: int = 0,
    unit: str = "tokens",
    console: Console | None = None,
    plain_every_seconds: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> "Progress":
    """Return a progress bar on a terminal, plain lines elsewhere.

    Args:
        total_steps: steps of the whole run.
        start_step: steps done before a resume.
        unit: the unit of the throughput, which is logged as `<unit>_per_second`.
        console: to write to; None means standard output. `Console(quiet=True)` silences a rank.
        plain_every_seconds: least interval of plain lines, except the first, the last and those with a
            held-out loss; 0 writes each update.
        clock: monotonic, in seconds.

    Returns:
        A `Progress`, a context manager.
    """
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return ProgressBar(console, total_steps, start_step, unit, clock)
    return ProgressLines(console, total_steps, unit, plain_every_seconds, clock)


class ProgressLines:
    """Progress as lines: `step 120/1000  loss 2.3412  heldout 2.4012  12.3k tokens/s  MFU 38.2%  left 8s`."""

    def __init__(
        self, console: Console, total_steps: int, unit: str, every_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._console = console
        self._every_seconds = every_seconds
        self._clock = clock
        self._status = _Status(total_steps, unit)
        self._written_seconds = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, step: int, values: Mapping[str, float]) -> None:
        now_seconds = self._clock()
        self._status.update(step, values, now_seconds)
        due = now_seconds - self._written_seconds >= self._every_seconds
        evaluated = bool(heldout_losses(values))
        if due or evaluated or step >= self._status.total_steps:
            self._written_seconds = now_seconds
            self.note(self._status.line(heldout=evaluated))

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class ProgressBar:
    """Progress as a live bar with the newest loss and held-out loss."""

    def __init__(
        self, console: Console, total_steps: int, start_step: int, unit: str, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._status = _Status(total_steps, unit)
        self._rich = RichProgress(
            # on a narrow terminal the bar shrinks, not the numbers
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", markup=False),
            console=console,
            get_time=clock,
            refresh_per_second=4,
        )
        self._task = self._rich.add_task("", total=total_steps, completed=start_step)

    def __enter__(self) -> Self:
        self._rich.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._rich.stop()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        self._status.update(step, values, self._clock())
        self._rich.update(self._task, completed=step, description="  ".join(self._status.parts(heldout=True)))

    def note(self, text: str) -> None:
        self._rich.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


Progress = ProgressLines | ProgressBar
"""A progress display: a context manager with `update` for the metrics of a step and `note` for a message."""


class _Status:
    """The newest metrics to show, and the time left."""

    def __init__(self, total_steps: int, unit: str) -> None:
        self.total_steps = total_steps
        self._unit = unit
        self._step: int | None = None
        self._values: dict[str, float] = {}
        self._steps = Rate()

    def update(self, step: int, values: Mapping[str, float], now_seconds: float) -> None:
        done = step - self._step if self._step is not None else 0
        self._steps.add(now_seconds=now_seconds, units=done)
        self._step = step
        self._values |= values

    def line(self, *, heldout: bool) -> str:
        return "  ".join([f"step {self._step}/{self.total_steps}", *self.parts(heldout=heldout)])

    def parts(self, *, heldout: bool) -> list[str]:
        parts = []
        if "train/loss" in self._values:
            parts.append(f"loss {loss_text(self._values['train/loss'])}")
        if heldout:
            parts += [f"{name} {loss_text(loss)}" for name, loss in heldout_losses(self._values).items()]
        if f"{self._unit}_per_second" in self._values:
            parts.append(f"{count_text(self._values[f'{self._unit}_per_second'])} {self._unit}/s")
        if "mfu" in self._values:
            parts.append(f"MFU {self._values['mfu']:.1%}")
        if self._step is not None and self._steps.per_second:
            left_seconds = max(0, self.total_steps - self._step) / self._steps.per_second
            parts.append(f"left {duration_text(left_seconds)}")
        return parts


def heldout_losses(values: Mapping[str, float]) -> dict[str, float]:
    """Return the name in the display -> loss of each held-out set.

    >>> heldout_losses({"train/loss": 2.0, "heldout/loss": 2.5, "heldout/code/loss": 1.5})
    {'heldout': 2.5, 'heldout code': 1.5}
    """
    found = {name.removesuffix("/loss"): x for name, x in values.items() if name.endswith("/loss")}
    return {
        name.replace("/", " ", 1): loss for name, loss in found.items() if name.partition("/")[0] == "heldout"
    }
