"""Describe a cluster of unequal islands, and read it from a file. Values only: no jax, no MPI.

`launch --cluster FILE` places the islands; `train --cluster FILE` uses the sections of the strategy. A file
with the key `islands` is a cluster; other files in `meshes/` are layouts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import tomli_w

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import near, refuse
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.system.excerpts import short
from shardtrain.system.host import parse_ranges
from shardtrain.system.untrusted_data import read_toml

KEY, LINK = "islands", "link_gb_per_second"
"""The keys of a cluster file; a layout lacks the first one."""

MOST_FILE_BYTES = 1 << 16
MOST_ISLANDS, MOST_NUMBER = 1 << 20, 1 << 31


@dataclass(frozen=True, kw_only=True)
class IslandKind:
    """A kind of islands that are alike.

    Args:
      kind: a name, such as "v100", for messages.
      count: number of islands of this kind.
      nodes: number of nodes of each island.
      processes: number of processes of each island.
      devices: number of devices of each island, requested from batch systems as GPUs; None requests none.
      device: the hardware of each device, for `shardtrain plan`; None if not given.
      launch: launcher -> its options for these nodes, such as {"slurm": {"partition": "old"}}.
      strategy: fields of the strategy that differ on these islands, see `Strategy.islands`.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    kind: str
    count: int = 1
    nodes: int = 1
    processes: int = 1
    devices: int | None = None
    device: ClusterDevice | None = None
    launch: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if not problems:
            numbers = {name: getattr(self, name) for name in ("count", "nodes", "processes", "devices")}
            problems += [
                f"{name} is {value}; use 1 to {MOST_NUMBER}"
                for name, value in numbers.items()
                if value is not None and not 1 <= value <= MOST_NUMBER
            ]
            problems += [] if problems else self._uneven()
            problems += self._option_problems()
            problems += [
                f"strategy has {near(key, OF_ISLANDS)}; islands may differ only in these"
                for key in self.strategy
                if key not in OF_ISLANDS
            ]
        refuse(f"islands of kind {self.kind!r}", problems)

    def _uneven(self) -> list[str]:
        problems = []
        if self.processes % self.nodes:
            fixes = " or ".join(str(n) for n in range(1, self.processes + 1) if self.processes % n == 0)
            problems.append(
                f"processes is {self.processes}, on nodes = {self.nodes}: {self.processes} % {self.nodes} ="
                f" {self.processes % self.nodes}; use nodes = {fixes}"
            )
        if self.devices is not None and self.devices % self.processes:
            problems.append(
                f"devices is {self.devices}, of processes = {self.processes}: {self.devices} %"
                f" {self.processes} = {self.devices % self.processes}; each process has the same number"
            )
        return problems

    def _option_problems(self) -> list[str]:
        problems = []
        for launcher, options in self.launch.items():
            if not isinstance(options, Mapping):
                problems.append(
                    f"launch.{launcher} is {options!r}; give options and their values, as a table"
                )
                continue
            for name, value in options.items():
                where = f"launch.{launcher}.{name}"
                if not re.fullmatch(r"[A-Za-z][A-Za-z-]*", name):
                    problems.append(f"{where} is no name of an option; write it without dashes before it")
                elif value is not True and (isinstance(value, bool) or not isinstance(value, str | int)):
                    problems.append(
                        f"{where} is {value!r}; use a text, a number, or true for an option alone"
                    )
                elif isinstance(value, str) and (problem := option_problem(value)):
                    problems.append(f"{where} is {short(value)}, which {problem}")
        return problems


def option_problem(text: str) -> str:
    """Return why an option of a batch system would become several lines or options of its script; "" if not.

    >>> option_problem("a100&nvlink"), option_problem("a100 --mem=0")
    ('', 'contains another option; give each option separately')
    """
    if len(text.splitlines()) != 1 or not text.isprintable():
        return "is more than one line, or has control characters; give each option separately, in one line"
    return "contains another option; give each option separately" if re.search(r"\s-|\s#", text) else ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The islands of a run, kind by kind.

    Args:
      islands: the kinds; islands are numbered from 0, first those of the first kind.
      link_gb_per_second: gigabytes per second that an island sends to others, for `shardtrain plan`; None
        assumes no delay.

    Raises:
      ValueError: lists kinds that contradict each other.
    """

    islands: tuple[IslandKind, ...]
    link_gb_per_second: float | None = None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.link_gb_per_second is not None and not self.link_gb_per_second > 0:
            problems.append(f"link_gb_per_second is {self.link_gb_per_second}; use a number above 0")
        names = [each.kind for each in self.islands]
        if not names:
            problems.append("there are no islands; give at least one kind: [[islands]]")
        problems += [
            f"kind {name!r} is there {names.count(name)} times; give each a name of its own"
            for name in dict.fromkeys(names)
            if names.count(name) > 1
        ]
        without = [each.kind for each in self.islands if each.devices is None]
        if without and len(without) < len(names):
            problems.append(
                f"kind {', '.join(without)} has no devices, and others have; give them for all or for none"
            )
        if (total := sum(each.count for each in self.islands)) > MOST_ISLANDS:
            problems.append(f"there are {total} islands; use at most {MOST_ISLANDS}")
        refuse("this cluster cannot be used", problems)

    @property
    def of_islands(self) -> tuple[IslandKind, ...]:
        """The kind of each island."""
        return tuple(kind for kind in self.islands for _ in range(kind.count))

    @property
    def sections(self) -> tuple[tuple[str, IslandKind], ...]:
        """The numbers of the islands of each kind, as sections of a strategy name them.

        >>> kinds = (IslandKind(kind="old", count=2), IslandKind(kind="new"))
        >>> [numbers for numbers, kind in Cluster(islands=kinds).sections]
        ['0-1', '2']
        """
        firsts = [sum(kind.count for kind in self.islands[:number]) for number in range(len(self.islands))]
        return tuple(
            (range_text(first, kind.count), kind) for first, kind in zip(firsts, self.islands, strict=True)
        )

    @property
    def strategy_sections(self) -> dict[str, Mapping[str, Any]]:
        """Islands -> the fields of the strategy that differ on them, see `Strategy.islands`."""
        return {islands: kind.strategy for islands, kind in self.sections if kind.strategy}


def add_up_devices(kinds: Sequence[IslandKind], name: str) -> float | None:
    """Add up a figure of all devices, such as "watts"; None if it is not given for one of the kinds."""
    total = 0.0
    for each in kinds:
        value = getattr(each.device, name, None)
        if value is None or each.devices is None:
            return None
        total += each.count * each.devices * value
    return total


def arrange_islands(cluster: Cluster, order: Sequence[int]) -> Cluster:
    """Return a cluster with some islands of another one, in another order.

    Args:
      cluster: the cluster.
      order: number of the kind of each island. Islands of a kind that follow each other are one kind, and a
        kind that comes again has a number in its name.

    >>> cluster = Cluster(islands=(IslandKind(kind="a", count=2), IslandKind(kind="b", count=2)))
    >>> [(each.kind, each.count) for each in arrange_islands(cluster, (0, 0, 1, 0)).islands]
    [('a', 2), ('b', 1), ('a-2', 1)]
    """
    kinds: list[IslandKind] = []
    names = {kind.kind for kind in cluster.islands}
    for number, group in groupby(order):
        kind, name = cluster.islands[number], cluster.islands[number].kind
        if name in (each.kind for each in kinds):
            name = next(text for i in count(2) if (text := f"{name}-{i}") not in names)
        names.add(name)
        kinds.append(replace(kind, kind=name, count=len(list(group))))
    return replace(cluster, islands=tuple(kinds))


def cluster_text(cluster: Cluster) -> str:
    """Format a cluster as TOML, which `read_cluster` reads back to an equal one."""

    def plain(value: Any) -> dict[str, Any]:
        return {each: item for each, item in vars(value).items() if item is not None and item != {}}

    islands = [
        {name: plain(item) if name == "device" else item for name, item in plain(kind).items()}
        for kind in cluster.islands
    ]
    return tomli_w.dumps({**plain(cluster), KEY: islands})


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from a TOML file: a table [[islands]] for each kind, the fields of `IslandKind` by name.

    Raises:
      ValueError: not TOML, not a cluster, an unknown key, or values that `IslandKind` refuses.
    """
    try:
        values = read_toml(path, MOST_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"there is no cluster file {path} to read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a cluster in TOML: {error}") from error
    if KEY not in values:
        raise ValueError(
            f"{path} is no cluster file: it has no [[islands]]; a layout is given to --mesh, a strategy to"
            " --strategy"
        )
    tables = values[KEY]
    others = {key: value for key, value in values.items() if key != KEY}
    problems = [f"unknown key {near(key, [KEY, LINK])}" for key in others if key != LINK]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(
            f"{path}: islands is {tables!r}; write a table for each kind of islands: [[islands]]"
        )
    kinds = []
    for number, table in enumerate(tables):
        try:
            kinds.append(_parse_kind(table))
        except ValueError as error:
            name = f" (kind {short(table['kind'])})" if "kind" in table else ""
            problems.append(f"[[islands]] {number}{name}: {error}")
    refuse(f"{path} cannot be read", problems)
    try:
        return Cluster(islands=tuple(kinds), **others)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse_kind(table: Mapping[str, Any]) -> IslandKind:
    known = [each.name for each in fields(IslandKind)]
    problems = [f"unknown key {near(key, known)}" for key in table if key not in known]
    if "kind" not in table:
        problems.append('kind is missing; give these islands a name: kind = "a100"')
    device = table.get("device")
    if isinstance(device, Mapping):
        names = [each.name for each in fields(ClusterDevice)]
        problems += [f"unknown key device.{near(key, names)}" for key in device if key not in names]
    elif device is not None:
        problems.append(f"device is {device!r}; write a table, device = {{ name = ... }}")
    refuse("this kind of islands cannot be read", problems)
    return IslandKind(**{**table, "device": None if device is None else ClusterDevice(**device)})


OF_ISLANDS = ("layout", "accumulate", "remat", "compute_dtype")
"""Fields of a strategy in which islands may differ."""


def island_numbers(name: str) -> set[int] | None:
    """Parse numbers and ranges of islands; None if the text has another form.

    >>> island_numbers("0,2-4"), island_numbers("*V100*")
    ({0, 2, 3, 4}, None)
    """
    name = name.replace(" ", "")
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", name):
        return None
    return set(parse_ranges(name))


def range_text(first: int, count: int) -> str:
    """Format a range of consecutive islands.

    >>> range_text(2, 3), range_text(5, 1)
    ('2-4', '5')
    """
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
