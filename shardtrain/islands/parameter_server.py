"""Serve the parameters in shards, one per island, so that no island waits for another to compute.

A thread of each process answers the others while its island computes. Next: `parameter_shard.py`, which
computes the answers; `train_step/sync/waves.py`, which pushes.
"""

import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtrain.islands.bridge import KNOWN_SECONDS, MPI, end_all
from shardtrain.islands.parameter_shard import Answer, ParameterShard, Push
from shardtrain.islands.rank_timeout import RankWait
from shardtrain.islands.watchdog.activity import ActivityRecord

REQUEST, UPDATE, ANSWER, VALUES = 1, 2, 3, 4
"""Tags of messages: the numbers of a push and its update; the numbers of an answer and its values."""

LONGEST_NAP_SECONDS = 5e-4


class ParameterServer:
    """Serves this island's shard to all islands, and pushes to the shards of the others.

    Its constructor is a collective call of all islands.

    Args:
      comm: the communicator of the islands that push these parameters; it is duplicated.
      shard: the shard that this island serves.
      names: island -> its name in messages.
      ranks: island -> its rank among all of the run, for the activity.
      activity: the activity record of this process, which records every wait.
      patience_seconds: time limit of a wait for others.
    """

    def __init__(
        self,
        comm: "MPI.Comm",
        shard: ParameterShard,
        names: Sequence[str],
        ranks: Sequence[int],
        activity: ActivityRecord,
        *,
        patience_seconds: float = 1800.0,
    ) -> None:
        self._comm, self._shard = comm.Dup(), shard
        self._names, self._ranks = list(names), list(ranks)
        self._activity, self._patience_seconds = activity, patience_seconds
        self._bounds = [0] * (self.num_islands + 1)
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._serve, name="parameter server", daemon=True)
        self._thread.start()

    @property
    def island(self) -> int:
        """The number of this island."""
        return self._comm.rank

    @property
    def num_islands(self) -> int:
        """The number of islands."""
        return self._comm.size

    def take_bytes(self) -> int:
        """Return the bytes of updates and shards that this island sent to others since the last call."""
        with self._lock:
            found, self._num_bytes = self._num_bytes, 0
        return found

    def begin(self, step: int, values: np.ndarray, dtypes: Sequence[tuple[slice, Any]]) -> None:
        """Start from common parameters; all islands must have called it before one pushes.

        Args:
          step: number of completed steps.
          values: float32 (n,), all parameters.
          dtypes: parts of `values` whose parameters have fewer bits, and their dtypes.
        """
        self._bounds = [values.size * i // self.num_islands for i in range(self.num_islands + 1)]
        own = self._part(self.island)
        inside = [
            (slice(max(part.start, own.start) - own.start, min(part.stop, own.stop) - own.start), dtype)
            for part, dtype in dtypes
            if max(part.start, own.start) < min(part.stop, own.stop)
        ]
        with self._lock:
            self._shard.begin(step, values[own], inside)

    def push(self, push: Push) -> Answer:
        """Push an update to all shards, and wait until every island has pushed `push.least` waves.

        Args:
          push: the push, whose `update` covers all parameters; None requests an answer again.

        Returns:
          The answers of all shards: their values joined, and the smallest clocks.

        Raises:
          RankTimeout: islands that are behind did not push in time.
        """
        requests = []
        words = [push.step, push.least, push.requests_barrier, push.at_barrier, push.update is not None]
        request = np.array(words, np.int64).tobytes() + push.totals.tobytes()
        for island in range(self.num_islands):
            requests.append(self._comm.Isend([request, MPI.BYTE], island, REQUEST))
            if push.update is not None:
                own = push.update[self._part(island)]
                requests.append(self._comm.Isend(own, island, UPDATE))
                self._count(own, island)
        # for the watchdog: an island that is behind has joined fewer waves than those that wait for it
        self._activity.num_collectives += push.update is not None
        values = np.empty(self._bounds[-1], np.float32)
        answers = [self._receive(island, values, push) for island in range(self.num_islands)]
        MPI.Request.Waitall(requests)
        clocks = tuple(map(min, zip(*(answer.clocks for answer in answers), strict=True)))
        return answers[0]._replace(clocks=clocks, values=values)

    def close(self) -> None:
        """End the thread; call it once no island needs its shard any more."""
        self._closing.set()
        self._thread.join(timeout=5.0)

    def _count(self, array: np.ndarray, island: int) -> None:
        with self._lock:
            self._num_bytes += array.nbytes * (island != self.island)

    def _part(self, island: int) -> slice:
        return slice(self._bounds[island], self._bounds[island + 1])

    def _receive(self, island: int, values: np.ndarray, push: Push) -> Answer:
        """Wait for the answer of a shard, and receive its values."""
        what = f"wave of step {push.step}"
        status, wait = MPI.Status(), RankWait(what, self._names, self._patience_seconds)
        with self._activity.at(what, waits=True, kind="islands"):
            # poll: a blocking receive could neither report who is behind nor give up
            while not self._comm.Iprobe(island, ANSWER, status):
                clocks = self._shard.clocks
                behind = [i for i, clock in enumerate(clocks) if clock < push.least] or [island]
                if wait.seconds > KNOWN_SECONDS:
                    self._activity.awaits(tuple(self._ranks[i] for i in behind))
                wait.nap(behind)
            numbers = bytearray(status.Get_count(MPI.BYTE))
            self._comm.Recv([numbers, MPI.BYTE], island, ANSWER)
            self._comm.Recv(values[self._part(island)], island, VALUES)
        found = np.frombuffer(numbers, np.int64, self.num_islands + 1)
        totals = np.frombuffer(numbers, np.float64, offset=found.nbytes)
        return Answer(tuple(found[:-1].tolist()), int(found[-1]), totals, values)

    def _serve(self) -> None:
        try:
            self._serve_all()
        except BaseException:
            # the others would wait for this shard for ever
            traceback.print_exc()
            end_all(1)

    def _serve_all(self) -> None:
        # requests of MPI with their buffers, which must live until they are complete: sends, and receives of
        # updates, of which a slow one must not delay the others
        sending: list[tuple[Any, Any]] = []
        arriving: list[tuple[Any, int, Push]] = []
        nap, status = 0.0, MPI.Status()
        while not self._closing.is_set():
            arrived: list[tuple[int, Push]] = []
            if self._comm.Iprobe(MPI.ANY_SOURCE, REQUEST, status):
                push, request = self._receive_push(status)
                if request is None:
                    arrived.append((status.source, push))
                else:
                    arriving.append((request, status.source, push))
                nap = 0.0
            under_way = arriving
            arriving = []
            for request, island, push in under_way:
                if request.Test():
                    arrived.append((island, push))
                else:
                    arriving.append((request, island, push))
            for island, push in arrived:
                with self._lock:
                    answers = self._shard.push(island, push)
                for answered, answer in answers:
                    sending += self._send(answered, answer)
            sending = [(request, data) for request, data in sending if not request.Test()]
            if not arrived:
                time.sleep(nap)
                nap = min(nap + 1e-5, LONGEST_NAP_SECONDS)

    def _send(self, island: int, answer: Answer) -> list[tuple[Any, Any]]:
        """Start to send an answer: its numbers, then its values."""
        numbers = np.array([*answer.clocks, answer.barrier], np.int64).tobytes() + answer.totals.tobytes()
        self._count(answer.values, island)
        return [
            (self._comm.Isend([numbers, MPI.BYTE], island, ANSWER), numbers),
            (self._comm.Isend(answer.values, island, VALUES), answer.values),
        ]

    def _receive_push(self, status: "MPI.Status") -> tuple[Push, Any]:
        """Receive the numbers of a push; return it, and the request of its update, or None."""
        data = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv([data, MPI.BYTE], status.source, REQUEST)
        step, least, requests_barrier, at_barrier, has_update = np.frombuffer(data, np.int64, 5).tolist()
        totals = np.frombuffer(data, np.float64, offset=5 * 8)
        push = Push(step, least, bool(requests_barrier), totals, at_barrier=bool(at_barrier))
        if not has_update:
            return push, None
        own = self._part(self.island)
        update = np.empty(own.stop - own.start, np.float32)
        return push._replace(update=update), self._comm.Irecv(update, status.source, UPDATE)
