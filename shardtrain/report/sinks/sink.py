"""The interface of a metric sink, and a sink that writes to several. Next: `json_lines.py`."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

RUN_FILE = "run.txt"
"""The file in the folder of a run with its options, a line each; written before sinks are opened."""


class Sink(Protocol):
    """A destination of metrics. All values of a step are written in one call."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step, by name (`train/loss`, `heldout/loss`, `tokens_per_second`)."""
        ...

    def close(self) -> None:
        """Finish pending writes and close the files."""
        ...


OpenSink = Callable[[Path, int | None, Callable[[str], None]], Sink | None]
"""(run folder, resume_after, report) -> sink, or None if a package is not installed, which is reported.

`resume_after` is the restored step, after which values are dropped, or None if the run starts from the
beginning. `report` receives warnings, such as a full disk: a sink that cannot write does not end the run.
Only the first process of a run opens sinks.
"""


class Sinks:
    """Several sinks as one.

    Args:
        sinks: the sinks, written in this order; all are closed, even if one fails.
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
