"""Ports: real connections on loopback, and what failures are called."""

import socket

import pytest

from shardtrain.doctor.ports import connect, judge


def test_a_port_that_listens_is_reached_and_a_closed_one_refuses():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        server.listen()
        assert connect("127.0.0.1", port)["failed"] is None
    assert connect("127.0.0.1", port)["failed"] == "refused"


def test_one_that_never_answers_is_silent(monkeypatch):
    """A full backlog drops what comes, as a firewall does."""
    monkeypatch.setattr("shardtrain.doctor.ports.CONNECT_SECONDS", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        assert connect(*server.getsockname())["failed"] == "silent"
        for one in waiting:
            one.close()


@pytest.mark.parametrize(
    ("failed", "found", "do"),
    [
        ("silent", "a to b gets no answer in 3 s", "a firewall drops it"),
        ("refused", "a to b is refused", "a firewall rejects it, or the name leads to another machine"),
        ("no way", "a to b fails (no way)", "there is no route between these networks"),
        ("no name", "a to b fails (no name)", "the name is not known there"),
    ],
)
def test_pairs_that_cannot_connect_are_named_with_the_reason(told, failed, found, do):
    facts = [
        {"listens": None, "connects": {"b": {"seconds": 3.0, "failed": failed}}},
        {"listens": None, "connects": {"a": {"seconds": 0.001, "failed": None}}},
    ]
    (row,) = judge(told(facts, "ab"))
    assert (row.verdict, row.found) == ("wrong", found)
    assert row.do.startswith(do)


def test_a_host_that_may_not_listen_is_wrong(told):
    (row,) = judge(told([{"listens": "Permission denied", "connects": {}}], "a"))
    assert (row.what, row.verdict, row.found) == ("listen", "wrong", "a: Permission denied")


def test_connections_are_counted(told):
    well = {"seconds": 0.002, "failed": None}
    (row,) = judge(told([{"listens": None, "connects": {h: well}} for h in "ba"], "ab"))
    assert (row.verdict, row.found) == ("ok", "2 connections between 2 hosts, the slowest in 2.0 ms")
