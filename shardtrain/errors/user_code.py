"""Tell exceptions of the user's code (data, loss, sample) from mistakes in options or inputs.

`user_code` wraps a call of such code; the command line shows the user's part of the traceback. No jax.
"""

import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

PACKAGE = __name__.partition(".")[0]

FOLDER = f"{Path(__file__).parents[1]}{os.sep}"
"""The folder of this package, with a separator at its end."""

OWN_MISTAKES = (ValueError, OSError)
"""Exceptions of shardtrain for mistakes in options or inputs, with the fix in the text."""


class UserCodeFailed(Exception):
    """The user's code raised the exception that is the cause of this one; the text says where in the run."""


@contextmanager
def user_code(where: Callable[[BaseException], str]) -> Iterator[None]:
    """Convert exceptions of the user's code within this context to `UserCodeFailed`.

    Errors of shardtrain that explain a mistake pass through.

    Args:
      where: exception -> its place, such as "sample 3 of the training data".

    Raises:
      UserCodeFailed: the user's code raised an exception, or asked Python to exit.
    """
    try:
        yield
    except UserCodeFailed:
        raise
    except SystemExit as error:
        # it would end one rank of several, in the middle of a run, as if all were done
        text = f"called sys.exit({error.code!r}); raise an exception to stop the run, or return"
        raise UserCodeFailed(f"{where(error)} {text}") from error
    except Exception as error:
        if isinstance(error, OWN_MISTAKES) and _is_raised_here(error.__traceback__):
            raise
        text = _format_traced(error) or f"raised {type(error).__name__}: {error}"
        raise UserCodeFailed(f"{where(error)} {text}") from error


def _format_traced(error: Exception) -> str:
    """Format an error of code that needs the value of a traced array; "" for other errors.

    The text of jax would name the traced function, which belongs to this package.
    """
    change = _TRACED.get(type(error).__name__) if type(error).__module__ == "jax.errors" else None
    if change is None:
        return ""
    line = (error.__traceback__ and _users_line(error)) or "a library that it calls"
    return f"needs the value of an array at {line}, and steps are traced, without values; {change}"


def _users_line(error: Exception) -> str:
    """Return file, line and text of the innermost call in the user's files; "" if there is none."""
    calls = [call for call in traceback.extract_tb(error.__traceback__) if is_users(call.filename)]
    return f"{calls[-1].filename}:{calls[-1].lineno} ({calls[-1].line})" if calls else ""


_NUMBERS = "use jax.numpy in the place of numpy, float(), int() and .item()"
_TRACED = {
    "TracerBoolConversionError": (
        "in the place of if, while, and, or, use jnp.where(condition, a, b), jax.lax.cond,"
        " jax.lax.while_loop, & and |"
    ),
    "TracerArrayConversionError": _NUMBERS,
    "ConcretizationTypeError": _NUMBERS,
    "TracerIntegerConversionError": "use jnp.take, jax.lax.dynamic_slice or jax.lax.fori_loop",
    "NonConcreteBooleanIndexError": "in the place of x[mask] use jnp.where(mask, x, 0)",
}
"""Errors of jax about a value that tracing does not have -> what to write."""


def _is_raised_here(trace: TracebackType | None) -> bool:
    """Return whether the innermost call is in this package, whose errors explain themselves."""
    innermost = False
    while trace is not None:
        innermost, trace = _is_own(trace), trace.tb_next
    return innermost


def _is_own(trace: TracebackType) -> bool:
    """Return whether a call is in this package, by module name: paths may contain links."""
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == PACKAGE


def user_traceback(failure: UserCodeFailed) -> str:
    """Return the traceback of the user's exception: the calls in the user's files, or else in libraries."""
    error = failure.__cause__
    assert error is not None
    formatted = traceback.TracebackException.from_exception(error)
    users = [call for call in formatted.stack if is_users(call.filename)]
    shown = users or [call for call in formatted.stack if not call.filename.startswith(FOLDER)]
    formatted.stack = traceback.StackSummary.from_list(shown)
    lines = list(formatted.format(chain=False))
    if isinstance(error, Exception) and _format_traced(error):
        # what follows the calls and the first line of the error names what is traced
        kind = f"{type(error).__module__}.{type(error).__name__}"
        first = str(error).partition("\n")[0]
        lines = [*lines[: len(shown) + 1], f"{kind}: {first}\n"]
    return "".join(lines)


def find_raising_line(error: BaseException) -> str:
    """Return the file and line of the user's code that raised an error, or called the library that did.

    Args:
      error: caught where this package called the user's code.

    >>> try:
    ...     exec(compile("1 / 0", "hooks.py", "exec"))
    ... except ZeroDivisionError as error:
    ...     find_raising_line(error)
    'hooks.py:1'
    """
    calls = traceback.extract_tb(error.__traceback__)
    # the first call is that of this package; libraries, which are installed, are no code of the user
    own = [call for call in calls[1:] if not is_installed(call.filename)] or calls
    return f"{own[-1].filename}:{own[-1].lineno}"


def calling_line() -> str:
    """Return the innermost file and line of the user's running code."""
    calls = [call for call in traceback.extract_stack() if is_users(call.filename)]
    return f"{calls[-1].filename}:{calls[-1].lineno}" if calls else "?"


def is_users(path: str) -> bool:
    """Return whether a file belongs to the user: it is neither installed nor part of this package."""
    return not is_installed(path) and not path.startswith((FOLDER, "<"))


def is_installed(path: str) -> bool:
    return "site-packages" in path or path.startswith((sysconfig.get_path("stdlib"), "<frozen"))
