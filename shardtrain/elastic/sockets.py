"""Messages between islands over TCP, encrypted and signed, so that strangers can neither join, read nor send.

A sender is known by its key, which the run folder lists, whatever it says of itself. What messages mean is no
matter here. `frames.py` has their form, `connection.py` the way of a message out.
"""

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from shardtrain.elastic.connection import CONSUMED, MOST_ANSWER_BYTES, Connection, key_text, zmq
from shardtrain.elastic.frames import (
    CHUNK_BYTES,
    MOST_HEADER_BYTES,
    IncomingMessage,
    Lost,
    Received,
    UnexpectedFrame,
    check_array,
    cut_into_chunks,
    encode_header,
    parse_header,
)
from shardtrain.elastic.run_files import RunFiles
from shardtrain.system.excerpts import short

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a key is allowed (ZeroMQ RFC 27)."""

MOST_MESSAGES = 64
"""Largest number of messages that are read before connections are looked at again."""

LATE_KEY_SECONDS = 5.0
MOST_LATE_KEYS = 64
POLL_SECONDS = 0.05


class PeerAddress(Protocol):
    """Where another island listens; `key` is its public key."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def key(self) -> str: ...


class Transport:
    """The sockets of an island, for one thread; only `wake` may be called by others.

    The private key is in memory only.

    Args:
      name: of this island, new in the run; its public key is written to the run folder.
      files: the run folder.
      expect: returns the arrays to fill for a message of a peer with a header. It raises ValueError for a
        header that it does not know; the peer is lost then.
      host: address of this host at which others reach it. None finds the one of the default route.
      patience_seconds: a peer that is silent for longer is lost. At least the time that `CHUNK_BYTES` take.
      heartbeat_seconds: time between signs of life, which a thread of libzmq sends.

    Attributes:
      address: where others connect to.
      public_key: the key with which they do.

    Raises:
      ValueError: the name cannot be that of a file, or `host` is no address of this host.
      FileExistsError: the name is not new.
    """

    def __init__(
        self,
        name: str,
        files: RunFiles,
        expect: Callable[[str, dict[str, Any]], Sequence[np.ndarray]],
        *,
        host: str | None = None,
        patience_seconds: float = 10.0,
        heartbeat_seconds: float = 0.5,
    ) -> None:
        self.name, self._files, self._expect = name, files, expect
        self._patience_seconds, self._heartbeat_seconds = patience_seconds, heartbeat_seconds
        public, self._secret_key = zmq.curve_keypair()
        self.public_key = public.decode()
        files.write_key(name, self.public_key)
        self._connections: dict[str, Connection] = {}
        self._closing: list[Connection] = []
        self._lost: dict[str, Lost] = {}
        self._incoming: dict[str, tuple[bytes, IncomingMessage | None]] = {}
        self._late_keys: list[tuple[float, list[bytes]]] = []
        self._events: list[Received | Lost] = []
        self._is_woken = False
        self._context = zmq.Context(io_threads=4)  # they encrypt
        # without a handler libzmq lets all keys in
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.bind(ZAP_ADDRESS)
        self._router = self._open_socket(zmq.ROUTER, MOST_HEADER_BYTES + CHUNK_BYTES)
        self._router.curve_server = True
        self._router.curve_secretkey = self._secret_key
        self._router.zap_domain = b"shardtrain"
        host = find_host() if host is None else host
        self._router.ipv6 = ":" in host
        try:
            self._router.bind(f"tcp://[{host}]:*" if self._router.ipv6 else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(
                f"this island cannot listen at {short(host)}: {error}. Give an address of this host"
            ) from None
        self.address = self._router.getsockopt(zmq.LAST_ENDPOINT).decode()  # type: ignore[union-attr]
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)

    def connect(self, peers: Iterable[PeerAddress]) -> None:
        """Have connections to exactly these peers; others are closed once what was sent to them is consumed.

        A connection that was lost stays lost: `receive` says so again.
        """
        wanted = {peer.name: peer for peer in peers if peer.name != self.name}
        for name in self._connections.keys() - wanted.keys():
            connection = self._connections.pop(name)
            connection.start_closing(self._patience_seconds)
            self._closing.append(connection)
        for name, peer in wanted.items():
            if name in self._lost:
                self._events.append(self._lost[name])
            elif name not in self._connections:
                try:
                    self._connections[name] = self._open_connection(peer)
                except (ValueError, TimeoutError) as error:
                    self._lose(name, str(error))

    def send(self, peer: str, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Send a message without waiting; one to a peer that is lost or not connected is dropped.

        Args:
          peer: name of the receiver.
          header: values of JSON.
          arrays: contiguous; they are read later, so they must not change before the peer has them.

        Raises:
          ValueError: the header is no JSON or too long, or an array cannot be sent.
        """
        for array in arrays:
            check_array(array)
        content = encode_header(header, arrays)
        if peer in self._connections:
            self._connections[peer].send([content, *(x for array in arrays for x in cut_into_chunks(array))])

    def receive(self, timeout_seconds: float) -> list[Received | Lost]:
        """Return whole messages and losses, in order of each peer; wait for the first one, or for `wake`."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = deadline - time.monotonic()
            self._pump(0.0 if self._events or self._is_woken else max(left, 0.0))
            if self._events or self._is_woken or left <= 0:
                events, self._events, self._is_woken = self._events, [], False
                return events

    def wake(self) -> None:
        """Make `receive` return soon; for any thread."""
        with suppress(OSError):  # full, so it will wake up; or closed
            self._waker.send(b"w")

    def close(self) -> None:
        """Close all once what was sent is consumed, or none of it is within a patience; twice is once."""
        if self._context.closed:
            return
        self.connect([])
        while self._closing:
            self._pump(POLL_SECONDS)
        self._router.close(linger=1000)
        self._zap.close(linger=0)
        self._context.term()
        self._waker.close()
        self._woken.close()

    def _open_socket(self, kind: int, most_bytes: int) -> zmq.Socket[bytes]:
        patience, heartbeat = round(1000 * self._patience_seconds), round(1000 * self._heartbeat_seconds)
        opened = self._context.socket(kind)
        options = {
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.LINGER: 0,
            zmq.RECONNECT_IVL: -1,  # a lost connection stays lost
            zmq.HEARTBEAT_IVL: heartbeat,
            zmq.HEARTBEAT_TIMEOUT: patience,
            zmq.CONNECT_TIMEOUT: patience,
            zmq.HANDSHAKE_IVL: patience,
            zmq.MAXMSGSIZE: most_bytes,
        }
        for option, value in options.items():
            opened.setsockopt(option, value)
        return opened

    def _open_connection(self, peer: PeerAddress) -> Connection:
        if (owner := self._files.wait_for_owner(peer.key)) != peer.name:
            raise ValueError(f"its key is the one of {owner}")
        dealer = self._open_socket(zmq.DEALER, MOST_ANSWER_BYTES)
        dealer.curve_serverkey = peer.key.encode()
        dealer.curve_publickey, dealer.curve_secretkey = self.public_key.encode(), self._secret_key
        dealer.ipv6 = "[" in peer.address
        return Connection(dealer, peer.address)

    def _pump(self, timeout_seconds: float) -> None:
        """Wait for something to arrive, and do what can be done."""
        poller = zmq.Poller()
        for each in (self._router, self._zap, self._woken):
            poller.register(each, zmq.POLLIN)
        for connection in [*self._connections.values(), *self._closing]:
            for each in connection.sockets:
                poller.register(each, zmq.POLLIN)
        if self._late_keys:
            timeout_seconds = min(timeout_seconds, POLL_SECONDS)
        ready = dict(poller.poll(round(1000 * timeout_seconds)))
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
            self._is_woken = True
        self._answer_zap()
        # first what a peer said, then that it is gone
        self._read()
        for name, connection in list(self._connections.items()):
            if any(each in ready for each in connection.sockets) and (reason := connection.poll()):
                self._lose(name, reason, closed=not connection.is_listening())
        closing, self._closing = self._closing, []
        for connection in closing:
            connection.poll()
            if connection.is_done:
                connection.close()
            else:
                self._closing.append(connection)

    def _read(self) -> None:
        consumed: dict[bytes, int] = {}
        for _ in range(MOST_MESSAGES):
            try:
                route, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer = str(frames[0].get("User-Id"))
            if peer in self._lost:
                continue
            try:
                self._take(peer, route.bytes, *(frame.buffer for frame in frames))
            except UnexpectedFrame as error:
                self._lose(peer, f"it sent {error}")
            else:
                consumed[route.bytes] = consumed.get(route.bytes, 0) + len(frames[0])
        for route, num_bytes in consumed.items():
            self._router.send_multipart([route, CONSUMED.pack(num_bytes)], zmq.NOBLOCK)

    def _take(self, peer: str, route: bytes, content: memoryview, *more: memoryview) -> None:
        if peer not in self._incoming or self._incoming[peer][0] != route:
            self._incoming[peer] = route, None
        if more:
            raise UnexpectedFrame(f"a message of {1 + len(more)} parts; each has one")
        _, message = self._incoming[peer]
        if message is None:
            header, declared = parse_header(bytes(content))
            try:
                arrays = self._expect(peer, header)
            except ValueError as error:
                raise UnexpectedFrame(f"an unknown header: {error}") from None
            message = IncomingMessage(peer, header, declared, arrays)
        else:
            message.add(content)
        if message.is_whole:
            self._events.append(message.received)
        self._incoming[peer] = route, None if message.is_whole else message

    def _lose(self, peer: str, reason: str, *, closed: bool = False) -> None:
        self._lost[peer] = Lost(peer, reason, closed)
        self._events.append(self._lost[peer])
        if peer in self._connections:
            self._connections.pop(peer).close()
        route, _ = self._incoming.pop(peer, (b"", None))
        if route:  # it may live and not know
            self._router.send_multipart([route, reason.encode()[: MOST_ANSWER_BYTES // 2]], zmq.NOBLOCK)

    def _answer_zap(self) -> None:
        """Let in who has a key that the run folder lists; one that is unknown may be listed soon."""
        waiting, self._late_keys = self._late_keys, []
        with suppress(zmq.Again):
            while True:
                waiting.append((time.monotonic() + LATE_KEY_SECONDS, self._zap.recv_multipart(zmq.NOBLOCK)))
        for deadline, request in waiting:
            *route, version, number, _, _, _, mechanism, key = request[:9]
            owner = self._files.find_owner(key_text(key)) if mechanism == b"CURVE" else None
            if owner is None and time.monotonic() < deadline and len(self._late_keys) < MOST_LATE_KEYS:
                self._late_keys.append((deadline, request))
                continue
            status = [b"400", b"unknown key", b""] if owner is None else [b"200", b"", owner.encode()]
            self._zap.send_multipart([*route, version, number, *status, b""], zmq.NOBLOCK)


def find_host() -> str:
    """Return the address of this host from which packets leave by default; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of documentation
        except OSError:  # no network
            return "127.0.0.1"
        return probe.getsockname()[0]
