"""Assign ranks to islands: ranks in order fill the islands. Values only, no jax, no MPI."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_data import parse_count

PROCESSES = "SHARDTRAIN_ISLAND_PROCESSES"
"""The variable with the number of processes of each island: `1`, or one number an island, `1,3`."""


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """The island of a rank, and the index of its process there.

    Args:
      island: index of the island, from 0.
      num_islands: number of islands.
      process: index of the process within the island, from 0.
      num_processes: number of processes of this island.
    """

    island: int
    num_islands: int
    process: int
    num_processes: int

    @property
    def name(self) -> str:
        """The name of the rank in messages: `1`, or `1.0` if the island has several processes."""
        return f"{self.island}.{self.process}" if self.num_processes > 1 else str(self.island)


def parse_processes(text: str) -> int | tuple[int, ...]:
    """Parse the number of processes per island: one for all islands, or one each.

    Raises:
      ValueError: something in it is not a number from 1.

    >>> parse_processes("2"), parse_processes("1,3")
    (2, (1, 3))
    """
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not parse_count(word)]:
        raise ValueError(
            f"processes per island {short(text)}: {', '.join(map(short, wrong))} is no number from 1;"
            " write one for all islands, 2, or one each, 1,3"
        )
    numbers = [int(word) for word in words]
    return tuple(numbers) if len(numbers) > 1 else numbers[0]


def find_placement(rank: int, size: int, processes: Sequence[int] | int = 1) -> RankPlacement:
    """Return the island and process of a rank: ranks in order fill the islands.

    Args:
      rank: 0 to size - 1.
      size: number of ranks.
      processes: number of processes of each island: one for all, or one each.

    Raises:
      ValueError: the ranks do not fill the islands exactly; the message computes what would.

    >>> find_placement(2, 4, [1, 3])
    RankPlacement(island=1, num_islands=2, process=1, num_processes=3)
    """
    assert 0 <= rank < size, (rank, size)
    if problem := placement_problem(size, processes):
        raise ValueError(problem)
    each = [processes] * (size // processes) if isinstance(processes, int) else list(processes)
    first = 0
    for island, number in enumerate(each):
        if rank < first + number:
            return RankPlacement(
                island=island, num_islands=len(each), process=rank - first, num_processes=number
            )
        first += number
    raise AssertionError("the ranks fill the islands")


def pick_number(option: str, numbers: Sequence[str], island: int, num_islands: int) -> str:
    """Return the number of an island, from an option that has one for each.

    Raises:
      ValueError: it has another number of them.
    """
    if len(numbers) != num_islands:
        raise ValueError(
            f"{option} {','.join(numbers)} is for {len(numbers)} islands, and there are {num_islands}; give"
            f" {num_islands} numbers, or one for all"
        )
    return numbers[island]


def placement_problem(size: int, processes: Sequence[int] | int) -> str | None:
    """Return why this number of ranks cannot fill the islands; None if it does.

    >>> placement_problem(6, 4)
    '6 ranks cannot fill islands of 4 processes: 6 % 4 = 2. Start 4 or 8 ranks, or give islands 6, 3, 2 or 1'
    >>> placement_problem(5, [1, 3])
    'islands of 1,3 processes need 4 ranks, and there are 5. Start 4 ranks, or give the last 4: 1,4'
    """
    numbers = [processes] if isinstance(processes, int) else list(processes)
    if not numbers or min(numbers) < 1:
        return f"islands of {processes} processes: each needs 1 or more; write one number, or one each: 1,3"
    if isinstance(processes, int):
        if size % processes == 0:
            return None
        lower = size // processes * processes
        starts = " or ".join(str(n) for n in (lower, lower + processes) if n)
        divisors = [str(n) for n in range(size, 0, -1) if size % n == 0]
        return (
            f"{size} ranks cannot fill islands of {processes} processes: {size} % {processes} ="
            f" {size % processes}. Start {starts} ranks, or give islands {_format_any(divisors)}"
        )
    if sum(numbers) == size:
        return None
    text, last = ",".join(map(str, numbers)), size - sum(numbers[:-1])
    fix = f", or give the last {last}: {','.join(map(str, [*numbers[:-1], last]))}" if last > 0 else ""
    return (
        f"islands of {text} processes need {sum(numbers)} ranks, and there are {size}."
        f" Start {sum(numbers)} ranks{fix}"
    )


def _format_any(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
