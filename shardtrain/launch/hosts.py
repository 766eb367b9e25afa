"""Parse the hosts of a job, and place its ranks on them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtrain.errors.messages import refuse
from shardtrain.islands.cluster import Cluster
from shardtrain.system.plain_text import text_lines
from shardtrain.system.untrusted_files import read_text


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host, and the number of ranks that may run there; None means an even share."""

    name: str
    slots: int | None = None


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse a list of hosts: `a,b`, or with the ranks of each, `a:2,b:1`.

    Raises:
      ValueError: a name or a number is missing, or a name occurs twice.

    >>> [(host.name, host.slots) for host in parse_hosts("a:2,b")]
    [('a', 2), ('b', None)]
    """
    return _parse_all([word.strip() for word in text.split(",")], f"hosts {text!r}")


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a file of hosts, one a line: `a`, `a:2` (MPICH, Intel MPI) or `a slots=2` (Open MPI); # comments.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line cannot be parsed, or the file names no host.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no hostfile {path}; write one host a line, a or a:2 or a slots=2")
    lines = [line.split("#")[0].strip() for _, line in text_lines(read_text(path))]
    lines = [re.sub(r"\s+slots\s*=\s*(\d+)(\s+max[-_]slots\s*=\s*\d+)?$", r":\1", line) for line in lines]
    if not any(lines):
        raise ValueError(f"hostfile {path} names no host; write one a line, a or a:2 or a slots=2")
    return _parse_all([line for line in lines if line], f"hostfile {path}")


def _parse_all(words: Sequence[str], where: str) -> tuple[Host, ...]:
    found = [re.fullmatch(r"([A-Za-z0-9][\w.-]*)(?::([1-9]\d{0,8}))?", word) for word in words]
    problems = [
        f"{word!r} is no host; write a name, or name:ranks"
        for word, match in zip(words, found, strict=True)
        if not match
    ]
    names = [match[1] for match in found if match]
    problems += [
        f"{name} is there {names.count(name)} times; write {name}:{names.count(name)} once"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    refuse(where, problems)
    return tuple(Host(name=m[1], slots=int(m[2]) if m[2] else None) for m in found if m)


def hosts_problem(num_ranks: int, hosts: Sequence[Host]) -> str | None:
    """Return why this number of ranks cannot be placed on these hosts; None if they can."""
    slots = [host.slots for host in hosts if host.slots is not None]
    if len(slots) == len(hosts) and sum(slots) == num_ranks:
        return None
    each, more = divmod(num_ranks, len(hosts))
    if more:
        lower = each * len(hosts)
        fixes = " or ".join(str(n) for n in (lower, lower + len(hosts)) if n)
        counts = [each + (i < more) for i in range(len(hosts))]
        named = ",".join(f"{host.name}:{n}" for host, n in zip(hosts, counts, strict=True) if n)
        return (
            f"{num_ranks} ranks cannot be shared evenly by {len(hosts)} hosts: {num_ranks} % {len(hosts)} ="
            f" {more}. Use {fixes} ranks, or give the number of each host: {named}"
        )
    small = [f"{host.name}:{host.slots}" for host in hosts if host.slots is not None and host.slots < each]
    if small:
        return (
            f"an even share of {num_ranks} ranks over {len(hosts)} hosts is {each}, and {', '.join(small)}"
            f" take fewer; give slots that add up to {num_ranks}, or {each} or more to each"
        )
    return None


def place_ranks(num_ranks: int, hosts: Sequence[Host]) -> tuple[tuple[str, int], ...]:
    """Return (host, number of ranks there), in the order of the ranks.

    Slots that add up to the ranks are used as they are, for unequal hosts. Otherwise (a hostfile has the
    capacities of hosts) the ranks are divided evenly, so that islands do not pile up on the first host.

    >>> place_ranks(2, parse_hosts("a:8,b:8"))
    (('a', 1), ('b', 1))
    """
    slots = [host.slots or 0 for host in hosts]
    if all(slots) and sum(slots) == num_ranks:
        return tuple((host.name, n) for host, n in zip(hosts, slots, strict=True))
    return tuple((host.name, num_ranks // len(hosts)) for host in hosts)


def hosts_of_cluster(hosts: Sequence[Host], cluster: Cluster) -> tuple[Host, ...]:
    """Return the hosts with their numbers of ranks, from the nodes of a cluster's islands.

    Args:
      hosts: in the order of the islands; returned unchanged if one has a number of ranks, or if empty.
      cluster: its islands.

    Raises:
      ValueError: the numbers of hosts and of nodes differ.
    """
    if not hosts or any(host.slots is not None for host in hosts):
        return tuple(hosts)
    slots = [kind.processes // kind.nodes for kind in cluster.of_islands for _ in range(kind.nodes)]
    if len(slots) != len(hosts):
        raise ValueError(
            f"{len(hosts)} hosts are named, and the islands of the cluster file have {len(slots)} nodes; name"
            f" {len(slots)} hosts, or give the number of ranks of each: {hosts[0].name}:{slots[0]}"
        )
    return tuple(Host(name=host.name, slots=number) for host, number in zip(hosts, slots, strict=True))
