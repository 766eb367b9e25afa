"""Exceptions of the user's own code (data, loss, sample): kept apart from mistakes in what was asked.

`user_code` wraps a call into such code; the command line shows the user's part of the traceback. No jax.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

PACKAGE = __name__.partition(".")[0]

OWN_MISTAKES = (ValueError, OSError)
"""What shardtrain raises for a mistake in what was asked, with its cure in the text."""


class UserCodeFailed(Exception):
    """Code of the user's raised; the cause is its exception, and the text says where in the run that was."""


@contextmanager
def user_code(where: Callable[[Exception], str]) -> Iterator[None]:
    """Call code of the user's under this.

    What shardtrain itself raises inside, for a mistake that it explains, passes through.

    Args:
      where: exception -> what raised, and with what, as in "sample 3 of the training data".

    Raises:
      UserCodeFailed: the code raised.
    """
    try:
        yield
    except UserCodeFailed:
        raise
    except Exception as error:
        if isinstance(error, OWN_MISTAKES) and _raised_here(error.__traceback__):
            raise
        raise UserCodeFailed(f"{where(error)} raised {type(error).__name__}: {error}") from error


def _raised_here(trace: TracebackType | None) -> bool:
    """Whether the innermost call is in this package: its models and data explain what they refuse."""
    innermost = False
    while trace is not None:
        innermost, trace = _is_own(trace), trace.tb_next
    return innermost


def _is_own(trace: TracebackType) -> bool:
    """Whether a call is of this package, by the name of its module: a path may lead through links."""
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == PACKAGE


def user_traceback(failure: UserCodeFailed) -> str:
    """The traceback of the user's exception, from its first call outside of this package."""
    error = failure.__cause__
    assert error is not None
    trace = error.__traceback__
    while trace is not None and _is_own(trace):
        trace = trace.tb_next
    shown = trace or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, shown, chain=False))
