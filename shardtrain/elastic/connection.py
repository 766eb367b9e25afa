"""Connections of islands, never waiting: TCP, encrypted by TLS, or a local socket. Next: `sockets.py`.

Who makes one sends messages by it, who accepts it signs of life.
"""

import os
import selectors
import socket
import ssl
import struct
import sys
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

SENT_BYTES = 1 << 20
"""Number of bytes that a local socket keeps."""

PEER_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end of a local socket."""


class LocalSocket(socket.socket):
    """A socket of the kernel of this host, between processes of one user; nothing is encrypted."""

    def pending(self) -> int:
        """Return 0: nothing was read that is not returned yet."""
        return 0

    @property
    def is_of_this_user(self) -> bool:
        """Whether the other end is a process of the user of this one."""
        content = self.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        return PEER_CREDENTIALS.unpack(content)[1] == os.geteuid()


Channel = ssl.SSLSocket | LocalSocket
Handshake = Generator[int, None, tuple[Channel, str]]


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
        self._channel: Channel | None = None

    def fileno(self) -> int:
        return self._number

    @property
    def is_made(self) -> bool:
        """Whether the handshake is done."""
        return self._channel is not None

    def advance(self) -> None:
        """Do what can be done now.

        Raises:
          OSError: the connection is over.
          UnexpectedFrame: the other one sent something unexpected.
        """
        if self._channel is None:
            try:
                self.events = next(self._handshake)
            except StopIteration as made:
                self._channel, self.peer = made.value
                self.heard_at, self.events = time.monotonic(), READ
        if self._channel is not None:
            with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                self._work(self._channel)

    def close(self) -> None:
        """Close the connection at once."""
        self._handshake.close()
        (self._channel or self._raw).close()

    def _work(self, channel: Channel) -> None:
        raise NotImplementedError


class Outgoing(Connection):
    """A connection to an island, to send: bytes in order, of which TCP has few.

    Args:
      peer: the name of the island.
      address: where it listens, as `tcp://HOST:PORT`.
      certificates: of the islands.
      is_local: try a local socket first.

    Attributes:
      num_waiting_bytes: bytes that TCP has not taken yet.

    Raises:
      ValueError: the address has another form.
      OSError: it cannot be used.
    """

    def __init__(self, peer: str, address: str, certificates: Certificates, *, is_local: bool) -> None:
        self._address = parse_address(address)
        raw: socket.socket | None = connect_local(peer) if is_local else None
        if raw is None:
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
        if self._channel is not None:
            self._flush(self._channel)

    def start_closing(self) -> None:
        """Close once all is sent: `advance` raises when the other one has it."""
        self._closes, self.heard_at = True, time.monotonic()
        if self._channel is not None:
            self._flush(self._channel)

    def is_listening(self) -> bool:
        """Return whether the other one may live: False if its port is closed for sure."""
        try:
            with socket.create_connection(self._address, PROBE_SECONDS) as probe:
                return bool(probe.recv(1))  # the port of a process that ends may accept, and is closed then
        except (ConnectionRefusedError, ConnectionResetError):
            return False
        except OSError:
            return True

    def _work(self, channel: Channel) -> None:
        self._flush(channel)
        while answer := channel.recv(4096):
            if self._is_shut:
                continue
            if refusal := answer.strip(BEAT):
                raise ConnectionError(
                    f"it refused this island: {short(refusal.decode(errors='replace'), 300)}"
                )
            self.heard_at = time.monotonic()
        raise ConnectionError("its connection was closed")

    def _flush(self, channel: Channel) -> None:
        try:
            for _ in range(MOST_CALLS):
                if not self._queue:
                    break
                # TLS sends all of it, or raises and must be tried again
                part = self._queue[0]
                num_bytes = channel.send(part)
                self.num_waiting_bytes -= num_bytes
                if num_bytes < len(part):
                    self._queue[0] = memoryview(part)[num_bytes:]
                else:
                    self._queue.popleft()
                if self._closes:
                    self.heard_at = time.monotonic()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            pass
        except OSError:  # it is lost, as reading will say, and perhaps why
            self._queue.clear()
        self.events = READ | WRITE if self._queue else READ
        if self._closes and not self._queue and not self._is_shut:
            self._is_shut = True
            with suppress(OSError):
                channel.shutdown(socket.SHUT_WR)  # what comes from now on is not decrypted


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
        if self._channel is not None:
            with suppress(OSError):  # full; or gone, as reading will say
                self._channel.send(content)

    def _read_messages(self) -> Iterator[memoryview | Received]:
        # once the name is known
        yield from read_messages(self.peer, self._expect)

    def _work(self, channel: Channel) -> None:
        for num_calls in count():
            while not self._free:
                found = next(self._messages)
                if isinstance(found, Received):
                    self._deliver(found)
                else:
                    self._free = found
            # what is decrypted already wakes nobody up
            if num_calls >= MOST_CALLS and not channel.pending():
                break
            num_bytes = channel.recv_into(self._free)
            if not num_bytes:
                raise ConnectionError("its connection was closed")
            self._free = self._free[num_bytes:]


def shake_hands(raw: socket.socket, certificates: Certificates, peer: str = "") -> Handshake:
    """Make a connection safe: names in the open, then TLS, in which both show the certificate of their name.

    A local socket needs no TLS: the kernel says whose process the other one is.

    Args:
      raw: a socket that does not block.
      certificates: of the islands.
      peer: whom this island connects to; "" for one that it accepted.

    Yields:
      What to wait for: READ, WRITE, or 0 for some time, as the folder may list the other one late.

    Returns:
      The safe socket, and the name of the other one.

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
    try:
        while (certificate := certificates.find(peer)) is None:
            yield 0
        context = certificates.client if connects else certificates.server
    except ValueError as error:  # a stranger may say any name
        raise ConnectionError(str(error)) from None
    if isinstance(raw, LocalSocket):
        return raw, peer
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


def listen_local(name: str) -> socket.socket | None:
    """Return a listener of this host's kernel for an island; None where there is none."""
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_name_local(name))
        listener.listen()
    except OSError:
        listener.close()
        return None
    return listener


def accept_local(raw: socket.socket) -> LocalSocket:
    """Return an accepted socket of `listen_local`.

    Raises:
      ConnectionError: the other end is a process of another user.
    """
    found = LocalSocket(fileno=raw.detach())
    if not found.is_of_this_user:
        found.close()
        raise ConnectionError("it is a process of another user")
    found.setblocking(False)
    return found


def connect_local(peer: str) -> LocalSocket | None:
    """Return a local socket to an island; None if none of this user listens on this host."""
    if sys.platform != "linux":
        return None
    found = LocalSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.setblocking(False)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_BYTES)
    try:
        found.connect(_name_local(peer))
        if found.is_of_this_user:
            return found
    except OSError:
        pass
    found.close()
    return None


def _name_local(name: str) -> str:
    # a name without a file: it ends with its process, and is of one network namespace
    return f"\0shardtrain/{name}"


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
