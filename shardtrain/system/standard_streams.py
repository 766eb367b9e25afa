"""Keep a run alive when standard output or error cannot be written or is closed. No jax.

Every command uses `fill_closed` and `escape_unencodable`, and `wait_until_read` if it aborts other ranks. The
rest is only for `train`: the output of other commands is their result, so a failed write must end them.
"""

import fcntl
import os
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class SteadyStream:
    """A text stream that drops text that cannot be written.

    Args:
      stream: the stream to write to, which also has all other attributes.
      report: receives the first error.

    Example:
      >>> said = []
      >>> with open("/dev/full", "w") as full:
      ...     print("lost", file=SteadyStream(full, said.append), flush=True)
      ...     close_quietly(full)
      >>> said
      [OSError(28, 'No space left on device')]
    """

    def __init__(self, stream: Any, report: Callable[[OSError], object]) -> None:
        self._stream, self._report, self._has_failed = stream, report, False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            failed_before, self._has_failed = self._has_failed, True
            if not failed_before:
                self._report(error)


@contextmanager
def steady_output() -> Iterator[None]:
    """Ignore errors of printing within this context; report one of standard output on standard error."""
    out, err = sys.stdout, sys.stderr
    sys.stderr = SteadyStream(err, lambda error: None)
    sys.stdout = SteadyStream(out, _report)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
        for stream in (out, err):
            close_quietly(stream)


def _report(error: OSError) -> None:
    # the reader closed the pipe (`| head`): not worth a warning
    if not isinstance(error, BrokenPipeError):
        sys.stderr.write(
            f"WARNING: standard output cannot be written: {error}; the run continues without it\n"
        )


def fill_closed() -> None:
    """Connect closed standard streams (`>&-`) to the null device.

    Python represents them by None, and the next file that is opened would get their descriptor.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def escape_unencodable() -> None:
    r"""Escape characters that the encoding of standard output or error lacks, instead of failing.

    >>> import io
    >>> from contextlib import redirect_stdout
    >>> with redirect_stdout(io.TextIOWrapper(io.BytesIO(), "ascii")) as ascii:
    ...     escape_unencodable()
    ...     print(chr(233), end="", flush=True)
    >>> print(ascii.buffer.getvalue().decode())
    \xe9
    """
    for stream in (sys.stdout, sys.stderr):
        # UTF-8 has all characters; a stream that replaced the standard one may not encode
        encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-")
        if encoding not in ("utf-8", "utf8") and (reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(errors="backslashreplace")


def close_quietly(stream: Any) -> None:
    """Flush a stream, or discard its buffer if that fails; else the interpreter would exit with code 120."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def wait_until_read(seconds: float = 2.0) -> None:
    """Wait until the readers of standard output and error have read everything, if these are pipes.

    After MPI_Abort a launcher ends a job at once, and loses the text that it has not read yet: on a busy
    machine MPICH's lost the error message of one run in ten.

    Args:
      seconds: the longest wait, for a reader that hangs or is gone.
    """
    deadline = time.monotonic() + seconds
    while (_unread_bytes(1) or _unread_bytes(2)) and time.monotonic() < deadline:
        time.sleep(0.005)


def _unread_bytes(descriptor: int) -> int:
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]
    return 0
