"""Low-rank adapters (LoRA): a frozen map x W becomes x W + (alpha / rank) (x A) B, and A and B are trained.

`layers.py` has the parameters, `huggingface/adapters.py` writes them to files.

References:
  Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models, https://arxiv.org/abs/2106.09685,
  section 4.1.
"""

from collections import Counter
from dataclasses import dataclass, fields

from shardtrain.models import checks

TARGETS = ("q", "k", "v", "o", "up", "gate", "down")
"""The projections of a block that can have an adapter."""

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the two parameters of an adapter next to a kernel: A (in, rank) and B (rank, out)."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The size of low-rank adapters, and the projections that have them.

    Args:
      rank: number of columns of A and rows of B.
      alpha: the product is multiplied by alpha / rank.
      on: names of projections, from `TARGETS`.
    """

    rank: int
    alpha: float = 16.0
    on: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        """The factor of the product of A and B."""
        return self.alpha / self.rank


def read_lora(text: str) -> Lora | None:
    """Read the text of the option `lora`; return None if it is empty.

    Raises:
      ValueError: lists every unknown key and wrong value.

    >>> read_lora("rank=8,on=q+v")
    Lora(rank=8, alpha=16.0, on=('q', 'v'))
    >>> read_lora("") is None
    True
    >>> read_lora("alpha=8,to=q")
    Traceback (most recent call last):
    ValueError: lora is 'alpha=8,to=q': rank is missing; no key 'to'; write rank=8, or rank=8,alpha=16,on=q+v\
 with names of q, k, v, o, up, gate, down
    """
    if not text:
        return None
    given, problems = checks.read_pairs(text, [field.name for field in fields(Lora)], ["rank"])
    on = tuple(given.get("on", "+".join(TARGETS)).split("+"))
    rank = checks.read_number("rank", given.get("rank", "1"), problems, least=1)
    alpha = checks.read_number("alpha", given.get("alpha", "16"), problems, above=True)
    problems += [f"no projection {name!r}" for name in on if name not in TARGETS]
    problems += [f"{name} is named {n} times" for name, n in Counter(on).items() if n > 1]
    if problems:
        raise ValueError(
            f"lora is {text!r}: {'; '.join(problems)}; write rank=8, or rank=8,alpha=16,on=q+v with names of"
            f" {', '.join(TARGETS)}"
        )
    return Lora(rank=rank, alpha=alpha, on=on)
