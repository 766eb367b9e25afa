"""A connection to another island, to send: bytes in order, of which few are under way. Next: `sockets.py`.

libzmq keeps no limit here (a full queue of its own would also hold up its heartbeats): the receiver tells how
much it has consumed.
"""

import socket
import struct
import time
from collections import deque
from contextlib import suppress
from urllib.parse import urlsplit

from shardtrain.errors.messages import needs_library
from shardtrain.system.excerpts import short

try:
    import zmq
    from zmq.utils import z85
    from zmq.utils.monitor import recv_monitor_message
except ImportError as error:
    raise ImportError(needs_library("messages of elastic islands are", "pyzmq", "elastic")) from error

WINDOW_BYTES = 8 << 20
"""Largest number of bytes that are sent and not consumed yet."""

CONSUMED = struct.Struct("<Q")
"""What a receiver sends back: how many bytes it has consumed since it last did. All else is a refusal."""

MOST_ANSWER_BYTES = 4096
PROBE_SECONDS = 0.2

FAILURES = {
    zmq.Event.DISCONNECTED: "its connection was closed, or silent for longer than the patience",
    zmq.Event.CLOSED: "it cannot be reached",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "its connection was closed, or silent, before it was made",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it speaks another protocol",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it does not accept the key of this island",
}


class Connection:
    """A connection to an island, made in the background.

    Args:
      endpoint: a DEALER socket with its keys and options set.
      address: where the other one listens, as `tcp://HOST:PORT`.

    Raises:
      ValueError: the address has another form.
    """

    def __init__(self, endpoint: zmq.Socket[bytes], address: str) -> None:
        self._socket, self._address = endpoint, address
        self._queue: deque[bytes | memoryview] = deque()
        self._num_in_flight = 0
        self._close_seconds = self._closes_at = float("inf")
        self._is_lost = False
        self._monitor = endpoint.get_monitor_socket(sum(FAILURES))
        try:
            if not address.startswith("tcp://"):
                raise ValueError("it is not of the form tcp://HOST:PORT")
            endpoint.connect(address)
        except (ValueError, zmq.ZMQError) as error:
            self.close()
            raise ValueError(f"the address {short(address)} cannot be used: {error}") from None

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What to poll for `poll`."""
        return self._socket, self._monitor

    @property
    def is_done(self) -> bool:
        """Whether all is consumed, or never will be."""
        is_late = time.monotonic() > self._closes_at
        return self._is_lost or is_late or not (self._queue or self._num_in_flight)

    def start_closing(self, patience_seconds: float) -> None:
        """Be done too if nothing is consumed for so long."""
        self._close_seconds = patience_seconds
        self._closes_at = time.monotonic() + patience_seconds

    def send(self, parts: list[bytes | memoryview]) -> None:
        """Send bytes as soon as there is room; they are read later, so they must not change."""
        self._queue.extend(parts)
        self._flush()

    def poll(self) -> str:
        """Take in how much was consumed; return why the connection is lost, "" if it is not."""
        with suppress(zmq.Again):
            while True:
                answer = self._socket.recv_multipart(zmq.NOBLOCK)
                num_bytes = CONSUMED.unpack(answer[0])[0] if len(answer[0]) == CONSUMED.size else 0
                if len(answer) != 1 or not 0 < num_bytes <= self._num_in_flight:
                    return self._lose(
                        "it refused this island: " + short(answer[0].decode(errors="replace"), 300)
                    )
                self._num_in_flight -= num_bytes
                self._closes_at = time.monotonic() + self._close_seconds
                self._flush()
        if self._monitor.poll(0):
            return self._lose(FAILURES[zmq.Event(recv_monitor_message(self._monitor)["event"])])
        return ""

    def is_listening(self) -> bool:
        """Return whether the other one may live: False if its port is closed for sure."""
        host = urlsplit(self._address)
        try:
            with socket.create_connection((host.hostname, host.port), PROBE_SECONDS) as probe:
                # the port of a process that ends may accept, and is closed then; libzmq speaks at once
                return bool(probe.recv(1))
        except (ConnectionRefusedError, ConnectionResetError):
            return False
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        """Close the connection at once."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _flush(self) -> None:
        while self._queue and (
            not self._num_in_flight or self._num_in_flight + len(self._queue[0]) <= WINDOW_BYTES
        ):
            part = self._queue.popleft()
            try:
                self._socket.send(part, zmq.NOBLOCK, copy=False)
            except zmq.Again:  # the connection is gone, as the monitor will say
                self._queue.clear()
                return
            self._num_in_flight += len(part)

    def _lose(self, reason: str) -> str:
        self._is_lost = True
        self._queue.clear()
        return reason


def key_text(key: bytes) -> str:
    """Return a key of 32 bytes in ZeroMQ's text form (RFC 32)."""
    return z85.encode(key).decode()
