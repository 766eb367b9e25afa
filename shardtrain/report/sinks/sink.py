"""The interface of a metric sink, and several sinks as one. Next: `json_lines.py`, `tensorboard.py`."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol


class Sink(Protocol):
    """Where metrics go. One line per step: what belongs to a step is written in one call."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step, by name (`train/loss`, `heldout/loss`, `tokens_per_second`)."""
        ...

    def close(self) -> None:
        """Finish what is under way and let go of the files."""
        ...


OpenSink = Callable[[Path, int | None, Callable[[str], None]], Sink | None]
"""(run folder, resume_after, report) -> sink, or None where it is not installed, which is reported.

`resume_after` is the restored step, whose later values are dropped; None starts anew. `report` receives
warnings, such as a disk that is full: a sink that cannot write does not end the run.
"""


class Sinks:
    """Several sinks as one.

    Args:
        sinks: written in this order; all are closed, whatever fails on the way.
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)
