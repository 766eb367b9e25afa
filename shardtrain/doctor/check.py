"""A check: `look` collects facts on every rank, `judge` makes rows of the facts of all. Values only."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from shardtrain.islands.rank_environment import RankEnvironment

Verdict = Literal["ok", "note", "warning", "wrong"]

VERDICTS: tuple[Verdict, ...] = ("ok", "note", "warning", "wrong")
"""From best to worst: a note is good to know, a warning costs time, what is wrong stops a run."""

Facts = dict[str, Any]
"""What JSON can hold."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    Args:
      check: its name.
      what: which of the things that it looks at.
      found: in words, with the ranks or hosts where they differ.
      verdict: see `VERDICTS`.
      do: what to do about it; of a warning and of what is wrong never empty.
    """

    check: str
    what: str
    found: str
    verdict: Verdict = "ok"
    do: str = ""

    def __post_init__(self) -> None:
        assert self.do or self.verdict in ("ok", "note"), self


class ControlChannel(Protocol):
    """Named messages between all ranks, as `islands.bridge.Control` has them."""

    names: list[str]

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, name: str, value: Any = None, timeout_seconds: float | None = None) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """The rank on which a check collects facts.

    Args:
      environment: what the launcher said.
      hosts: rank -> host, of the ranks that can talk to each other.
      control: to talk to them; a check has one of its own, which a check that hangs cannot disturb.
      comm: of all ranks, as mpi4py has it; None where this process is alone.
      environ: the environment.
      run_dir: the folder that runs shall be in.
      quick: nothing is measured.
      given_cores: what the launcher left this rank to run on, before it shared cores out itself.
      problem: why ranks that were launched cannot talk to each other; None where they can.
      seats_problem: why they do not make up islands; None where they do.
    """

    environment: RankEnvironment
    hosts: tuple[str, ...]
    control: ControlChannel
    comm: Any
    environ: Mapping[str, str]
    run_dir: Path
    quick: bool
    given_cores: tuple[int, ...]
    problem: str | None = None
    seats_problem: str | None = None

    @property
    def rank(self) -> int:
        """The rank among those that can exchange messages."""
        return self.control.rank

    @property
    def is_first_on_host(self) -> bool:
        """Whether this rank collects what all ranks of its host have in common."""
        return self.hosts.index(self.hosts[self.rank]) == self.rank

    @property
    def first_ranks(self) -> dict[str, int]:
        """Host -> its first rank."""
        return {host: self.hosts.index(host) for host in dict.fromkeys(self.hosts)}


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The facts that a check collected on one rank.

    Args:
      rank: which.
      name: how people call it.
      host: where it is.
      facts: what its `look` returned.
    """

    rank: int
    name: str
    host: str
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check.

    Args:
      about: what it looks at, for the help.
      look: on every rank, all at the same time.
      judge: the facts of those ranks whose look went well, one or more of them.
      limit_seconds: after which a look is given up.
      if_it_hangs: what to do when a look did not end in time.
      measures: it is left out by --quick.
    """

    about: str
    look: Callable[[RankContext], Facts]
    judge: Callable[[Sequence[RankFacts]], list[Row]]
    limit_seconds: float
    if_it_hangs: str
    measures: bool = False


def each(texts: Iterable[tuple[str, str]]) -> str:
    """Join texts with the names they belong to; only once if all are equal.

    Args:
      texts: (name, text).

    >>> each([("a", "1 core"), ("b", "1 core")]), each([("a", "x"), ("b", "y"), ("c", "x")])
    ('1 core', 'a, c: x; b: y')
    """
    groups: dict[str, list[str]] = {}
    for name, text in texts:
        groups.setdefault(text, []).append(name)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{some(names)}: {text}" for text, names in groups.items())


def some(names: Sequence[str], most: int = 4) -> str:
    """Join names; only the first few if there are many.

    >>> some("abc"), some("abcdefg")
    ('a, b, c', 'a, b, c and 4 more')
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"


def by_host(told: Sequence[RankFacts]) -> dict[str, list[RankFacts]]:
    """Group ranks by host."""
    hosts: dict[str, list[RankFacts]] = {}
    for one in told:
        hosts.setdefault(one.host, []).append(one)
    return hosts


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of several verdicts.

    >>> worst(["ok", "warning", "note"])
    'warning'
    """
    found = set(verdicts)
    ordered: list[Verdict] = [verdict for verdict in VERDICTS if verdict in found]
    return ordered[-1] if ordered else "ok"


def count_text(number: int, thing: str) -> str:
    """
    >>> count_text(1, "core"), count_text(2, "core")
    ('1 core', '2 cores')
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def time_text(seconds: float) -> str:
    """
    >>> time_text(2e-6), time_text(0.0123), time_text(75.0)
    ('2.0 us', '12.3 ms', '75.0 s')
    """
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.1f} {unit}"
    return f"{seconds:.1f} s"


def rate_text(per_second: float, unit: str = "B") -> str:
    """
    >>> rate_text(3.2e9), rate_text(5.1e13, "flop")
    ('3.2 GB/s', '51.0 Tflop/s')
    """
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if per_second >= factor:
            return f"{per_second / factor:.1f} {prefix}{unit}/s"
    return f"{per_second / 1e3:.1f} k{unit}/s"
