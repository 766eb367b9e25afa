"""Windows with some tokens hidden, for models that read from both sides: what they were are the targets.

Which are hidden depends on the sample and the seed alone, so it is the same in each epoch and on any layout.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardtrain.data.text import Text
from shardtrain.data.windows import Tokens, Windows
from shardtrain.errors.messages import problems_error

HIDDEN, REPLACED = 0.8, 0.1
"""Of the chosen tokens: the share behind the mask token, and that of random ones; the rest stays."""


@dataclass(frozen=True, kw_only=True)
class MaskedWindows:
    """A random-access source: windows of another, some of their tokens hidden.

    Args:
      windows: the samples, each with "tokens" (seq + 1,), of which the last is not used.
      options: how tokens are chosen, and what stands in their place.
    """

    windows: Windows
    options: "MaskedTokens"

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`.

        Returns:
          {"tokens": int32 (seq,), "targets": int32 (seq,), "chosen": int8 (seq,)}
        """
        options = self.options
        targets = self.windows[index]["tokens"][:-1]
        random = np.random.default_rng((options.seed, index))
        where, what = random.random((2, len(targets)))
        chosen = (where < options.rate) & ~np.isin(targets, options.never)
        others = random.integers(0, self.windows.vocab, len(targets), dtype=np.int32)
        tokens = np.where(
            what < HIDDEN, options.mask_token, np.where(what < HIDDEN + REPLACED, others, targets)
        )
        return {
            "tokens": np.where(chosen, tokens, targets).astype(np.int32),
            "targets": targets,
            "chosen": chosen.astype(np.int8),
        }

    @property
    def fingerprint(self) -> str:
        """That of the windows, and how they are masked."""
        options = self.options
        return (
            f"{self.windows.fingerprint} {options.mask_token} {options.rate} {options.never} {options.seed}"
        )


@dataclass(frozen=True, kw_only=True)
class MaskedTokens:
    """The data of a run that trains by masked tokens, with `loss=masked_token_loss`.

    Args:
      data: where the tokens come from: `Text` or `Tokens`.
      mask_token: stands for a hidden one; below the vocabulary of `data`. No byte of UTF-8 text is 255.
      rate: the share of tokens that count; of those 80 % are hidden, 10 % are replaced by random ones, and
        10 % stay.
      never: tokens that are not chosen, such as separators.
      seed: of the choice.

    Raises:
      ValueError: lists every number that is out of range.

    References:
      Devlin et al. 2018, BERT, https://arxiv.org/abs/1810.04805, section 3.1.
    """

    data: Text | Tokens
    mask_token: int
    rate: float = 0.15
    never: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.mask_token < self.data.vocab:
            problems.append(f"mask_token is {self.mask_token}; use 0 to {self.data.vocab - 1}")
        if not 0 < self.rate < 1:
            problems.append(f"rate is {self.rate}; use a share above 0 and below 1, such as 0.15")
        if self.seed < 0:
            problems.append(f"seed is {self.seed}; use 0 or more")
        if problems:
            raise problems_error("these tokens cannot be masked", problems)

    def train(self, folder: Path) -> MaskedWindows:
        """The windows to train on.

        Args:
          folder: of the run, as for `data`.
        """
        return MaskedWindows(windows=self.data.train(folder), options=self)

    def heldout(self, folder: Path) -> MaskedWindows | None:
        """The windows held out, in the same way; None where nothing is held out."""
        windows = self.data.heldout(folder)
        return None if windows is None else MaskedWindows(windows=windows, options=self)

    def summary(self, folder: Path) -> str:
        """What `data` tells about itself, and how much of it counts."""
        of_data = getattr(self.data, "summary", None)
        lines = [of_data(folder)] if of_data else []
        return "; ".join([*lines, f"{self.rate:.0%} of its tokens are to be found"])
