"""Low-rank adapters (LoRA): a frozen map x W becomes x W + (alpha / rank) (x A) B; only A and B are trained.

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
"""The names of the two parameters beside a kernel: (..., rank) over what it reads, (rank, ...) over what it
writes."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Which projections have an adapter, and how large it is.

    Args:
      rank: columns of A and rows of B.
      alpha: the product is multiplied by alpha / rank.
      on: the projections, of `TARGETS`.
    """

    rank: int
    alpha: float = 16.0
    on: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        """The factor of the product of A and B."""
        return self.alpha / self.rank


def read_lora(text: str) -> Lora | None:
    """Read an adapter from the text of an option; None if it is empty.

    Raises:
      ValueError: a key or a value is not one.

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
    rank, alpha = given.get("rank", "1"), given.get("alpha", "16")
    on = tuple(given.get("on", "+".join(TARGETS)).split("+"))
    if not (rank.isdecimal() and int(rank) > 0):
        problems.append(f"rank is {rank!r}, and it is a whole number of 1 or more")
    if not _is_positive(alpha):
        problems.append(f"alpha is {alpha!r}, and it is a number above 0")
    problems += [f"no projection {name!r}" for name in on if name not in TARGETS]
    problems += [f"{name} is named {n} times" for name, n in Counter(on).items() if n > 1]
    if problems:
        raise ValueError(
            f"lora is {text!r}: {'; '.join(problems)}; write rank=8, or rank=8,alpha=16,on=q+v with names of"
            f" {', '.join(TARGETS)}"
        )
    return Lora(rank=int(rank), alpha=float(alpha), on=on)


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
