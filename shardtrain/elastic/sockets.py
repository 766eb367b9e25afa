"""Messages between islands, of one host or over TCP, so that strangers can neither join, read nor send.

A sender is known by its certificate, which the run folder lists. What messages mean is no matter here.
`frames.py` has their form, `connection.py` the way of a message.
"""

import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from shardtrain.elastic.certificates import Certificates
from shardtrain.elastic.connection import Connection, Incoming, Outgoing, accept_local, listen_local
from shardtrain.elastic.frames import (
    Lost,
    Received,
    UnexpectedFrame,
    check_array,
    cut_into_chunks,
    encode_header,
)
from shardtrain.elastic.run_files import RunFiles
from shardtrain.system.excerpts import short

BEAT_SECONDS = 0.25
"""Time between signs of life, and between looks for certificates and for silence."""

SMALL_BYTES = 1 << 14
"""Largest number of bytes of a part that is copied, so that it is encrypted and sent with its neighbours."""

LEAST_WAITING_BYTES = 1 << 28
"""Number of bytes that may always wait for a peer."""

MOST_STRANGERS = 64
"""Largest number of connections whose other end has not shown its certificate."""


class PeerAddress(Protocol):
    """Where another island listens."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...


class Transport:
    """The sockets of an island, for one thread, which must call `receive` all the time; any may call `wake`.

    The private key is in memory only.

    Args:
      name: of this island, new in the run; its certificate is written to the run folder.
      files: the run folder.
      expect: returns the arrays to fill for a message of a peer with a header. It raises ValueError for a
        header that it does not know; the peer is lost then.
      host: address of this host at which others reach it. None finds the one of the default route.
      patience_seconds: a peer that is silent for longer is lost. Time in which this thread was held up does
        not count.
      is_local: use sockets of the kernel, which are not encrypted, with islands of this host and user.

    Attributes:
      address: where others connect to.
      most_waiting_bytes: a peer for which more than this waits to be sent is lost.

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
        is_local: bool = True,
    ) -> None:
        self.name, self._expect = name, expect
        self._patience_seconds, self.most_waiting_bytes = patience_seconds, LEAST_WAITING_BYTES
        self._certificates = Certificates(name, files)
        self._peers: dict[str, Outgoing] = {}
        self._others: list[Connection] = []  # incoming ones, and those that are closed soon
        self._lost: dict[str, Lost] = {}
        self._events: list[Received | Lost] = []
        self._is_woken, self._beat_at = False, time.monotonic()
        host = find_host() if host is None else host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise ValueError(
                f"this island cannot listen at {short(host)}: {error}. Give an address of this host"
            ) from None
        bound, port, *_ = self._listener.getsockname()
        self.address = f"tcp://[{bound}]:{port}" if ":" in bound else f"tcp://{bound}:{port}"
        self._local_listener = listen_local(name) if is_local else None
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._opened = [self._waker, self._woken, self._listener]
        self._opened += [] if self._local_listener is None else [self._local_listener]
        for each in self._opened:
            each.setblocking(False)
        for each in self._opened[1:]:
            self._selector.register(each, selectors.EVENT_READ)

    def connect(self, peers: Iterable[PeerAddress]) -> None:
        """Have connections to exactly these peers; others are closed once they have what was sent to them.

        A connection that was lost stays lost: `receive` says so again.
        """
        wanted = {peer.name: peer for peer in peers if peer.name != self.name}
        for name in self._peers.keys() - wanted.keys():
            connection = self._peers.pop(name)
            self._others.append(connection)
            connection.start_closing()
            self._watch(connection)
        for name, peer in wanted.items():
            if name in self._lost:
                self._events.append(self._lost[name])
            elif name not in self._peers:
                try:
                    self._peers[name] = Outgoing(
                        name, peer.address, self._certificates, is_local=self._local_listener is not None
                    )
                except (OSError, ValueError) as error:
                    self._lose(name, f"the address {short(peer.address)} cannot be used: {error}")
                else:
                    self._advance(self._peers[name])

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
        if peer in self._peers:
            parts = [content, *(x for array in arrays for x in cut_into_chunks(array))]
            for is_small, run in groupby(parts, lambda part: len(part) <= SMALL_BYTES):
                some = list(run)
                self._peers[peer].send([b"".join(some)] if is_small else some)
            if self._peers[peer].num_waiting_bytes > self.most_waiting_bytes:
                self._lose(
                    peer, f"more than {self.most_waiting_bytes:,} bytes wait for it, as it is too slow"
                )
            else:
                self._watch(self._peers[peer])

    def receive(self, timeout_seconds: float) -> list[Received | Lost]:
        """Return whole messages and losses, in order of each peer; wait for the first one, or for `wake`."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = deadline - time.monotonic()
            self._pump(0.0 if self._events or self._is_woken else max(left, 0.0))
            if self._events or self._is_woken or left <= 0:
                events = self._events.copy()
                self._events.clear()
                self._is_woken = False
                return events

    def wake(self) -> None:
        """Make `receive` return soon; for any thread."""
        with suppress(OSError):  # full, so it will wake up; or closed
            self._waker.send(b"w")

    def close(self) -> None:
        """Close all once peers have what was sent, or take none of it within a patience; twice is once."""
        self.connect([])
        while any(isinstance(each, Outgoing) for each in self._others):
            self._pump(BEAT_SECONDS)
        for each in list(self._others):
            self._drop(each)
        for opened in (self._selector, *self._opened):
            opened.close()

    def _pump(self, timeout_seconds: float) -> None:
        """Wait for something to arrive, and do what can be done."""
        left = self._beat_at + BEAT_SECONDS - time.monotonic()
        ready = [key for key, _ in self._selector.select(max(min(timeout_seconds, left), 0.0))]
        # first what a peer said, then that it is gone
        for key in sorted(ready, key=lambda key: isinstance(key.data, Outgoing)):
            if key.data is not None:
                if key.data.watched:  # not closed meanwhile
                    self._advance(key.data)
            elif key.fileobj is self._woken:
                self._woken.recv(4096)
                self._is_woken = True
            else:
                self._accept(key.fileobj)
        if time.monotonic() >= self._beat_at + BEAT_SECONDS:
            self._beat()

    def _accept(self, listener: Any) -> None:
        with suppress(OSError):  # gone again
            raw, _ = listener.accept()
            raw = accept_local(raw) if listener is self._local_listener else raw
            strangers = [each for each in self._others if not each.is_made]
            if len(strangers) >= MOST_STRANGERS:
                raw.close()
                return
            self._others.append(Incoming(raw, self._certificates, self._expect, self._events.append))
            self._advance(self._others[-1])

    def _beat(self) -> None:
        """Give signs of life, look for late certificates, and for peers that are silent."""
        now = time.monotonic()
        held_up = now - self._beat_at - BEAT_SECONDS
        self._beat_at = now
        for each in [*self._others, *self._peers.values()]:
            if held_up > BEAT_SECONDS:
                each.heard_at += held_up
            is_late = now > each.heard_at + self._patience_seconds
            if each.is_made and isinstance(each, Incoming):
                each.beat()
            elif is_late and each.is_made:
                self._end(each, f"it was silent for longer than {self._patience_seconds:g} s")
            elif is_late:
                why = "did not answer" if each.events else "is not listed in the run folder"
                self._end(each, f"it {why} within {self._patience_seconds:g} s")
            elif not each.events:
                self._advance(each)

    def _advance(self, connection: Connection) -> None:
        try:
            connection.advance()
        except UnexpectedFrame as error:
            self._lose(connection.peer, f"it sent {error}", misfits=True)
        except OSError as error:
            self._end(connection, str(error))
        else:
            self._watch(connection)
            if isinstance(connection, Incoming) and connection.peer in self._lost:
                self._refuse(connection)

    def _watch(self, connection: Connection) -> None:
        if connection.events != connection.watched:
            if connection.watched:
                self._selector.unregister(connection)
            if connection.events:
                self._selector.register(connection, connection.events, connection)
            connection.watched = connection.events

    def _end(self, connection: Connection, reason: str) -> None:
        if isinstance(connection, Outgoing) and self._peers.get(connection.peer) is connection:
            self._lose(connection.peer, reason, closed=not connection.is_listening())
        else:
            self._drop(connection)

    def _lose(self, peer: str, reason: str, *, closed: bool = False, misfits: bool = False) -> None:
        self._lost[peer] = Lost(peer, reason, closed, misfits)
        self._events.append(self._lost[peer])
        if peer in self._peers:
            self._drop(self._peers.pop(peer))
        for each in list(self._others):
            if isinstance(each, Incoming) and each.peer == peer:
                self._refuse(each)

    def _refuse(self, connection: Incoming) -> None:
        """Close a connection of a peer that is lost: it may live and not know."""
        connection.refuse(self._lost[connection.peer].reason)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        connection.events = 0
        self._watch(connection)
        if connection in self._others:
            self._others.remove(connection)
        connection.close()


def find_host() -> str:
    """Return the address of this host from which packets leave by default; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of documentation
        except OSError:  # no network
            return "127.0.0.1"
        return probe.getsockname()[0]
