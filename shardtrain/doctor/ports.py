"""The check `ports`: whether a program may listen, and whether every pair of hosts can connect over TCP."""

import errno
import socket
import time
from collections.abc import Sequence

from shardtrain.doctor.check import Check, Facts, RankContext, RankFacts, Row, group_by_host, time_text
from shardtrain.system.excerpts import some

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


def collect(context: RankContext) -> Facts:
    """Listen on a free port, and connect to those of the other hosts."""
    facts: Facts = {"listens": None, "connects": {}}
    if not context.is_first_on_host:
        context.control.all_gather("ports", None)
        context.control.all_gather("ports are tried")
        return facts
    with socket.socket() as server:
        try:
            server.bind(("", 0))
            server.listen(MOST_PARTNERS * 4)
            port = server.getsockname()[1]
        except OSError as error:
            facts["listens"], port = str(error), 0
        alone = len(context.first_ranks) == 1
        mine = {"address": "127.0.0.1" if alone else socket.gethostname(), "port": port}
        everyone = context.control.all_gather("ports", mine)
        for host in choose_partners(list(context.first_ranks), context.hosts[context.rank]):
            there = everyone[context.first_ranks[host]]
            if there["port"]:
                facts["connects"][host] = connect(there["address"], there["port"])
        # a barrier: no rank closes its port while another still connects
        context.control.all_gather("ports are tried")
    return facts


def choose_partners(hosts: Sequence[str], mine: str) -> list[str]:
    """Return the hosts to which this one connects: itself if there is no other, else the next ones.

    >>> choose_partners(["a"], "a"), choose_partners(["a", "b", "c"], "b")
    (['a'], ['c', 'a'])
    """
    at = hosts.index(mine)
    others = [*hosts[at + 1 :], *hosts[:at]]
    return others[:MOST_PARTNERS] if others else [mine]


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


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for listening and for connecting."""
    firsts = [ranks[0] for ranks in group_by_host(all_facts).values()]
    if refused := [f"{one.host}: {one.facts['listens']}" for one in firsts if one.facts["listens"]]:
        fix = (
            "allow users' programs to listen there: ask the administrator, or change the network mode of the"
            " container"
        )
        return [Row("listen", "; ".join(refused), "wrong", fix)]
    tried = [(one.host, host, answer) for one in firsts for host, answer in one.facts["connects"].items()]
    broken = [entry for entry in tried if entry[2]["failed"]]
    if broken:
        pairs = some([f"{a} to {b} {_failure_text(answer['failed'])}" for a, b, answer in broken])
        why = dict.fromkeys(
            CAUSES.get(answer["failed"], "the network is misconfigured") for *_, answer in broken
        )
        fix = (
            f"{'; '.join(why)}: jax.distributed and MPI need free TCP between the hosts, on ports from"
            " 1024 up (firewall-cmd --zone=trusted --add-source=NETWORK, or host names that resolve to an"
            " internal network)"
        )
        return [Row("connect", pairs, "wrong", fix)]
    slowest = max((answer["seconds"] for *_, answer in tried), default=0.0)
    among = f"{len(tried)} connections between {len(firsts)} hosts" if len(firsts) > 1 else "to itself"
    return [Row("connect", f"{among}, the slowest in {time_text(slowest)}")]


def _failure_text(failed: str) -> str:
    words = {"silent": f"gets no answer in {CONNECT_SECONDS:.0f} s", "refused": "is refused"}
    return words.get(failed, f"fails ({failed})")


CHECK = Check(
    about="listening, and TCP between the hosts",
    collect=collect,
    evaluate=evaluate,
    limit_seconds=90.0,
    if_it_hangs="see names and the firewall of that host",
)
