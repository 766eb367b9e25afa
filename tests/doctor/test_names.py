"""Names of hosts: loopback for one's own name, lost names, one name for two machines, clocks."""

import socket

import pytest

from shardtrain.doctor.hosts import evaluate_names as evaluate
from shardtrain.doctor.hosts import resolve


def host(name, own=("10.0.0.1",), others=None, clock=100.0, seconds=0.001, **changes):
    def answer(addresses):
        return {"addresses": list(addresses), "seconds": seconds, "error": None if addresses else "unknown"}

    return {
        "name": name,
        "launcher_name": name,
        "machine": name,
        "own": answer(own),
        "others": {other: answer(addresses) for other, addresses in (others or {}).items()},
        "clock": clock,
        **changes,
    }


def two(told, a, b):
    return evaluate(told([host("a", **a), host("b", **b)], "ab"))


def test_hosts_that_find_each_other_are_well(told, by_what):
    a, b = (
        {"others": {"b": ["10.0.0.2"]}},
        {"own": ["10.0.0.2"], "others": {"a": ["10.0.0.1"]}, "clock": 100.01},
    )
    rows = by_what(two(told, a, b))
    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["own name"].finding == "a: a is 10.0.0.1; b: b is 10.0.0.2"
    assert rows["other hosts"].finding == "each of 2 hosts finds the others by name"
    assert rows["clocks"].finding == "within 10.0 ms of each other"


def test_an_own_name_of_loopback_is_wrong_where_several_hosts_take_part(told, by_what):
    row = by_what(two(told, {"own": ["127.0.1.1"]}, {}))["own name"]
    assert row.status == "wrong"
    assert "a is 127.0.1.1" in row.finding
    assert "take a off the line of 127.0.1.1" in row.fix
    assert "'10.0.0.7 a'" in row.fix


def test_alone_it_is_a_note(told, by_what):
    rows = by_what(evaluate(told([host("a", own=["127.0.1.1"])], "a")))
    assert rows.keys() == {"own name"}
    assert rows["own name"].status == "note"


def test_a_name_without_an_address_is_wrong(told, by_what):
    row = by_what(evaluate(told([host("a", own=[])], "a")))["own name"]
    assert (row.status, row.finding) == ("wrong", "a is unknown (unknown)")
    assert "/etc/hosts" in row.fix


@pytest.mark.parametrize("addresses", [[], ["127.0.0.1"]])
def test_another_host_that_is_not_found_is_named(told, by_what, addresses):
    row = by_what(two(told, {"others": {"b": addresses}}, {"others": {"a": ["10.0.0.1"]}}))["other hosts"]
    assert row.status == "wrong"
    assert row.finding.startswith("a finds b at ")
    assert "b finds" not in row.finding


def test_two_machines_of_one_name_are_told_apart(told, by_what):
    facts = [host("node", machine="1"), host("node", machine="2")]
    row = by_what(evaluate(told(facts, "ab")))["names"]
    assert (row.status, row.finding) == ("wrong", "2 machines are called node")


def test_a_host_that_the_launcher_calls_otherwise_is_a_note(told, by_what):
    rows = by_what(
        evaluate(told([host("box", launcher_name="n1"), host("b", launcher_name="b.site.org")], "ab"))
    )
    assert (rows["launcher"].status, rows["launcher"].finding) == (
        "note",
        "n1 of the launcher has the host name box",
    )


@pytest.mark.parametrize(("apart", "verdict"), [(0.5, "ok"), (3.0, "warning"), (90.0, "wrong")])
def test_clocks_are_compared_by_the_first_rank_awake_on_each_host(told, by_what, apart, verdict):
    facts = [host("a"), host("a", clock=130.0), host("b", clock=100.0 + apart)]
    row = by_what(evaluate(told(facts, "aab")))["clocks"]
    assert row.status == verdict
    assert verdict == "ok" or row.finding == f"b is {apart:.1f} s ahead of a"


def test_a_slow_name_server_is_a_warning(told, by_what):
    row = by_what(evaluate(told([host("a", seconds=5.0)], "a")))["speed"]
    assert (row.status, row.finding) == ("warning", "a took 5.0 s to look up a")


def test_names_are_looked_up(monkeypatch):
    assert resolve("localhost")["addresses"]

    def nobody_knows(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody_knows)
    lost = resolve("nowhere")
    assert (lost["addresses"], lost["error"]) == ([], "Name or service not known")
