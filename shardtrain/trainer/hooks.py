"""Call functions of the user at the events of a run: steps, log lines, evaluations, saves, the end.

Next: `loop.py`, where the events occur.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse
from shardtrain.errors.user_code import UserCodeFailed, find_raising_line
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.system.stop_signals import StopSignals

_LOG = logging.getLogger(__name__)

ARGUMENTS = {
    "on_step": ("step",),
    "on_log": ("step", "metrics"),
    "on_evaluation": ("step", "metrics"),
    "on_save": ("step", "folder"),
    "on_end": ("step", "ending"),
}
"""Event -> the names of the arguments of its functions."""

HookErrors = Literal["report", "stop"]

Ending = Literal["finished", "signal", "time limit", "error"]
"""How a run ended: its last step is done, a signal or the time limit stopped it, or an exception ended it."""


@final
@dataclass(frozen=True, kw_only=True)
class Hook:
    """Functions that a run calls at its events, on the thread of the training loop.

    Only rank 0 calls them: the process that prints and writes metrics. They get plain values, never arrays
    of a device, and must not call anything in which other ranks take part. After a rollback, or a restart
    from a checkpoint, steps are repeated, and so are their events.

    Args:
      on_step: (step): a step was started. The device may still compute it, so there are no metrics yet.
      on_log: (step, metrics): a line of metrics was written, held-out values of an evaluation included; a
        dict of floats by name.
      on_evaluation: (step, metrics): held-out values only, such as {"heldout/loss": 2.31}.
      on_save: (step, folder): a checkpoint is complete on the disk, in this folder. It is saved in the
        background, so this is called some steps after `step`. If islands save a step in parts, it is called
        with the folder of the first part once all of them are there.
      on_end: (step, ending): the run ends after `step` steps. `ending` is "finished", "signal", "time limit"
        or "error"; all but the last are called after everything is saved.

    Raises:
      ValueError: no function is given, or one does not take the arguments of its event.

    >>> Hook(on_log=lambda step, metrics: None).on_step is None
    True
    """

    on_step: Callable[..., Any] | None = None
    on_log: Callable[..., Any] | None = None
    on_evaluation: Callable[..., Any] | None = None
    on_save: Callable[..., Any] | None = None
    on_end: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        given = {event: function for event in ARGUMENTS if (function := getattr(self, event)) is not None}
        if not given and not problems:
            problems.append(f"no function is given; give one or more of {', '.join(ARGUMENTS)}")
        problems += [
            f"{event} is {_name(function)}{signature}, and is called with ({', '.join(ARGUMENTS[event])});"
            " let it take these by position"
            for event, function in given.items()
            if (signature := _format_other_signature(function, len(ARGUMENTS[event])))
        ]
        refuse("this hook cannot be called", problems)


class Hooks:
    """Calls the hooks of a run; their exceptions are reported, or end the run.

    Args:
      hooks: the hooks, in the order of the calls.
      errors: "report" reports the first exception of each function and event, and the run continues; "stop"
        ends the run.
      report: receives warnings.
      activity: what this process is doing, for its watchdog.
      is_first: returns whether this is rank 0; the hooks of other ranks are not called.

    Attributes:
      has_save: whether a hook has `on_save`; the same on all ranks.
    """

    def __init__(
        self,
        hooks: Sequence[Hook] = (),
        errors: HookErrors = "report",
        report: Callable[[str], None] = _LOG.warning,
        activity: ActivityRecord | None = None,
        is_first: Callable[[], bool] = lambda: True,
    ) -> None:
        self._hooks, self._is_first = tuple(hooks), is_first
        self._errors, self._report, self._activity = errors, report, activity or ActivityRecord()
        self._num_failed: Counter[str] = Counter()
        self._last_save, self._last_step = -1, 0
        self.has_save = any(hook.on_save is not None for hook in hooks)

    def step(self, step: int) -> None:
        """Call `on_step`."""
        self._last_step = step
        self._call("on_step", step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `on_log`."""
        self._call("on_log", step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `on_evaluation`, except in a run without held-out data."""
        if metrics:
            self._call("on_evaluation", step, metrics)

    def restored(self, step: int) -> None:
        """Record that training continues after this step; its checkpoint is not reported again."""
        self._last_save = self._last_step = step

    def save(self, step: int | None, folder: Callable[[int], Path]) -> None:
        """Call `on_save`, once for each step.

        Args:
          step: the newest complete checkpoint; None if there is none.
          folder: step -> the folder of its checkpoint.
        """
        if step is not None and step > self._last_save:
            self._last_save = step
            self._call("on_save", step, folder(step))

    def end(self, ending: Ending) -> None:
        """Call `on_end`, and report how many exceptions functions raised after their first one."""
        if ending == "error":
            # an exception of a hook must not replace the one that ended the run
            self._errors = "report"
        self._call("on_end", self._last_step, ending)
        for name, number in self._num_failed.items():
            if number > 1:
                self._report(f"WARNING: {name} raised {number} exceptions in all; the first is above")

    def _call(self, event: str, step: int, *values: Any) -> None:
        for hook in self._hooks if self._is_first() else ():
            function = getattr(hook, event)
            if function is None:
                continue
            # each function gets a dict of its own, which it may change
            own = [dict(value) if isinstance(value, Mapping) else value for value in values]
            with self._activity.at(f"the hook {_name(function)}", long=True):
                try:
                    function(step, *own)
                except Exception as error:
                    self._report_failure(f"the hook {_name(function)} ({event})", step, error)

    def _report_failure(self, name: str, step: int, error: Exception) -> None:
        """Report the first exception of a function.

        Raises:
          UserCodeFailed: hooks may not fail.
        """
        if self._errors == "stop":
            raise UserCodeFailed(
                f"{name} at step {step} raised {type(error).__name__}: {error}; with hook_errors='report' the"
                " run would continue"
            ) from error
        self._num_failed[name] += 1
        if self._num_failed[name] == 1:
            self._report(
                f"WARNING: {name} at step {step} raised {type(error).__name__}: {error}"
                f" ({find_raising_line(error)}); the run continues. To end it instead: hook_errors='stop'"
            )


@contextmanager
def calling_end(hooks: Hooks, stop: StopSignals) -> Iterator[None]:
    """Call `on_end` when the context is left, also by an exception.

    Args:
      hooks: the hooks of the run.
      stop: whether a signal or the time limit ended the run.
    """
    try:
        yield
    except Exception:
        hooks.end("error")
        raise
    hooks.end("signal" if stop.received is not None else "time limit" if stop.time_over else "finished")


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function or another callable.

    >>> _name(Hooks().step), _name(print)
    ('Hooks.step', 'print')
    """
    found = getattr(function, "func", function)  # of a functools.partial
    return getattr(found, "__qualname__", type(found).__qualname__)


def _format_other_signature(function: Callable[..., Any], number: int) -> str:
    """Return the signature of a function that cannot take this number of arguments; "" if it can.

    >>> [_format_other_signature(lambda step, *, more=1: None, number) for number in (2, 1)]
    ['(step, *, more=1)', '']
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some builtin functions have none
        return ""
    try:
        signature.bind(*range(number))
    except TypeError:
        return str(signature)
    return ""
