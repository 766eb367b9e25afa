"""The checks `names` and `ports`: host names and clocks, and whether all hosts can connect over TCP."""

import errno
import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtrain.doctor.check import (
    Facts,
    RankContext,
    RankFacts,
    Row,
    first_ranks,
    group_by_host,
    merge_rows,
    time_text,
)
from shardtrain.system.excerpts import some

SLOW_SECONDS = 1.0
"""Duration above which a lookup of a name is a warning; it takes seconds if a name server does not answer."""

CLOCK_SECONDS, CLOCK_WRONG_SECONDS = 1.0, 60.0
"""Clock differences above which the status is `warning` and `wrong`: dates of checkpoints and logs get out of
order."""

MOST_HOSTS = 64
"""Largest number of other hosts that a host looks up."""

CONNECT_SECONDS = 3.0
MOST_PARTNERS = 16
"""Number of following hosts in a ring to which each host connects."""

CAUSES = {
    "silent": "a firewall drops it",
    "refused": "a firewall rejects it, or the name resolves to another machine",
    "no route": "there is no route between these networks",
    "no name": "the name does not resolve there, see names",
}
"""Failure of a connection -> its usual cause."""


def collect_names(context: RankContext) -> Facts:
    """Collect this host's name, the addresses of all names, and its clock at a common moment."""
    name, machine = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id")
    names = [other for other in dict.fromkeys(context.control.all_gather("names", name)) if other != name]
    facts = {
        "name": name,
        "launcher_name": context.environment.host,
        "machine": machine.read_text().strip() if machine.exists() else "",
        "own": resolve(name),
        "others": {o: resolve(o) for o in names[:MOST_HOSTS]} if context.is_first_on_host else {},
    }
    context.control.all_gather("names are looked up")
    # a barrier: all ranks leave it within milliseconds
    return facts | {"clock": time.time()}


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


def evaluate_names(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for own names, other hosts' names, and clocks."""
    firsts = first_ranks(all_facts)
    rows = merge_rows(firsts, lambda one: [_judge_own(one, is_alone=len(firsts) == 1)])
    rows += _check_doubles(firsts)
    slowest, host, name = max(
        (answer["seconds"], one.host, name)
        for one in firsts
        for name, answer in {one["name"]: one["own"], **one["others"]}.items()
    )
    if slowest > SLOW_SECONDS:
        fix = (
            "a name server does not answer: correct /etc/resolv.conf there, or put the hosts into /etc/hosts"
        )
        rows.append(Row("speed", f"{host} took {time_text(slowest)} to look up {name}", "warning", fix))
    return [*rows, _check_others(firsts), _check_clocks(all_facts)] if len(firsts) > 1 else rows


def _judge_own(one: RankFacts, *, is_alone: bool) -> Row:
    name, addresses = one["name"], one["own"]["addresses"]
    finding = f"{name} is {_addresses_text(one['own'])}"
    if not addresses:
        line = f"'10.0.0.7 {name}', with its own address, in /etc/hosts of every host"
        return Row("own name", finding, "wrong", f"give it an address: a line such as {line}")
    if not _is_loopback(one["own"]):
        return Row("own name", finding)
    if is_alone:
        fix = "nothing for one host; with several its name must resolve to an address that the others reach"
        return Row("own name", finding, "note", fix)
    fix = (
        f"other hosts cannot reach the address that jax.distributed and MPI would use for {name}: in its"
        f" /etc/hosts take {name} off the line of {addresses[0]}, and add a line with the address that the"
        f" others use, such as '10.0.0.7 {name}'"
    )
    return Row("own name", finding, "wrong", fix)


def _is_loopback(answer: Mapping) -> bool:
    return any(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in answer["addresses"])


def _addresses_text(answer: Mapping) -> str:
    return ", ".join(answer["addresses"]) or f"unknown ({answer['error']})"


def _check_doubles(firsts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for machines with the same name, and hosts that the launcher names differently."""
    machines: dict[str, set[str]] = {}
    for one in firsts:
        machines.setdefault(one["name"], set()).add(one["machine"])
    rows = []
    if doubles := [
        f"{len(ids)} machines are called {name}" for name, ids in machines.items() if len(ids) > 1
    ]:
        fix = "give each machine a name of its own (hostnamectl set-hostname), for logs and MPI"
        rows.append(Row("names", "; ".join(doubles), "wrong", fix))
    if other := [
        f"{one['launcher_name']} of the launcher has the host name {one['name']}"
        for one in firsts
        if one["launcher_name"].partition(".")[0] != one["name"].partition(".")[0]
    ]:
        fix = "nothing while both names resolve to the same host (names of a container often differ)"
        rows.append(Row("launcher", "; ".join(other), "note", fix))
    return rows


def _check_others(firsts: Sequence[RankFacts]) -> Row:
    """Return the row for the lookup of other hosts' names."""
    wrong = [
        f"{one.host} finds {name} at {_addresses_text(answer)}"
        for one in firsts
        for name, answer in one["others"].items()
        if not answer["addresses"] or _is_loopback(answer)
    ]
    if wrong:
        fix = "put every host with its address into /etc/hosts of every host, or repair the name server"
        return Row("other hosts", "; ".join(wrong[:4]), "wrong", fix)
    return Row("other hosts", f"each of {len(firsts)} hosts finds the others by name")


def _check_clocks(all_facts: Sequence[RankFacts]) -> Row:
    # the clock of a host is that of its rank that left the barrier first
    clocks = {host: min(one["clock"] for one in ranks) for host, ranks in group_by_host(all_facts).items()}
    early, late = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
    apart = clocks[late] - clocks[early]
    if apart < CLOCK_SECONDS:
        return Row("clocks", f"within {time_text(apart)} of each other")
    finding = f"{late} is {time_text(apart)} ahead of {early}"
    fix = "set the clocks by NTP (timedatectl set-ntp true, or chronyc makestep): files and logs have dates"
    return Row("clocks", finding, "wrong" if apart >= CLOCK_WRONG_SECONDS else "warning", fix)


def collect_ports(context: RankContext) -> Facts:
    """Listen on a free port, and connect to those of the other hosts."""
    facts: Facts = {"listens": None, "connects": {}}
    hosts, partners, port = list(dict.fromkeys(context.hosts)), [], 0
    with socket.socket() as server:
        if context.is_first_on_host:
            at = hosts.index(context.hosts[context.rank])
            # itself if there is no other host
            partners = (hosts[at + 1 :] + hosts[:at])[:MOST_PARTNERS] or hosts
            try:
                server.bind(("", 0))
                server.listen(MOST_PARTNERS * 4)
                port = server.getsockname()[1]
            except OSError as error:
                facts["listens"] = str(error)
        address = "127.0.0.1" if len(hosts) == 1 else socket.gethostname()
        everyone = context.control.all_gather("ports", [address, port])
        for host in partners:
            there = everyone[context.hosts.index(host)]
            if there[1]:
                facts["connects"][host] = connect(*there)
        # a barrier: no rank closes its port while another still connects
        context.control.all_gather("ports are tried")
    return facts


def connect(address: str, port: int) -> Facts:
    """Connect once.

    Returns:
      `seconds`, and `failed`: a key of `CAUSES`, or None.
    """
    began, failed = time.monotonic(), None
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except TimeoutError:
        failed = "silent"
    except ConnectionRefusedError:
        failed = "refused"
    except socket.gaierror:
        failed = "no name"
    except OSError as error:
        # a firewall's "administratively prohibited" arrives as one of these too
        failed = "no route" if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH) else str(error)
    return {"seconds": time.monotonic() - began, "failed": failed}


def evaluate_ports(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for listening and for connecting."""
    firsts = first_ranks(all_facts)
    if refused := [f"{one.host}: {one['listens']}" for one in firsts if one["listens"]]:
        fix = "allow programs to listen there: ask the administrator, or change the container's network mode"
        return [Row("listen", "; ".join(refused), "wrong", fix)]
    tried = [(f"{one.host} to {host}", there) for one in firsts for host, there in one["connects"].items()]
    broken = [(pair, there["failed"]) for pair, there in tried if there["failed"]]
    if broken:
        words = {"silent": f"gets no answer in {CONNECT_SECONDS:.0f} s", "refused": "is refused"}
        pairs = some([f"{pair} {words.get(failed, f'fails ({failed})')}" for pair, failed in broken])
        why = dict.fromkeys(CAUSES.get(failed, "the network is misconfigured") for _, failed in broken)
        fix = (
            f"{'; '.join(why)}: jax.distributed and MPI need free TCP between the hosts, on ports from"
            " 1024 up (firewall-cmd --zone=trusted --add-source=NETWORK, or host names that resolve to an"
            " internal network)"
        )
        return [Row("connect", pairs, "wrong", fix)]
    slowest = max((there["seconds"] for _, there in tried), default=0.0)
    among = f"{len(tried)} connections between {len(firsts)} hosts" if len(firsts) > 1 else "to itself"
    return [Row("connect", f"{among}, the slowest in {time_text(slowest)}")]
