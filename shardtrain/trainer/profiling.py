"""Record a trace of some steps with jax's profiler in the run folder, and summarise it (`--profile 10-12`).

`report/trace.py` reads it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shardtrain.report.trace import UNTIMED, find_operations, read_trace, summarise, summary_text
from shardtrain.report.trace_programs import read_sources
from shardtrain.train_step.step import Step

FOLDER = "profile"


@dataclass(frozen=True, kw_only=True)
class ProfiledSteps:
    """The range of steps that are profiled.

    Args:
      first: the first step, 2 or later, because the first step of a run compiles.
      last: the last step.
    """

    first: int
    last: int


def parse_steps(text: str) -> ProfiledSteps:
    """Parse the value of --profile.

    Raises:
      ValueError: it is not two numbers of steps in order.

    >>> parse_steps("10-12"), parse_steps("5")
    (ProfiledSteps(first=10, last=12), ProfiledSteps(first=5, last=5))
    """
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal() and 2 <= int(first) <= int(last)):
        raise ValueError(
            f"--profile is {text!r}; give the first and the last step, from 2 on (the first one compiles), as"
            " in 10-12"
        )
    return ProfiledSteps(first=int(first), last=int(last))


class ProfiledStep:
    """A step that records one trace of a range of steps.

    It waits for the device before the first and after the last of these steps, and around work in `untimed`,
    so that the trace has only these steps. The first step of a start, which compiles, is not recorded. The
    trace ends early if a rollback interrupts the range.

    Args:
      step: the step of the run.
      steps: the range of steps to profile.
      number: returns the number of the next step, from 1.
      folder: the folder of the run; the trace is in its folder `profile`.
      report: receives the summary, or a warning.
    """

    def __init__(
        self,
        step: Step,
        steps: ProfiledSteps,
        number: Callable[[], int],
        folder: Path,
        report: Callable[[str], None],
    ) -> None:
        self._step, self._steps, self._number = step, steps, number
        self._folder, self._report = folder / FOLDER, report
        self._begun_at: int | None = None
        self._num_done = 0
        self._is_compiled = self._is_done = False
        self._last: Any = None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        if self._is_done:
            return self._step(state, batch)
        number = self._number()
        if self._begun_at is not None and number != self._begun_at + self._num_done:
            self.close()
        elif self._is_compiled and self._steps.first <= number <= self._steps.last and not self._num_done:
            jax.block_until_ready(state)
            self._begin(number)
        found = self._step(state, batch)
        self._is_compiled = True
        if self._begun_at is not None:
            self._num_done, self._last = self._num_done + 1, found
            if number == self._steps.last:
                self.close()
        return found

    def _begin(self, number: int) -> None:
        options = jax.profiler.ProfileOptions()
        # each call of Python would be an event, and make steps longer
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._begun_at = number

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave work inside out of the summary: an evaluation, a save, a comparison of copies."""
        if self._last is None:
            yield
            return
        jax.block_until_ready(self._last)
        with jax.profiler.TraceAnnotation(UNTIMED):
            yield

    def close(self) -> None:
        """Stop the trace and report it; report a warning if no such step was run."""
        if self._is_done:
            return
        self._is_done = True
        if self._begun_at is not None:
            jax.block_until_ready(self._last)
            self._last = None
            jax.profiler.stop_trace()
            self._report(profile_text(self._folder, self._num_done))
        else:
            asked = f"{self._steps.first}-{self._steps.last}"
            self._report(f"WARNING: --profile {asked}: this start ran no such step, so there is no trace")


def profile_text(folder: Path, num_steps: int) -> str:
    """Return the summary of the newest trace in a folder, or a warning that it cannot be read."""
    try:
        newest = max(folder.glob("plugins/profile/*/*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        found = read_sources(next(newest.parent.glob("*.xplane.pb")))
        summary = summarise(find_operations(read_trace(newest), found))
    except (OSError, ValueError, StopIteration) as error:
        return f"WARNING: the trace in {folder} cannot be summarised: {error}"
    return f"{summary_text(summary, num_steps)}trace, for Perfetto or xprof: {newest}"
