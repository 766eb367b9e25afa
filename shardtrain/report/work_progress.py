"""Show the progress of work in parts, such as files: a live bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from shardtrain.report.quantities import duration_text

PLAIN_EVERY_SECONDS = 10.0


@contextmanager
def work_progress(
    unit: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, int], None]]:
    """Show progress while the block runs.

    Args:
      unit: name of a part, such as shards.
      console: to write to; None means standard error.
      clock: monotonic, in seconds.

    Returns:
      A function (done, total) to call when a part is done; the first call gives the parts done before.
    """
    console = console or Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with RichProgress(TextColumn("{task.description}"), *columns, console=console) as bar:
            task = bar.add_task(unit, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    first: list[tuple[int, float]] = []
    shown = -PLAIN_EVERY_SECONDS

    def line(done: int, total: int) -> None:
        nonlocal shown
        now = clock()
        first.append((done, now)) if not first else None
        if now - shown < PLAIN_EVERY_SECONDS and done < total:
            return
        shown = now
        begun, start = first[0]
        left = (now - start) / (done - begun) * (total - done) if done > begun else None
        rest = "" if left is None else f"  left {duration_text(left)}"
        console.print(f"{unit} {done}/{total}{rest}", highlight=False)

    yield line
