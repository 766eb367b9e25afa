"""Remat policies by name, and how many blocks have each. No jax.

Next: `remat_policies.py`, what each policy keeps.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, Self, get_args

from shardtrain.errors.field_types import too_small
from shardtrain.errors.messages import near
from shardtrain.errors.options import CompactOptions

Remats = Literal["none", "weights", "dots", "outputs", "full", "offload"]
"""A policy for all blocks."""


@dataclass(frozen=True, kw_only=True)
class RematCounts(CompactOptions):
    """A policy for each block: how many blocks have each, such as `full=6,none=18`.

    The first blocks are those that recompute most: when the backward pass reaches them, what the others kept
    is free again. In a pipeline each part has its proportion of every policy.

    Args:
      full: number of blocks with this policy; those of all policies are in the order of the fields.
      outputs: likewise.
      dots: likewise.
      weights: likewise.
      none: likewise.

    Raises:
      ValueError: a number is below 0, or there are no blocks.

    >>> counts = RematCounts.parse("none=18,full=6")
    >>> str(counts), counts.split(24), counts.split(10)
    ('full=6,none=18', {'full': 6, 'none': 18}, {'full': 3, 'none': 7})
    """

    full: int = 0
    outputs: int = 0
    dots: int = 0
    weights: int = 0
    none: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form; also refuse a single word that is no policy."""
        if "=" not in text:
            known = get_args(Remats)
            raise ValueError(
                f"there is no policy {near(text, known)}; use {', '.join(known)}, or numbers of blocks:"
                " full=6,none=18"
            )
        return super().parse(text)

    @classmethod
    def short(cls, value: Any) -> Self | None:
        """Return the counts of a dict, as in a strategy file; None if the value is no dict."""
        if not isinstance(value, Mapping):
            return None
        return cls.parse(",".join(f"{name}={number}" for name, number in value.items()))

    def list_problems(self) -> list[str]:
        """List numbers that are out of range."""
        return too_small(self, **dict.fromkeys(asdict(self), 0)) or ["no blocks"] * (not self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return sum(asdict(self).values())

    def split(self, num_blocks: int) -> dict[str, int]:
        """Return policy -> number of neighbouring blocks, in the order of these blocks.

        Args:
          num_blocks: number of blocks, all of the model or those of a part of a pipeline.
        """
        # rounded up, so that a part recomputes rather more than less
        ends = [
            -(-num_blocks * end // self.num_blocks) for end in accumulate(asdict(self).values(), initial=0)
        ]
        numbers = [end - start for start, end in pairwise(ends)]
        return {name: number for name, number in zip(asdict(self), numbers, strict=True) if number}


def find_remat_part(remat: str | RematCounts | None, policy: str) -> float:
    """Return the part of the blocks that have a policy.

    >>> find_remat_part("full=6,none=18", "none"), find_remat_part("full", "full")
    (0.75, 1.0)
    """
    if "=" not in (text := str(remat)):
        return float(text == policy)
    counts = RematCounts.parse(text)
    return getattr(counts, policy) / counts.num_blocks
