"""Write TensorBoard event files; the one module that imports tensorboardX."""

import importlib
import importlib.util
import logging
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardtrain.system.log_file import LogFile

_LOG = logging.getLogger(__name__)

FOLDER = "tensorboard"
"""The folder in the folder of a run."""


def open_tensorboard(
    folder: Path, resume_after: int | None, report: Callable[[str], None]
) -> "TensorBoard | None":
    """Open the event files of a run; None if tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        report("no TensorBoard files: install shardtrain[tensorboard]")
        return None
    return TensorBoard(folder / FOLDER, resume_after=resume_after, report=report)


class TensorBoard:
    """A sink of TensorBoard event files.

    It does not use tensorboardX's own writer, whose thread ends if the disk is full, after which writes block
    forever.

    Args:
        folder: the folder of the event files; each start adds one.
        resume_after: the restored step, after which TensorBoard hides values of earlier files; None hides all
            of them.
        report: receives a warning if they cannot be written, see `LogFile`.
    """

    def __init__(
        self, folder: Path | str, *, resume_after: int | None, report: Callable[[str], None] = _LOG.warning
    ) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sum(1 for _ in folder.glob("events.out.tfevents.*"))
        # two of the same second have names of their own
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{earlier:04d}"
        self._file = LogFile(folder / name, append=False, report=report)
        first = 0 if resume_after is None else resume_after + 1
        self._events: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        self._add(file_version="brain.Event:2")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(step=first, session_log=start)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._add(step=step, summary=scalar(name, float(value)))

    def close(self) -> None:
        self._file.close()

    def _add(self, **event: Any) -> None:
        """Append a record: length, its checksum, the event, its checksum."""
        from tensorboardX.record_writer import masked_crc32c

        data = self._events.Event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", masked_crc32c(each)) for each in (length, data)]
        self._file.write(length + checksums[0] + data + checksums[1])
