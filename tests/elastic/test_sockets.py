"""Sockets of elastic islands: deaths, frozen processes, strangers, wrong frames, large arrays."""

import json
import os
import pickle
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.elastic.certificates import Certificates
from shardtrain.elastic.connection import LocalSocket, parse_address
from shardtrain.elastic.frames import CHUNK_BYTES, LENGTH, MOST_HEADER_BYTES, Lost, Received, encode_header
from shardtrain.elastic.run_files import RunFiles
from shardtrain.elastic.sockets import Transport, find_host

PROGRAM = Path(__file__).parents[1] / "programs" / "elastic_peer.py"
PATIENCE_SECONDS = 1.0


both_ways = pytest.mark.parametrize("opened", [False, True], indirect=True, ids=["tcp", "local"])


def expect(peer, header):
    if header.get("kind") == "unknown":
        raise ValueError("no such kind")
    return [np.empty(header["shape"], np.dtype(header["dtype"]))] if "shape" in header else ()


def address_of(transport):
    return SimpleNamespace(name=transport.name, address=transport.address)


def wait(transport, is_last=lambda event: True, seconds=10.0, others=()):
    """Return events up to the first that is the last one."""
    found, deadline = [], time.monotonic() + seconds
    while not any(map(is_last, found)):
        assert time.monotonic() < deadline, f"only {found}"
        found += transport.receive(0.01 if others else 0.2)
        for other in others:
            other.receive(0.0)
    return found


@pytest.fixture
def opened(tmp_path, request):
    """Return a function that opens a transport of this process."""
    is_local = getattr(request, "param", False)
    transports = []

    def open_one(name, **options):
        options = {"host": "127.0.0.1", "patience_seconds": PATIENCE_SECONDS} | options
        transport = Transport(name, RunFiles(tmp_path), expect, **{"is_local": is_local, **options})
        transports.append(transport)
        return transport

    yield open_one
    # together: one alone would wait, by its patience, for another that nobody runs any more
    threads = [threading.Thread(target=each.close) for each in transports]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


@pytest.fixture
def spawned(tmp_path):
    """Return a function that starts a process with a transport, connected to the one that is given."""
    processes = []

    def spawn(name, transport):
        command = [sys.executable, str(PROGRAM), str(tmp_path), name, str(PATIENCE_SECONDS)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        peer = SimpleNamespace(**json.loads(process.stdout.readline()))
        process.stdin.write(json.dumps([vars(address_of(transport))]) + "\n")
        process.stdin.flush()
        transport.connect([peer])
        transport.send(name, {"hello": 1})
        wait(transport, lambda event: isinstance(event, Received))
        return process, peer

    yield spawn
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_islands_of_one_host_and_user_need_no_encryption(opened, monkeypatch):
    a, b = opened("a", is_local=True), opened("b", is_local=True)
    a.connect([address_of(b)])
    a.send("b", {"hello": 1})
    wait(b, others=[a])
    assert isinstance(a._peers["b"]._channel, LocalSocket)
    # those of another user, as the kernel says
    c = opened("c", is_local=True)
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    c.connect([address_of(a)])
    c.send("a", {"hello": 2})
    (found,) = wait(a, others=[c])
    assert isinstance(found, Received)
    assert isinstance(c._peers["a"]._channel, ssl.SSLSocket)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0shardtrain/{a.name}")
        a.receive(0.1)
        assert stranger.recv(1) == b""


def test_a_peer_for_which_too_much_waits_is_lost(opened):
    a, b = opened("a", patience_seconds=60.0), opened("b")
    a.connect([address_of(b)])
    a.most_waiting_bytes = 1 << 22
    array = np.zeros(1 << 20, np.uint8)
    found = []
    while not found:
        # b takes nothing
        a.send("b", {"shape": array.shape, "dtype": "uint8"}, [array])
        found += a.receive(0.01)
    (lost,) = found
    assert isinstance(lost, Lost)
    assert lost.reason == "more than 4,194,304 bytes wait for it, as it is too slow"
    # and b is refused, with the reason
    b.connect([address_of(a)])
    (lost,) = wait(b, lambda event: isinstance(event, Lost), others=[a])
    assert "it is too slow" in lost.reason


@both_ways
def test_messages_of_a_peer_come_whole_and_in_order(opened):
    a, b = opened("a"), opened("b")
    a.connect([address_of(a), address_of(b)])
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asarray(3.0),
        np.zeros((0, 2)),
        np.arange(CHUNK_BYTES),
        np.asarray(jnp.arange(8, dtype=jnp.bfloat16)),
    ]
    for array in arrays:
        a.send("b", {"shape": array.shape, "dtype": array.dtype.name}, [array])
        a.send("b", {"text": "between"})
    found = []
    while len(found) < 2 * len(arrays):
        found += wait(b, others=[a])
    assert {event.peer for event in found} == {"a"}
    for array, event, between in zip(arrays, found[::2], found[1::2], strict=True):
        np.testing.assert_array_equal(event.buffers[0], array)
        assert between.header == {"text": "between"}


@both_ways
def test_a_killed_process_is_lost_at_once(opened, spawned):
    a = opened("a", patience_seconds=60.0)
    process, _ = spawned("b", a)
    process.kill()
    killed_at = time.monotonic()
    (lost,) = wait(a)
    assert (lost.peer, lost.closed) == ("b", True)
    assert time.monotonic() - killed_at < 5  # not by the patience; in fact some ms
    a.send("b", {"too": "late"})
    a.connect([address_of(a), SimpleNamespace(name="b", address="tcp://127.0.0.1:1")])
    assert a.receive(0.0) == [lost]


@both_ways
def test_a_frozen_process_is_lost_after_the_patience_and_finds_itself_out(opened, spawned):
    a = opened("a")
    process, _ = spawned("b", a)
    assert a.receive(2 * PATIENCE_SECONDS) == []  # silent, but alive
    os.kill(process.pid, signal.SIGSTOP)
    frozen_at = time.monotonic()
    (lost,) = wait(a)
    assert (lost.peer, lost.closed) == ("b", False)
    assert time.monotonic() - frozen_at >= 0.8 * PATIENCE_SECONDS
    os.kill(process.pid, signal.SIGCONT)
    assert json.loads(process.stdout.readline())["lost"] == "a"


def test_time_in_which_this_process_was_held_up_is_no_silence(opened):
    a, b = opened("a"), opened("b")
    a.connect([address_of(b)])
    while not a._peers["b"].is_made:
        assert a.receive(0.01) == b.receive(0.01) == []
    time.sleep(2 * PATIENCE_SECONDS)
    for _ in range(10):
        assert a.receive(0.05) == b.receive(0.05) == []
    # b is run no more, so that a waits for it, by its patience
    began = time.monotonic()
    a.close()
    assert PATIENCE_SECONDS < time.monotonic() - began < 10


def test_one_that_accepts_and_says_nothing_is_lost_after_the_patience(opened):
    a, _ = opened("a"), opened("b")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        a.connect([SimpleNamespace(name="b", address=f"tcp://127.0.0.1:{mute.getsockname()[1]}")])
        assert wait(a) == [Lost("b", "it did not answer within 1 s")]


def knock(transport, tmp_path, kind):
    """Connect as a stranger would, and return what comes back until the end."""
    with socket.create_connection(parse_address(transport.address), 5) as raw:
        if kind == "no TLS":
            raw.sendall(encode_header({"kind": "join", "from": "b"}, []))
        elif kind == "a path":
            raw.sendall(b"\x04../b")
        else:
            # it has a certificate of its own, and the name of one that is listed
            raw.sendall(b"\x01b")
            assert raw.recv(1)
            stranger = Certificates("b", RunFiles(tmp_path / "elsewhere"))
            stranger.find("b")
            stranger.client.load_verify_locations(cadata=(tmp_path / "keys" / "a.pem").read_text())
            if kind == "no certificate":
                stranger.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                stranger.client.check_hostname, stranger.client.verify_mode = False, ssl.CERT_NONE
            raw = stranger.client.wrap_socket(raw)
        with suppress(ConnectionError, ssl.SSLError):
            raw.sendall(encode_header({"kind": "join", "from": "b"}, []) if "certificate" in kind else b"")
            while raw.recv(100).strip(b"s"):
                pass
        raw.close()


@pytest.mark.parametrize("kind", ["no TLS", "a path", "no certificate", "own certificate"])
def test_a_stranger_is_not_let_in(opened, tmp_path, kind):
    a, b = opened("a"), opened("b")
    (tmp_path / "elsewhere").mkdir()
    thread = threading.Thread(target=knock, args=(a, tmp_path, kind))
    thread.start()
    while thread.is_alive():
        assert a.receive(0.05) == []
    thread.join()
    assert a._others == []
    b.connect([address_of(a)])  # others still come in
    b.send("a", {"hello": 1})
    wait(a, others=[b])


def test_strangers_that_say_nothing_are_few_and_let_go(opened, monkeypatch):
    monkeypatch.setattr("shardtrain.elastic.sockets.MOST_STRANGERS", 2)
    a = opened("a")
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(parse_address(a.address), 5))
            a.receive(0.1)
        assert len(a._others) == 2
        a.receive(2 * PATIENCE_SECONDS)
    assert a._others == []


def test_a_peer_is_known_by_its_certificate_alone(opened, tmp_path):
    a, b, c = opened("a"), opened("b"), opened("c")
    b.connect([address_of(a)])
    b.send("a", {"from": "c"})
    (received,) = wait(a, others=[b])
    assert received.peer == "b"
    # the address of another one: nobody there can read
    b.connect([SimpleNamespace(name="c", address=a.address)])
    b.send("c", {"secret": 1})
    (lost,) = wait(b, others=[a])
    assert lost.peer == "c"
    # the certificate of another one that is let in too
    b._certificates.name = "c"
    b.connect([address_of(a), address_of(c)])
    c.connect([address_of(a)])
    c.send("a", {"hello": 1})
    assert [event.peer for event in wait(a, others=[b, c])] == ["c"]
    # one that the folder does not list
    a.connect([SimpleNamespace(name="d", address=b.address)])
    (lost,) = wait(a, others=[b])
    assert lost.reason == "it is not listed in the run folder within 1 s"


@pytest.mark.parametrize("late", ["a", "b"])
def test_a_certificate_that_is_listed_late_is_let_in(opened, tmp_path, late):
    a, b = opened("a"), opened("b")
    path = tmp_path / "keys" / f"{late}.pem"
    content = path.read_bytes()
    path.unlink()
    b.connect([address_of(a)])
    b.send("a", {"hello": 1})
    for _ in range(5):
        assert a.receive(0.05) == b.receive(0.05) == []
    path.write_bytes(content)
    (received,) = wait(a, others=[b])
    assert received.peer == "b"


def frame(content):
    return LENGTH.pack(len(content)) + content


WRONG = {
    "pickle": (frame(pickle.dumps({"kind": "join"})), "is no JSON"),
    "no length": (pickle.dumps({"kind": "join"}), "at most"),
    "long header": (LENGTH.pack(MOST_HEADER_BYTES + 1), "at most"),
    "empty header": (LENGTH.pack(0), "a header of 0 bytes"),
    "no object": (frame(b'["a", []]'), "it is an object and a list"),
    "deep": (frame(b"[" * 5000 + b"]" * 5000), "nested deeper"),
    "no number": (frame(b'[{"step": NaN}, []]'), "NaN is no number"),
    "unknown": (encode_header({"kind": "unknown"}, []), "no such kind"),
    "dtype": (
        encode_header({"shape": [2], "dtype": "float32"}, [np.zeros(2)]),
        "expected [['float32', [2]]]",
    ),
    "shape": (
        encode_header({"shape": [2], "dtype": "int8"}, [np.zeros(3, np.int8)]),
        "expected [['int8', [2]]]",
    ),
    "unexpected": (encode_header({}, [np.zeros(3)]), "expected []"),
    "missing": (encode_header({"shape": [2], "dtype": "int8"}, []), "expected [['int8', [2]]]"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_frames_lose_the_peer_and_nothing_else(opened, kind):
    a, b, c = opened("a"), opened("b"), opened("c")
    b.connect([address_of(a)])
    c.connect([address_of(a)])
    while not b._peers["a"].is_made:
        assert a.receive(0.01) == b.receive(0.01) == []
    content, reason = WRONG[kind]
    b._peers["a"].send([content])
    (lost,) = wait(a)
    assert lost.peer == "b"
    assert reason in lost.reason
    # it hears of it, and is not listened to any more
    (lost,) = wait(b, others=[a])
    assert lost.peer == "a"
    assert "refused" in lost.reason
    assert reason in lost.reason
    c.send("a", {"hello": 1})
    (received,) = wait(a, others=[c])
    assert (received.peer, received.header) == ("c", {"hello": 1})


@both_ways
def test_a_large_array_takes_bounded_memory(opened, spawned):
    array = np.ones(256 << 20, np.uint8)  # takes long beside other tests, in which nothing would be sent
    a = opened("a", patience_seconds=60.0)
    spawned("b", a)
    a.send("b", {"num_bytes": array.nbytes}, [array])
    (received,) = wait(a, seconds=30)
    assert received.header["sum"] == array.nbytes
    assert received.header["peak"] < array.nbytes + (8 << 20)


@both_ways
def test_what_a_slow_peer_does_not_read_waits_at_the_sender(opened):
    a, b = opened("a", patience_seconds=60.0), opened("b")
    a.connect([address_of(b)])
    array = np.ones(64 << 20, np.int8)
    a.send("b", {"hello": 1})
    wait(b, others=[a])
    a.send("b", {"shape": array.shape, "dtype": "int8"}, [array])
    for _ in range(20):
        a.receive(0.01)
    assert sum(map(len, a._peers["b"]._queue)) > array.nbytes // 2
    (received,) = wait(b, others=[a])
    np.testing.assert_array_equal(received.buffers[0], array)


def test_another_thread_wakes_receive(opened):
    a = opened("a")
    thread = threading.Timer(0.2, a.wake)
    thread.start()
    began = time.monotonic()
    assert a.receive(30.0) == []
    assert time.monotonic() - began < 10
    thread.join()
    a.wake()  # one before it waits counts too
    began = time.monotonic()
    assert a.receive(30.0) == []
    assert time.monotonic() - began < 10


@both_ways
def test_what_was_sent_arrives_before_a_connection_is_closed(opened):
    a, b = opened("a"), opened("b")
    a.connect([address_of(b)])
    b.connect([address_of(a)])
    array = np.ones(32 << 20, np.int8)
    a.send("b", {"shape": array.shape, "dtype": "int8"}, [array])
    a.send("b", {"bye": 1})
    thread = threading.Thread(target=a.close)
    thread.start()
    found = wait(b, lambda event: isinstance(event, Lost))
    thread.join()
    assert [type(event) for event in found] == [Received, Received, Lost]
    assert found[1].header == {"bye": 1}


def test_what_cannot_be_sent_is_refused_by_the_sender(opened):
    a = opened("a")
    for array, reason in [
        (np.zeros((4, 4)).T[::2], "cannot be sent"),
        (np.array([{}]), "cannot be sent"),
        (np.zeros(2, ">f4"), "cannot be sent"),
    ]:
        with pytest.raises(ValueError, match=reason):
            a.send("b", {}, [array])
    with pytest.raises(ValueError, match="takes 1,048,"):
        a.send("b", {"text": "a" * MOST_HEADER_BYTES})


def test_a_wrong_address_loses_the_peer(opened):
    a, b = opened("a"), opened("b")
    for name, address in [("c", "ipc:///tmp/x"), ("d", "tcp://nothing"), ("e", "tcp://nothing:1")]:
        a.connect([SimpleNamespace(name=name, address=address)])
        (lost,) = wait(a)
        assert f"the address {address!r} cannot be used" in lost.reason
    b.close()
    a.connect([address_of(b)])
    (lost,) = wait(a)
    assert lost == Lost("b", "it cannot be reached", closed=True)


def test_the_address_of_this_host_can_be_bound(opened):
    with pytest.raises(
        ValueError, match=r"cannot listen at '203\.0\.113\.7': .*Give an address of this host"
    ):
        opened("b", host="203.0.113.7")
    a = opened("a", host=None)
    assert a.address.startswith(f"tcp://{find_host()}:")


def test_without_cryptography_the_extra_is_named():
    program = "import sys; sys.modules['cryptography'] = None; import shardtrain.elastic.sockets"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "messages of elastic islands are read by the library cryptography: install it with" in done.stderr
    assert "shardtrain[elastic]" in done.stderr
