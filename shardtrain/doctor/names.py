"""The check `names`: host names, whether they resolve on the other hosts, and whether the clocks agree."""

import ipaddress
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtrain.doctor.check import (
    Check,
    Facts,
    RankContext,
    RankFacts,
    Row,
    group_by_host,
    join_texts,
    time_text,
)
from shardtrain.islands.network import PROXIES

SLOW_SECONDS = 1.0
"""Duration above which a lookup of a name is a warning; it takes seconds if a name server does not answer."""

CLOCK_SECONDS, CLOCK_WRONG_SECONDS = 1.0, 60.0
"""Clock differences above which the status is `warning` and `wrong`: dates of checkpoints and logs get out of
order."""

MOST_HOSTS = 64
"""Largest number of other hosts that a host looks up."""


def collect(context: RankContext) -> Facts:
    """Collect this host's name, the addresses of all names, and its clock at a common moment."""
    name = socket.gethostname()
    machine = Path("/proc/sys/kernel/random/boot_id")
    mine = {
        "name": name,
        "launcher_name": context.environment.host,
        "machine": machine.read_text().strip() if machine.exists() else "",
        "own": resolve(name),
        "proxies": {each: os.environ[each] for each in PROXIES if os.environ.get(each)},
    }
    names = [other for other in dict.fromkeys(context.control.all_gather("names", name)) if other != name]
    others = {other: resolve(other) for other in names[:MOST_HOSTS]} if context.is_first_on_host else {}
    context.control.all_gather("names are looked up")
    # a barrier: all ranks leave it within milliseconds
    return mine | {"others": others, "clock": time.time()}


def resolve(name: str) -> Facts:
    """Return the addresses of a name.

    Returns:
      `addresses`, the `seconds` it took, and an `error` if the name does not resolve.
    """
    began, addresses, error = time.monotonic(), [], None
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(where[0]) for *_, where in entries))
    except OSError as failure:
        error = failure.strerror or str(failure)
    return {"addresses": addresses, "seconds": time.monotonic() - began, "error": error}


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address, which every host uses for itself.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.7"), is_loopback("fe80::1%eth0")
    (True, False, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for own names, other hosts' names, and clocks."""
    firsts = [ranks[0] for ranks in group_by_host(all_facts).values()]
    rows = [_check_own(firsts), *_check_doubles(firsts), *_check_speed(firsts), *_check_proxies(firsts)]
    if len(firsts) > 1:
        rows += [_check_others(firsts), _check_clocks(all_facts)]
    return rows


def _check_own(firsts: Sequence[RankFacts]) -> Row:
    finding = join_texts(
        (one.host, f"{one.facts['name']} is {addresses_text(one.facts['own'])}") for one in firsts
    )
    lost = [one for one in firsts if not one.facts["own"]["addresses"]]
    looped = [one for one in firsts if _is_loopback(one.facts["own"]) and one not in lost]
    if lost:
        line = f"10.0.0.7 {lost[0].facts['name']}"
        fix = (
            f"give it an address: a line such as '{line}', with its own address, in /etc/hosts of every host"
        )
        return Row("own name", finding, "wrong", fix)
    if looped and len(firsts) > 1:
        one = looped[0].facts
        fix = (
            "other hosts cannot reach the address that jax.distributed and MPI would use for"
            f" {one['name']}: in its /etc/hosts take {one['name']} off the line of"
            f" {one['own']['addresses'][0]}, and add a line with the"
            f" address that the others use, such as '10.0.0.7 {one['name']}'"
        )
        return Row("own name", finding, "wrong", fix)
    if looped:
        fix = "nothing for one host; with several its name must resolve to an address that the others reach"
        return Row("own name", finding, "note", fix)
    return Row("own name", finding)


def _is_loopback(answer: Mapping) -> bool:
    return any(is_loopback(address) for address in answer["addresses"])


def addresses_text(answer: Mapping) -> str:
    """Format the addresses of a name, or the reason why there are none."""
    return ", ".join(answer["addresses"]) or f"unknown ({answer['error']})"


def _check_doubles(firsts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for machines with the same name, and hosts that the launcher names differently."""
    machines: dict[str, set[str]] = {}
    for one in firsts:
        machines.setdefault(one.facts["name"], set()).add(one.facts["machine"])
    rows = []
    if doubles := [name for name, ids in machines.items() if len(ids) > 1]:
        finding = "; ".join(f"{len(machines[name])} machines are called {name}" for name in doubles)
        fix = (
            "give each machine a name of its own (hostnamectl set-hostname); logs and MPI use it to tell"
            " them apart"
        )
        rows.append(Row("names", finding, "wrong", fix))
    called = [(one.facts["launcher_name"], one.facts["name"]) for one in firsts]
    other = [(name, own) for name, own in called if name.partition(".")[0] != own.partition(".")[0]]
    if other:
        finding = "; ".join(f"{name} of the launcher has the host name {own}" for name, own in other)
        fix = "nothing while both names resolve to the same host (names of a container often differ)"
        rows.append(Row("launcher", finding, "note", fix))
    return rows


def _check_speed(firsts: Sequence[RankFacts]) -> list[Row]:
    slow = [
        (one.host, name, answer["seconds"])
        for one in firsts
        for name, answer in {one.facts["name"]: one.facts["own"], **one.facts["others"]}.items()
        if answer["seconds"] > SLOW_SECONDS
    ]
    if not slow:
        return []
    host, name, seconds = max(slow, key=lambda entry: entry[2])
    finding = f"{host} took {time_text(seconds)} to look up {name}"
    fix = "a name server does not answer: correct /etc/resolv.conf there, or put the hosts into /etc/hosts"
    return [Row("speed", finding, "warning", fix)]


def _check_proxies(firsts: Sequence[RankFacts]) -> list[Row]:
    """Return a row for variables of proxies, which gRPC uses between hosts too."""
    found = join_texts((one.host, ", ".join(one.facts["proxies"])) for one in firsts if one.facts["proxies"])
    if not found:
        return []
    fix = (
        "nothing for ranks of a run, which exempt each other (no_proxy); for programs of yours that connect"
        " to these hosts: export no_proxy=" + ",".join(one.facts["name"] for one in firsts)
    )
    return [Row("proxies", f"{found} set", "note", fix)]


def _check_others(firsts: Sequence[RankFacts]) -> Row:
    """Return the row for the lookup of other hosts' names."""
    wrong = [
        f"{one.host} finds {name} at {addresses_text(answer)}"
        for one in firsts
        for name, answer in one.facts["others"].items()
        if not answer["addresses"] or _is_loopback(answer)
    ]
    if wrong:
        fix = "put every host with its address into /etc/hosts of every host, or repair the name server"
        return Row("other hosts", "; ".join(wrong[:4]), "wrong", fix)
    return Row("other hosts", f"each of {len(firsts)} hosts finds the others by name")


def _check_clocks(all_facts: Sequence[RankFacts]) -> Row:
    # the clock of a host is that of its rank that left the barrier first
    clocks = {
        host: min(one.facts["clock"] for one in ranks) for host, ranks in group_by_host(all_facts).items()
    }
    early, late = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
    apart = clocks[late] - clocks[early]
    if apart < CLOCK_SECONDS:
        return Row("clocks", f"within {time_text(apart)} of each other")
    return Row(
        "clocks",
        f"{late} is {time_text(apart)} ahead of {early}",
        "wrong" if apart >= CLOCK_WRONG_SECONDS else "warning",
        "set the clocks by NTP (timedatectl set-ntp true, or chronyc makestep); dates of files and"
        " logs depend on them",
    )


CHECK = Check(
    about="names of hosts, their addresses, clocks",
    collect=collect,
    evaluate=evaluate,
    limit_seconds=60.0,
    if_it_hangs="name servers do not answer: correct /etc/resolv.conf, or put the hosts into /etc/hosts",
)
