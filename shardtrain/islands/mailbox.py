"""Send and receive arrays between pipeline stages over MPI; sends never block, so no task order deadlocks.

A thread takes arrays from a queue, sends each and drives MPI until it has arrived, so that messages of any
size arrive while the stage computes. Next: `train_step/stage_compute.py`.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtrain.islands.bridge import MPI
from shardtrain.islands.rank_timeout import RankWait
from shardtrain.islands.watchdog.activity import ActivityRecord

LONGEST_NAP_SECONDS = 2e-4


class Mailbox:
    """The channel between the stages of one pipeline.

    Args:
      comm: the communicator, in which rank s is stage s; it is duplicated.
      names: stage -> its name in messages.
      patience_seconds: time limit of a wait for a message.
      report: receives one line when a wait takes longer than `RankWait.REPORT_SECONDS`.
      activity: the activity record of this process, which records every wait.
      ranks: stage -> its rank among all, for the activity.
    """

    def __init__(
        self,
        comm: "MPI.Comm",
        names: Sequence[str],
        patience_seconds: float = 1800.0,
        report: Callable[[str], None] = lambda text: None,
        activity: ActivityRecord | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        self._activity, self._ranks = activity or ActivityRecord(), tuple(ranks)
        self._comm = comm.Dup()
        self._names, self.patience_seconds, self._report = list(names), patience_seconds, report
        self._largest_tag = self._comm.Get_attr(MPI.TAG_UB) or 32767
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.num_messages = 0
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._send_all, name="mailbox", daemon=True)
        self._thread.start()

    @property
    def stage(self) -> int:
        """The stage of this process."""
        return self._comm.rank

    def send(self, array: Any, to: int, tag: int) -> None:
        """Send an array once it is computed; returns at once.

        Args:
          array: a jax or numpy array, whole on this process.
          to: a stage.
          tag: distinguishes the messages of a step; messages of one tag arrive in the order of their sends.
        """
        self._check()
        assert tag <= self._largest_tag, (tag, self._largest_tag)
        self.num_messages += 1
        self.num_bytes += array.size * array.dtype.itemsize
        self._queue.put((array, to, tag))

    def receive(self, shape: Sequence[int], dtype: Any, source: int, tag: int, what: str) -> np.ndarray:
        """Wait for an array and return it.

        Args:
          shape, dtype: as it was sent.
          source: a stage.
          tag: the tag with which it was sent.
          what: its description, for error messages.

        Raises:
          RankTimeout: it did not arrive in time.
          RuntimeError: an array could not be computed here, or not be sent.
        """
        ranks = self._ranks[source : source + 1]
        with self._activity.at(what, waits=True, waits_for=ranks, kind="stages"):
            found = np.empty(tuple(shape), dtype)
            status, wait = MPI.Status(), RankWait(what, self._names, self.patience_seconds, self._report)
            # poll: a blocking receive could neither report a missing stage nor give up
            while not self._comm.Iprobe(source, tag, status):
                self._check()
                wait.nap([source])
            num_bytes = status.Get_count(MPI.BYTE)
            assert num_bytes == found.nbytes, (what, num_bytes, found.nbytes)
            self._comm.Recv([_view_bytes(found), MPI.BYTE], source, tag)
            return found

    def close(self) -> None:
        """End the thread once everything is sent, without waiting for a stuck thread."""
        self._queue.put(None)
        self._thread.join(timeout=5.0)

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError("an array could not be computed or sent to another stage") from self._failure

    def _send_all(self) -> None:
        # requests of MPI, each with its buffer, which must live until the send is complete
        under_way: list[tuple[Any, np.ndarray]] = []
        nap, closing = 0.0, False
        while not closing or under_way:
            try:
                # block for the next array only while nothing is under way: MPI progresses only when called
                item = self._queue.get_nowait() if under_way or closing else self._queue.get()
                if item is None:
                    closing = True
                    continue
                array, to, tag = item
                data = np.ascontiguousarray(array)
                under_way.append((self._comm.Isend([_view_bytes(data), MPI.BYTE], to, tag), data))
                nap = 0.0
            except queue.Empty:
                try:
                    under_way = [(request, data) for request, data in under_way if not request.Test()]
                except MPI.Exception as error:
                    self._failure, under_way = error, []
                time.sleep(nap)
                nap = min(nap + 1e-5, LONGEST_NAP_SECONDS)
            except Exception as error:
                # complete what is under way; the main thread raises this at its next call (`_check`)
                self._failure = error


def _view_bytes(array: np.ndarray) -> np.ndarray:
    """View the memory of an array as bytes, because MPI lacks 16-bit floats."""
    return array.reshape(-1).view(np.uint8)
