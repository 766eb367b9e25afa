"""Map the parts of a model to the stages and chunks that hold them. No jax.

A part is a contiguous group of blocks; parts are numbered in the order in which a microbatch passes them.
Tables, partitions and programs all use this mapping.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from shardtrain.errors.messages import near


def _loop(num_stages: int, num_chunks: int) -> list[int]:
    return [*range(num_stages)] * num_chunks


def _v(num_stages: int, num_chunks: int) -> list[int]:
    return [*range(num_stages), *reversed(range(num_stages))][: num_stages * num_chunks]


PLACEMENTS: dict[str, Callable[[int, int], list[int]]] = {"loop": _loop, "v": _v}
"""Name -> function (num_stages, num_chunks) -> the stage of each part.

loop: round-robin, from the last stage to the first one again. v: down the stages and back up, so that a stage
has the parts i and 2 S - 1 - i, and the first stage has the first and the last part of the model.
"""

MOST_CHUNKS = {"v": 2}
"""The largest number of chunks per stage of the placements that have a limit."""


@dataclass(frozen=True, kw_only=True)
class PartPlacement:
    """The stage and chunk of each part of a model.

    Args:
      num_stages: S, 1 or more.
      num_chunks: V, parts on each stage, 1 or more.
      name: a name of `PLACEMENTS`.

    Raises:
      ValueError: there is no such placement, or it does not support so many chunks.

    >>> PartPlacement(num_stages=3, num_chunks=2).stages
    (0, 1, 2, 0, 1, 2)
    >>> PartPlacement(num_stages=3, num_chunks=2, name="v").stages
    (0, 1, 2, 2, 1, 0)
    """

    num_stages: int
    num_chunks: int = 1
    name: str = "loop"

    def __post_init__(self) -> None:
        if problem := find_placement_problem(self.name, self.num_chunks):
            raise ValueError(problem)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stage of each part."""
        return tuple(PLACEMENTS[self.name](self.num_stages, self.num_chunks))

    @cached_property
    def _parts(self) -> tuple[tuple[int, ...], ...]:
        of_stage: list[list[int]] = [[] for _ in range(self.num_stages)]
        for part, stage in enumerate(self.stages):
            of_stage[stage].append(part)
        return tuple(map(tuple, of_stage))

    @property
    def num_parts(self) -> int:
        """The number of parts, S * V."""
        return len(self.stages)

    @property
    def last_stage(self) -> int:
        """The stage of the last part, which computes the loss."""
        return self.stages[-1]

    def stage(self, part: int) -> int:
        """Return the stage of a part."""
        return self.stages[part]

    def chunk(self, part: int) -> int:
        """Return the chunk of a part: its number among the parts of its stage."""
        return self._parts[self.stages[part]].index(part)

    def part(self, stage: int, chunk: int) -> int:
        """Return the part that is this chunk of a stage."""
        return self._parts[stage][chunk]

    def parts(self, stage: int) -> tuple[int, ...]:
        """Return the parts of a stage, by chunk."""
        return self._parts[stage]

    def hop(self, part: int) -> int:
        """Return the number of stages, modulo S, from a part to the next one; 0 on the same stage.

        >>> [PartPlacement(num_stages=3, num_chunks=2, name="v").hop(part) for part in range(5)]
        [1, 1, 0, 2, 2]
        """
        return (self.stages[part + 1] - self.stages[part]) % self.num_stages

    @cached_property
    def hops(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Distance in stages (see `hop`) -> the pairs (from stage, to stage) with that distance.

        >>> PartPlacement(num_stages=3, num_chunks=2, name="v").hops
        {0: ((2, 2),), 1: ((0, 1), (1, 2)), 2: ((1, 0), (2, 1))}
        """
        found: dict[int, set[tuple[int, int]]] = {}
        for part, ends in enumerate(zip(self.stages, self.stages[1:], strict=False)):
            found.setdefault(self.hop(part), set()).add(ends)
        return {hop: tuple(sorted(found[hop])) for hop in sorted(found)}


def find_placement_problem(name: str, num_chunks: int) -> str:
    """Return why there is no placement of this name with so many chunks; "" if there is one."""
    if name not in PLACEMENTS:
        return f"placement {near(name, PLACEMENTS)}"
    if num_chunks > (most := MOST_CHUNKS.get(name, num_chunks)):
        return (
            f"placement {name!r} has at most {most} chunks per stage, and {num_chunks} were asked for; use"
            f" {most}, or the placement 'loop'"
        )
    return ""


def list_placements(num_stages: int, num_chunks: int) -> list[PartPlacement]:
    """Return all placements with these numbers of stages and chunks.

    >>> [placement.name for placement in list_placements(3, 2)]
    ['loop', 'v']
    """
    names = [name for name in PLACEMENTS if num_chunks <= MOST_CHUNKS.get(name, num_chunks)]
    return [PartPlacement(num_stages=num_stages, num_chunks=num_chunks, name=name) for name in names]
