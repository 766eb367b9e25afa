"""A log file whose write errors (full disk, quota, lost server) do not end the run.

What cannot be written waits in memory, in order. Who writes what is in `report/metrics.py`.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from shardtrain.system.atomic_write import open_own

_LOG = logging.getLogger(__name__)

MOST_WAITING_BYTES = 1 << 26


class LogFile:
    """Added to at its end, at once and without a buffer: what is written is the system's.

    A file that is deleted while it is added to is made anew, and has what comes from then on.

    Args:
        path: the file; its folder is there.
        append: to what it holds; else it starts empty.
        report: receives a line when writing begins to fail, when it works again, and what is lost at the end.

    Raises:
        OSError: it cannot be opened, or is a link.

    Examples:
        >>> import tempfile
        >>> file = LogFile(Path(tempfile.mkdtemp()) / "log", append=False)
        >>> file.write(b"a line"), file.close(), file.path.read_bytes()
        (None, None, b'a line')
    """

    def __init__(self, path: Path, *, append: bool, report: Callable[[str], None] = _LOG.warning) -> None:
        self.path, self._report = path, report
        self._file = open_own(path, append=append)
        self._waiting = bytearray()
        self._num_lost = 0
        self._fails = False

    def write(self, data: bytes) -> None:
        """Add this, or keep it until the file takes it; beyond `MOST_WAITING_BYTES` it is lost."""
        if len(self._waiting) + len(data) > MOST_WAITING_BYTES:
            self._num_lost += len(data)
        else:
            self._waiting += data
        self._flush()

    def close(self) -> None:
        """Try once more, and let go of the file."""
        if self._file.closed:
            return
        self._flush()
        if lost := self._num_lost + len(self._waiting):
            self._report(f"WARNING: {lost:,} bytes of {self.path} could not be written, and are lost")
        try:
            self._file.close()
        except OSError as error:
            self._report(f"WARNING: {self.path} may lack its end: {error}")

    def _flush(self) -> None:
        try:
            if self._waiting and not os.fstat(self._file.fileno()).st_nlink:
                self._begin_anew()
            while self._waiting:
                # the system may take a part; the rest follows it
                del self._waiting[: self._file.write(bytes(self._waiting))]
        except OSError as error:
            if not self._fails:
                self._report(
                    f"WARNING: {self.path} cannot be written: {error}. The run goes on, and its lines wait in"
                    f" memory, {MOST_WAITING_BYTES:,} bytes at most; free space, or make it writable"
                )
            self._fails = True
        else:
            if self._fails:
                self._report(f"{self.path} is written again, from where it stopped")
            self._fails = False

    def _begin_anew(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        deleted, self._file = self._file, open_own(self.path, append=True)
        deleted.close()
        self._report(f"WARNING: {self.path} was deleted; it begins anew, with what comes from now on")
