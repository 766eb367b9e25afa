"""Ports: real connections on loopback, and what failures are called."""

import socket

import pytest

from shardtrain.doctor.hosts import connect
from shardtrain.doctor.hosts import evaluate_ports as evaluate


def test_a_port_that_listens_is_reached_and_a_closed_one_refuses():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        server.listen()
        assert connect("127.0.0.1", port)["failed"] is None
    assert connect("127.0.0.1", port)["failed"] == "refused"


def test_one_that_never_answers_is_silent(monkeypatch):
    """A full backlog drops what comes, as a firewall does."""
    monkeypatch.setattr("shardtrain.doctor.hosts.CONNECT_SECONDS", 0.2)
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
        ("refused", "a to b is refused", "a firewall rejects it, or the name resolves to another machine"),
        ("no route", "a to b fails (no route)", "there is no route between these networks"),
        ("no name", "a to b fails (no name)", "the name does not resolve there"),
    ],
)
def test_pairs_that_cannot_connect_are_named_with_the_reason(told, failed, found, do):
    facts = [
        {"listens": None, "connects": {"b": {"seconds": 3.0, "failed": failed}}},
        {"listens": None, "connects": {"a": {"seconds": 0.001, "failed": None}}},
    ]
    (row,) = evaluate(told(facts, "ab"))
    assert (row.status, row.finding) == ("wrong", found)
    assert row.fix.startswith(do)


def test_a_host_that_may_not_listen_is_wrong(told):
    (row,) = evaluate(told([{"listens": "Permission denied", "connects": {}}], "a"))
    assert (row.item, row.status, row.finding) == ("listen", "wrong", "a: Permission denied")


def test_connections_are_counted(told):
    well = {"seconds": 0.002, "failed": None}
    (row,) = evaluate(told([{"listens": None, "connects": {h: well}} for h in "ba"], "ab"))
    assert (row.status, row.finding) == ("ok", "2 connections between 2 hosts, the slowest in 2.0 ms")
