"""A log file whose write errors (full disk, quota, lost server) do not end the run.

Data that cannot be written waits in memory, in order, and is written once the file works again.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from shardtrain.system.atomic_write import open_own, write_advice

_LOG = logging.getLogger(__name__)

MOST_WAITING_BYTES = 1 << 26


class LogFile:
    """A file to which data is appended immediately, without a buffer in this process.

    If the file is deleted meanwhile, it is created again and gets the data from then on. One that is shared
    is not written any more once another process has put a new file in its place.

    Args:
        path: the file; its folder exists.
        append: whether to keep its present content; else it starts empty.
        is_shared: whether other processes may put a new file in its place, to write it from then on.
        report: receives a line when writes begin to fail, when they work again, and when data is lost.

    Raises:
        OSError: the file cannot be opened, or is a link.

    Examples:
        >>> import tempfile
        >>> file = LogFile(Path(tempfile.mkdtemp()) / "log", append=False)
        >>> file.write(b"a line"), file.close(), file.path.read_bytes()
        (None, None, b'a line')
    """

    def __init__(
        self,
        path: Path,
        *,
        append: bool,
        is_shared: bool = False,
        report: Callable[[str], None] = _LOG.warning,
    ) -> None:
        self.path, self._is_shared, self._report = path, is_shared, report
        self._file = open_own(path, append=append)
        self._waiting = bytearray()
        self._num_lost = 0
        self._fails = False

    def write(self, data: bytes) -> None:
        """Append data, or keep it until it can be written; beyond `MOST_WAITING_BYTES` it is lost."""
        if len(self._waiting) + len(data) > MOST_WAITING_BYTES:
            self._num_lost += len(data)
        else:
            self._waiting += data
        self._flush()

    def close(self) -> None:
        """Try to write what is pending, report what is lost, and close the file."""
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
                self._create_again()
            while self._waiting:
                # the system may write only a part; the rest follows
                del self._waiting[: self._file.write(bytes(self._waiting))]
        except OSError as error:
            if self._is_shared and isinstance(error, FileExistsError):
                self._waiting.clear()
                return
            if not self._fails:
                self._report(
                    f"WARNING: {self.path} cannot be written: {error}. The run continues, and its lines wait"
                    f" in memory, {MOST_WAITING_BYTES:,} bytes at most; {write_advice(error)}"
                )
            self._fails = True
        else:
            if self._fails:
                self._report(f"{self.path} is written again, from where it stopped")
            self._fails = False

    def _create_again(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        deleted, self._file = self._file, open_own(self.path, append=True, is_new=self._is_shared)
        deleted.close()
        self._report(f"WARNING: {self.path} was deleted; it is created again, with the lines from now on")
