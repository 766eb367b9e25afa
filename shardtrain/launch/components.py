"""Place islands on the nodes of a batch system, in components of equal nodes. Values only.

An island lies within one node or fills several. Consecutive islands with equal ranks per node, and equal
shares of GPUs and cores, are one component; a job of one component has equal nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from shardtrain.errors.messages import refuse
from shardtrain.islands.cluster import island_numbers, range_text
from shardtrain.launch import batch
from shardtrain.launch.job import Job
from shardtrain.system.untrusted_data import parse_count


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The resources of each island of a job.

    Args:
      nodes: number of nodes of each island; None if not given.
      gpus: GPUs of each process, by island; None if not requested.
      cpus: cores of each process, by island; None if not requested.
      options: options of the batch system for each island, in addition to those of all.
    """

    nodes: tuple[int, ...] | None = None
    gpus: tuple[int | None, ...]
    cpus: tuple[int | None, ...]
    options: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Component:
    """Consecutive islands on equal nodes.

    Args:
      islands: their numbers.
      nodes: number of nodes of all of them.
      ranks_per_node: number of ranks on each node.
      gpus: GPUs of each process; None if not requested.
      cpus: cores of each process; None means whole nodes.
      options: further options of the batch system for these nodes only.
    """

    islands: range
    nodes: int
    ranks_per_node: int
    gpus: int | None = None
    cpus: int | None = None
    options: tuple[str, ...] = field(default=())


def parse_counts(text: int | str | None, islands: int, what: str) -> tuple[int | None, ...]:
    """Parse one number for each island: the same for all, or one each as in "4,4,8,8".

    Args:
      text: the value of the option; None if not given.
      islands: number of islands.
      what: the name of the option, for messages.

    Raises:
      ValueError: it is not a number from 1, or has another number of items than islands.

    >>> parse_counts(4, 2, "gpus per island"), parse_counts("4,8", 2, "gpus per island")
    ((4, 4), (4, 8))
    """
    if text is None:
        return (None,) * islands
    words = [word.strip() for word in str(text).split(",")]
    if wrong := [word for word in words if not parse_count(word)]:
        raise ValueError(
            f"{what} is {', '.join(wrong)[:40]}; use 1 or more, or leave it out; several islands: one number"
            " for all, or one each, as in 4,4,8"
        )
    if len(words) not in (1, islands):
        raise ValueError(
            f"{what} {text} is for {len(words)} islands, and there are {islands}; give one number, or"
            f" {islands}"
        )
    numbers = tuple(map(int, words))
    return numbers * islands if len(numbers) == 1 else numbers


def divide_among_processes(job: Job, given: int | str | None, what: str) -> tuple[int | None, ...]:
    """Return the GPUs or CPUs of each process, by island.

    Args:
      job: its islands.
      given: the number per island, see `counts`.
      what: "GPUs" or "CPUs".

    Raises:
      ValueError: lists the islands whose number cannot be divided evenly among their processes.
    """
    numbers, each = job.processes, parse_counts(given, job.islands, f"{what} per island")
    uneven = [
        (island, count, number)
        for island, (count, number) in enumerate(zip(each, numbers, strict=True))
        if count is not None and count % number
    ]
    if uneven:
        raise ValueError("; ".join(_uneven_text(what, *one, len(set(numbers)) > 1) for one in uneven))
    return tuple(
        None if count is None else count // number for count, number in zip(each, numbers, strict=True)
    )


def _uneven_text(what: str, island: int, count: int, number: int, named: bool) -> str:
    lower = count // number * number
    fixes = " or ".join(str(n) for n in (lower, lower + number) if n)
    which = f"island {island}" if named else "an island"
    each = f"; or one number for each island, --{what.lower()}-per-island 4,8" if named else ""
    return (
        f"{count} {what} of {which} cannot be shared evenly by its {number} processes:"
        f" {count} % {number} = {count % number}. Use {fixes}{each}"
    )


def split_options(options: Sequence[str], islands: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Split options into those of all islands, and those of each island: `0-1:partition=old`.

    Raises:
      ValueError: an option is for an island that does not exist.

    >>> split_options(("exclude=a", "1:partition=new"), 2)
    (('exclude=a',), [(), ('partition=new',)])
    """
    common: list[str] = []
    own: list[list[str]] = [[] for _ in range(islands)]
    for option in options:
        name, colon, rest = option.partition(":")
        numbers = island_numbers(name) if colon else None
        if numbers is None:
            common.append(option)
            continue
        if not numbers or max(numbers) >= islands:
            raise ValueError(
                f"the option {option!r} is for islands {name}, and there are {range_text(0, islands)};"
                " give numbers of islands, as in 0-1:partition=old"
            )
        for number in sorted(numbers):
            own[number].append(rest)
    return tuple(common), [tuple(each) for each in own]


def components(job: Job, nodes: int | None, shares: Shares) -> tuple[Component, ...]:
    """Return the components of a job, in the order of its islands.

    Without a number of nodes for each island, all ranks are placed on equal nodes where no island then
    straddles two of them; otherwise each island gets the same number of nodes.

    Args:
      job: its islands.
      nodes: total number of nodes; None if not given.
      shares: the resources of each island.

    Raises:
      ValueError: islands would share a node with parts of other islands, or ranks cannot be divided evenly.
    """
    kinds = list(zip(shares.gpus, shares.cpus, shares.options, strict=True))
    if shares.nodes is None and len(set(kinds)) == 1:
        equal = batch.num_nodes(job, nodes)
        problems = batch.node_problems(job, equal)
        if not problems:
            gpus, cpus, options = kinds[0]
            ranks = job.num_ranks // equal
            return (
                Component(
                    islands=range(job.islands), nodes=equal, ranks_per_node=ranks,
                    gpus=gpus, cpus=cpus, options=options,
                ),
            )  # fmt: skip
        unequal = not isinstance(job.processes_per_island, int)
        if equal < 1 or equal % job.islands or not unequal:
            fix = [f"give the number of nodes of each island: --nodes-per-island {_example(job)}"]
            raise ValueError("; ".join([*problems, *(fix if unequal and equal > 0 else [])]))
    per_island = _count_nodes(job, nodes, shares.nodes)
    ranks = [number // own for number, own in zip(job.processes, per_island, strict=True)]
    found, first = [], 0
    for (ranks_per_node, (gpus, cpus, options)), group in groupby(zip(ranks, kinds, strict=True)):
        last = first + len(list(group))
        found.append(
            Component(
                islands=range(first, last), nodes=sum(per_island[first:last]), ranks_per_node=ranks_per_node,
                gpus=gpus, cpus=cpus, options=options,
            )
        )  # fmt: skip
        first = last
    return tuple(found)


def _count_nodes(job: Job, nodes: int | None, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the number of nodes of each island: as given, else an equal part of all."""
    if given is None:
        total = job.islands if nodes is None else nodes
        if total < 1 or total % job.islands:
            raise ValueError(
                f"{total} nodes for {job.islands} islands that differ: each needs nodes of its own; use"
                f" --nodes {job.islands}, or --nodes-per-island {_example(job)}"
            )
        given = (total // job.islands,) * job.islands
    elif nodes is not None and nodes != sum(given):
        raise ValueError(
            f"nodes is {nodes}, and islands of {','.join(map(str, given))} nodes have {sum(given)}; leave"
            " --nodes out"
        )
    uneven = [
        f"island {island} has {number} processes and {own} nodes: {number} % {own} = {number % own}. Give it"
        f" {' or '.join(str(n) for n in range(1, number + 1) if number % n == 0)}"
        for island, (number, own) in enumerate(zip(job.processes, given, strict=True))
        if number % own
    ]
    refuse("ranks cannot be shared evenly by the nodes of their island", uneven)
    return given


def _example(job: Job) -> str:
    return ",".join("1" * job.islands) if job.islands <= 8 else "1,1,..."
