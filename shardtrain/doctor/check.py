"""The interface of a check: `collect` gathers facts on every rank, `evaluate` converts them to rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardtrain.islands.rank_environment import RankEnvironment
from shardtrain.system.excerpts import some

if TYPE_CHECKING:
    from shardtrain.islands.bridge import Control

Status = Literal["ok", "note", "warning", "wrong"]

STATUSES: tuple[Status, ...] = ("ok", "note", "warning", "wrong")
"""Statuses from best to worst: `note` needs no action, `warning` costs time, `wrong` breaks a run."""

MOST_NAMES = 4
"""Names of ranks or hosts that a finding lists; the others are counted."""

Facts = dict[str, Any]
"""Facts of a check on one rank, as JSON values."""


@dataclass(frozen=True)
class Row:
    """A row of the table: the finding of a check about one item, its status, and the fix.

    Args:
      item: the item that was checked.
      finding: the result as text, by rank or host if they differ.
      status: see `STATUSES`.
      fix: the change to make; never empty for `warning` and `wrong`.
      check: the name of the check, which the runner sets.
    """

    item: str
    finding: str
    status: Status = "ok"
    fix: str = ""
    check: str = ""

    def __post_init__(self) -> None:
        assert self.fix or self.status in ("ok", "note"), self


class SingleProcess:
    """The control channel of a single process, which exchanges nothing."""

    def __init__(self, name: str) -> None:
        self.names = [name]
        self.rank, self.size = 0, 1

    def all_gather(self, name: str, value: Any = None, timeout_seconds: float | None = None) -> list[Any]:
        """Return the value in a list."""
        return [value]


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """The context in which a check collects facts on one rank.

    Args:
      environment: rank, size and host of this process.
      hosts: rank -> host, of the connected ranks.
      control: channel to the other ranks; each check has its own, so that one that hangs disturbs no other.
      comm: the mpi4py communicator of all ranks; None for a single process.
      environ: the environment variables.
      run_dir: the folder for runs.
      quick: whether to skip slow measurements.
      given_cores: the cores to which the launcher bound this rank, before they are divided among ranks.
      problem: why the launched ranks cannot exchange messages; None if they can.
      islands_problem: why the ranks cannot be divided into islands; None if they can.
    """

    environment: RankEnvironment
    hosts: tuple[str, ...]
    control: "Control | SingleProcess"
    comm: Any = None
    environ: Mapping[str, str]
    run_dir: Path
    quick: bool
    given_cores: tuple[int, ...]
    problem: str | None = None
    islands_problem: str | None = None

    @property
    def rank(self) -> int:
        """The rank of this process among the connected ones."""
        return self.control.rank

    @property
    def is_first_on_host(self) -> bool:
        """Whether this rank collects the facts that all ranks of its host share."""
        return self.hosts.index(self.hosts[self.rank]) == self.rank


class RankFacts(Facts):
    """The facts that a check collected on one rank.

    Args:
      rank: its number.
      name: its name in the table.
      host: its host.
      facts: the result of `collect`.
    """

    def __init__(self, rank: int, name: str, host: str, facts: Facts) -> None:
        super().__init__(facts)
        self.rank, self.name, self.host = rank, name, host


def join_texts(texts: Iterable[tuple[str, str]], *, named: bool = False) -> str:
    """Join the texts of several ranks or hosts; equal texts appear once, after all of their names.

    Args:
      texts: (name, text).
      named: whether a single text has its names too.

    >>> join_texts([("a", "1 core"), ("b", "1 core")]), join_texts([("a", "x"), ("b", "y"), ("c", "x")])
    ('1 core', 'a, c: x; b: y')
    """
    groups: dict[str, list[str]] = {}
    for name, text in texts:
        groups.setdefault(text, []).append(name)
    if len(groups) == 1 and not named:
        return next(iter(groups))
    return "; ".join(f"{some(names, MOST_NAMES)}: {text}" for text, names in groups.items())


def group_by_host(all_facts: Sequence[RankFacts]) -> dict[str, list[RankFacts]]:
    """Group ranks by host."""
    return {h: [one for one in all_facts if one.host == h] for h in dict.fromkeys(o.host for o in all_facts)}


def first_ranks(all_facts: Sequence[RankFacts]) -> list[RankFacts]:
    """Return the facts of the first rank of each host, under the name of the host."""
    return [
        RankFacts(ranks[0].rank, host, host, ranks[0]) for host, ranks in group_by_host(all_facts).items()
    ]


def merge_rows(all_facts: Sequence[RankFacts], judge: Callable[[RankFacts], Iterable[Row]]) -> list[Row]:
    """Judge each rank by itself, and merge the rows of each item: all findings, the worst status, its fix."""
    found: dict[str, list[tuple[str, Row]]] = {}
    for one in all_facts:
        for row in judge(one):
            found.setdefault(row.item, []).append((one.name, row))
    rows = []
    for named in found.values():
        worst = max((row for _, row in named), key=lambda row: STATUSES.index(row.status))
        texts = ((name, row.finding) for name, row in named)
        rows.append(replace(worst, finding=join_texts(texts, named=len(named) < len(all_facts))))
    return rows


def time_text(seconds: float) -> str:
    """Format a duration in us, ms or s.

    >>> time_text(2e-6), time_text(0.0123), time_text(75.0)
    ('2.0 us', '12.3 ms', '75.0 s')
    """
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.1f} {unit}"
    return f"{seconds:.1f} s"


def rate_text(per_second: float, unit: str = "B") -> str:
    """Format a rate with its prefix and unit.

    >>> rate_text(3.2e9), rate_text(5.1e13, "flop")
    ('3.2 GB/s', '51.0 Tflop/s')
    """
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if per_second >= factor:
            return f"{per_second / factor:.1f} {prefix}{unit}/s"
    return f"{per_second / 1e3:.1f} k{unit}/s"
