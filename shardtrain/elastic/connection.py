"""Connections of islands: TCP, encrypted by TLS, never waiting. Next: `sockets.py`.

Who makes one sends messages by it, who accepts it signs of life.
"""

import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from shardtrain.elastic.certificates import Certificates
from shardtrain.elastic.frames import Received, read_messages
from shardtrain.system.excerpts import short

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

GREETING = b"s"
"""What an island sends at once to whoever connects: a process that ends does not."""

BEAT = b"\0"
"""A sign of life; all else that comes back is a refusal."""

MOST_CALLS = 32
"""Largest number of reads or writes before other connections have their turn."""

PROBE_SECONDS = 0.2

Handshake = Generator[int, None, tuple[ssl.SSLSocket, str]]


class Connection:
    """A connection, made in the background.

    Args:
      raw: its socket.
      handshake: makes it, see `shake_hands`.
      peer: the name of the other one, which may not be known yet.

    Attributes:
      events: what to wait for before `advance`; 0 for some time.
      watched: what is waited for, by whoever does.
      heard_at: when the other one gave a sign of life; at first when the connection was begun.
    """

    def __init__(self, raw: socket.socket, handshake: Handshake, peer: str = "") -> None:
        self.peer, self.events, self.watched = peer, 0, 0
        self.heard_at = time.monotonic()
        self._number, self._raw, self._handshake = raw.fileno(), raw, handshake
        self._tls: ssl.SSLSocket | None = None

    def fileno(self) -> int:
        return self._number

    @property
    def is_made(self) -> bool:
        """Whether the other one has shown its certificate."""
        return self._tls is not None

    def advance(self) -> None:
        """Do what can be done now.

        Raises:
          OSError: the connection is over.
          UnexpectedFrame: the other one sent something unexpected.
        """
        if self._tls is None:
            try:
                self.events = next(self._handshake)
            except StopIteration as made:
                self._tls, self.peer = made.value
                self.heard_at, self.events = time.monotonic(), READ
        if self._tls is not None:
            with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                self._work(self._tls)

    def close(self) -> None:
        """Close the connection at once."""
        self._handshake.close()
        (self._tls or self._raw).close()

    def _work(self, tls: ssl.SSLSocket) -> None:
        raise NotImplementedError


class Outgoing(Connection):
    """A connection to an island, to send: bytes in order, of which TCP has few.

    Args:
      peer: the name of the island.
      address: where it listens, as `tcp://HOST:PORT`.
      certificates: of the islands.

    Attributes:
      num_waiting_bytes: bytes that TCP has not taken yet.

    Raises:
      ValueError: the address has another form.
      OSError: it cannot be used.
    """

    def __init__(self, peer: str, address: str, certificates: Certificates) -> None:
        self._address = parse_address(address)
        family, *_, place = socket.getaddrinfo(
            *self._address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        raw = socket.socket(family, socket.SOCK_STREAM)
        raw.setblocking(False)
        raw.connect_ex(place)
        super().__init__(raw, shake_hands(raw, certificates, peer), peer)
        self._queue: deque[bytes | memoryview] = deque()
        self.num_waiting_bytes = 0
        self._closes = self._is_shut = False

    def send(self, parts: Iterable[bytes | memoryview]) -> None:
        """Send bytes as soon as there is room; they are read later, so they must not change."""
        for part in parts:
            self._queue.append(part)
            self.num_waiting_bytes += len(part)
        if self._tls is not None:
            self._flush(self._tls)

    def start_closing(self) -> None:
        """Close once all is sent: `advance` raises when the other one has it."""
        self._closes, self.heard_at = True, time.monotonic()
        if self._tls is not None:
            self._flush(self._tls)

    def is_listening(self) -> bool:
        """Return whether the other one may live: False if its port is closed for sure."""
        try:
            with socket.create_connection(self._address, PROBE_SECONDS) as probe:
                return bool(probe.recv(1))  # the port of a process that ends may accept, and is closed then
        except (ConnectionRefusedError, ConnectionResetError):
            return False
        except OSError:
            return True

    def _work(self, tls: ssl.SSLSocket) -> None:
        self._flush(tls)
        while answer := tls.recv(4096):
            if self._is_shut:
                continue
            if refusal := answer.strip(BEAT):
                raise ConnectionError(
                    f"it refused this island: {short(refusal.decode(errors='replace'), 300)}"
                )
            self.heard_at = time.monotonic()
        raise ConnectionError("its connection was closed")

    def _flush(self, tls: ssl.SSLSocket) -> None:
        try:
            for _ in range(MOST_CALLS):
                if not self._queue:
                    break
                tls.send(self._queue[0])  # all of it: else it raises, and must be tried again
                self.num_waiting_bytes -= len(self._queue.popleft())
                if self._closes:
                    self.heard_at = time.monotonic()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:  # it is lost, as reading will say, and perhaps why
            self._queue.clear()
        self.events = READ | WRITE if self._queue else READ
        if self._closes and not self._queue and not self._is_shut:
            self._is_shut = True
            with suppress(OSError):
                tls.shutdown(socket.SHUT_WR)  # what comes from now on is not decrypted


class Incoming(Connection):
    """A connection that an island made, to receive.

    Args:
      raw: its socket.
      certificates: of the islands.
      expect: see `Transport`.
      deliver: takes each message once it is whole.
    """

    def __init__(
        self,
        raw: socket.socket,
        certificates: Certificates,
        expect: Callable[[str, dict[str, Any]], Sequence[np.ndarray]],
        deliver: Callable[[Received], None],
    ) -> None:
        super().__init__(raw, shake_hands(raw, certificates))
        raw.setblocking(False)
        self._expect, self._deliver = expect, deliver
        self._free, self._messages = memoryview(b""), self._read_messages()

    def beat(self) -> None:
        """Give a sign of life."""
        self._say(BEAT)

    def refuse(self, reason: str) -> None:
        """Tell the other one why nothing more is read."""
        self._say(reason.encode()[:2048])

    def _say(self, content: bytes) -> None:
        if self._tls is not None:
            with suppress(OSError):  # full; or gone, as reading will say
                self._tls.send(content)

    def _read_messages(self) -> Iterator[memoryview | Received]:
        # once the name is known
        yield from read_messages(self.peer, self._expect)

    def _work(self, tls: ssl.SSLSocket) -> None:
        for num_calls in count():
            while not self._free:
                found = next(self._messages)
                if isinstance(found, Received):
                    self._deliver(found)
                else:
                    self._free = found
            # what is decrypted already wakes nobody up
            if num_calls >= MOST_CALLS and not tls.pending():
                break
            num_bytes = tls.recv_into(self._free)
            if not num_bytes:
                raise ConnectionError("its connection was closed")
            self._free = self._free[num_bytes:]


def shake_hands(raw: socket.socket, certificates: Certificates, peer: str = "") -> Handshake:
    """Make a connection safe: names in the open, then TLS, in which both show the certificate of their name.

    Args:
      raw: a socket that does not block.
      certificates: of the islands.
      peer: whom this island connects to; "" for one that it accepted.

    Yields:
      What to wait for: READ, WRITE, or 0 for some time, as the folder may list the other one late.

    Returns:
      The encrypted socket, and the name of the other one.

    Raises:
      OSError: the other one cannot be reached, or is not who it says.
    """
    connects = bool(peer)
    if connects:
        yield WRITE
        if raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise ConnectionError("it cannot be reached")
        name = certificates.name.encode()
        raw.send(bytes([len(name)]) + name)
        yield from _read(raw, len(GREETING))
    else:
        raw.send(GREETING)
        (num_bytes,) = yield from _read(raw, 1)
        peer = (yield from _read(raw, num_bytes)).decode(errors="replace")
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        while (certificate := certificates.find(peer)) is None:
            yield 0
        context = certificates.client if connects else certificates.server
    except ValueError as error:  # a stranger may say any name
        raise ConnectionError(str(error)) from None
    tls = context.wrap_socket(raw, server_side=not connects, do_handshake_on_connect=False)
    try:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                yield READ
            except ssl.SSLWantWriteError:
                yield WRITE
        if tls.getpeercert(binary_form=True) != certificate:
            raise ConnectionError("its certificate is the one of another island")
    except BaseException:
        tls.close()
        raise
    return tls, peer


def _read(raw: socket.socket, num_bytes: int) -> Generator[int, None, bytes]:
    content = b""
    while len(content) < num_bytes:
        yield READ
        more = raw.recv(num_bytes - len(content))
        if not more:
            raise ConnectionError("its connection was closed before it was made")
        content += more
    return content


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of `tcp://HOST:PORT`.

    Raises:
      ValueError: the address has another form.
    """
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or parts.port is None:
        raise ValueError("it is not of the form tcp://HOST:PORT")
    return parts.hostname, parts.port
