"""Send metrics to a tracking service: keep the run's id and last step, and survive failures.

A service cannot delete steps, so steps that it has are not sent again after a restart. Next: `wandb.py`,
`mlflow.py`.
"""

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardtrain.report.sinks.sink import RUN_FILE
from shardtrain.system.log_file import LogFile
from shardtrain.system.untrusted_files import read_text

MOST_BYTES, MOST_OPTIONS = 1 << 24, 1000


Begin = Callable[[str | None], tuple[str, Callable[[int, Mapping[str, float]], None], Callable[[], None]]]
"""Run id to continue, or None -> (run id, function that sends a step, function that ends the run)."""


class TrackedSink:
    """A sink that sends metrics to a tracking service; failures are reported, and end no run.

    A file of the run folder has the id of the run at the service, then each step that was sent on its own
    line.

    Args:
        service: its name in messages.
        path: the file.
        resume_after: the restored step, or None for a run that starts from the beginning with a new id.
        report: receives warnings.

    Attributes:
        run_id: the id; None for a new run before `start`.
        last_step: the last step that the service has, or None.
    """

    def __init__(
        self, service: str, path: Path, resume_after: int | None, report: Callable[[str], None]
    ) -> None:
        self._service, self._path, self._report = service, path, report
        self._num_lost = 0
        self.run_id: str | None = None
        self.last_step: int | None = None
        if resume_after is not None and path.exists():
            first, *steps = read_text(path, MOST_BYTES).split("\n")
            # the last line may be incomplete
            whole = [int(step) for step in steps[:-1] if step.isdecimal()]
            if re.fullmatch(r"[\w-]{1,64}", first):
                self.run_id, self.last_step = first, max(whole, default=None)

    def start(self, begin: Begin) -> None:
        """Begin or continue the run at the service, and write a new id to the file."""
        run_id, self._log, self._finish = begin(self.run_id)
        is_same = run_id == self.run_id
        self._file = LogFile(self._path, append=is_same, report=self._report)
        if not is_same:
            self.run_id, self.last_step = run_id, None
            self._file.write(f"{run_id}\n".encode())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step, unless the service has it from before a restart."""
        if self.last_step is not None and step <= self.last_step:
            return
        try:
            self._log(step, values)
        except Exception as error:
            self._num_lost += 1
            if self._num_lost == 1:
                self._report(
                    f"WARNING: {self._service} did not accept the metrics of step {step}: {_line(error)}. The"
                    " run continues, and metrics.jsonl has them"
                )
        else:
            self.last_step = step
            self._file.write(f"{step}\n".encode())

    def close(self) -> None:
        """End the run at the service."""
        try:
            self._finish()
        except Exception as error:
            self._report(f"WARNING: {self._service} may lack the last metrics: {_line(error)}")
        if self._num_lost > 1:
            self._report(
                f"WARNING: {self._service} did not accept the metrics of {self._num_lost} steps in total"
            )
        self._file.close()


def open_tracked(
    service: str, path: Path, resume_after: int | None, report: Callable[[str], None], begin: Begin
) -> TrackedSink | None:
    """Open a sink of a tracking service.

    A service that cannot be reached is an error at the first start. At a restart it is reported, and the run
    continues without it: a run that a scheduler starts again must not wait for it.

    Args:
        service, path, resume_after, report: see `TrackedSink`.
        begin: begins or continues the run at the service.

    Raises:
        ValueError: the service cannot be reached, at the first start.
    """
    sink = TrackedSink(service, path, resume_after, report)
    try:
        sink.start(begin)
    except Exception as error:
        text = f"metrics cannot be sent to {service}: {type(error).__name__}: {error}"
        if resume_after is None:
            raise ValueError(
                f"{text}; leave it out of --sinks, or use it offline (docs/metrics.md)"
            ) from error
        report(f"WARNING: {text}; the run continues without it")
        return None
    return sink


def run_options(folder: Path) -> dict[str, Any]:
    """Return the options of a run from its run file, by name; {} if there is none.

    Args:
        folder: the folder of the run.
    """
    path = folder / RUN_FILE
    lines = read_text(path, MOST_BYTES).splitlines() if path.exists() else []
    pairs = [line.split(" = ", 1) for line in lines if " = " in line]
    return {name: _value(text) for name, text in pairs[:MOST_OPTIONS]}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
