"""Low-rank adapters (LoRA): a frozen map x W becomes x W + (alpha / rank) (x A) B, and A and B are trained.

`layers.py` has the parameters, `huggingface/adapters.py` writes them to files.

References:
  Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models, https://arxiv.org/abs/2106.09685,
  section 4.1.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

from shardtrain.errors.field_types import too_small
from shardtrain.errors.options import CompactOptions

Target = Literal["q", "k", "v", "o", "up", "gate", "down"]
TARGETS: tuple[Target, ...] = get_args(Target)
"""The projections of a block that can have an adapter."""

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the two parameters of an adapter next to a kernel: A (in, rank) and B (rank, out)."""


@dataclass(frozen=True, kw_only=True)
class Lora(CompactOptions):
    """The size of low-rank adapters, and the projections that have them.

    Args:
      rank: number of columns of A and rows of B.
      alpha: the product is multiplied by alpha / rank.
      on: names of projections, from `TARGETS`.

    >>> Lora.parse("rank=8,on=q+v")
    Lora(rank=8, alpha=16.0, on=('q', 'v'))
    """

    rank: int
    alpha: float = 16.0
    on: tuple[Target, ...] = TARGETS

    def list_problems(self) -> list[str]:
        """List the values that are out of range, and repeated projections."""
        found = too_small(self, rank=1)
        if not self.on:
            found.append("on is empty; name projections, such as on=('q', 'v'), or use lora=None")
        if self.alpha <= 0:
            found.append(f"alpha is {self.alpha}; use a number above 0")
        return found + [f"{name} is named {n} times" for name, n in Counter(self.on).items() if n > 1]

    @property
    def scale(self) -> float:
        """The factor of the product of A and B."""
        return self.alpha / self.rank
