"""Train models with bidirectional attention to predict masked tokens.

The masked tokens depend only on the sample and the seed: they are the same in each epoch and any layout.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardtrain.data.text import Text
from shardtrain.data.windows import Tokens, Windows
from shardtrain.errors.field_types import too_small, wrong_types
from shardtrain.errors.messages import refuse

MASKED, REPLACED = 0.8, 0.1
"""Fractions of the chosen tokens that become the mask token, or a random token; the others are kept."""


@dataclass(frozen=True, kw_only=True)
class MaskedWindows:
    """A random-access source: the windows of another one, with some tokens masked.

    Args:
      windows: the samples, each with "tokens" (seq + 1,); the last token is not used.
      options: how tokens are chosen and replaced.
    """

    windows: Windows
    options: "MaskedTokens"

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`.

        Returns:
          {"tokens": int32 (seq,), "targets": int32 (seq,), "chosen": int8 (seq,)}
        """
        options = self.options
        targets = self.windows[index]["tokens"][:-1]
        # the choice depends only on seed and sample: it is the same in every epoch, and after a restart
        random = np.random.default_rng((options.seed, index))
        choice, replacement = random.random((2, len(targets)))
        chosen = (choice < options.rate) & ~np.isin(targets, options.never)
        others = random.integers(0, self.windows.vocab, len(targets), dtype=np.int32)
        # most chosen tokens become the mask, some a random token, and some are kept
        tokens = np.where(
            replacement < MASKED,
            options.mask_token,
            np.where(replacement < MASKED + REPLACED, others, targets),
        )
        return {
            "tokens": np.where(chosen, tokens, targets).astype(np.int32),
            "targets": targets,
            "chosen": chosen.astype(np.int8),
        }

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the windows, and the options of masking."""
        options = self.options
        return (
            f"{self.windows.fingerprint} {options.mask_token} {options.rate} {options.never} {options.seed}"
        )


@dataclass(frozen=True, kw_only=True)
class MaskedTokens:
    """Train on the prediction of masked tokens, with `loss=masked_token_loss`.

    Args:
      data: the source of the tokens: `Text` or `Tokens`.
      mask_token: the token that replaces masked tokens, in the vocabulary of `data`. UTF-8 text has no byte
        255.
      rate: fraction of the tokens that are predicted; 80 % of them are masked, 10 % are replaced by random
        tokens, and 10 % are kept.
      never: tokens that are never chosen, such as separators.
      seed: the seed of the random choice.

    Raises:
      ValueError: lists every value of a wrong type, or every number that is out of range.

    References:
      Devlin et al. 2018, BERT, https://arxiv.org/abs/1810.04805, section 3.1.
    """

    data: Text | Tokens
    mask_token: int
    rate: float = 0.15
    never: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        refuse("these tokens cannot be masked", wrong_types(self))
        problems = []
        if not 0 <= self.mask_token < self.data.vocab:
            problems.append(f"mask_token is {self.mask_token}; use 0 to {self.data.vocab - 1}")
        if not 0 < self.rate < 1:
            problems.append(f"rate is {self.rate}; use a number above 0 and below 1, such as 0.15")
        refuse("these tokens cannot be masked", problems + too_small(self, seed=0))

    def train(self, folder: Path) -> MaskedWindows:
        """Return the windows to train on; `folder` is as for `data`."""
        return MaskedWindows(windows=self.data.train(folder), options=self)

    def heldout(self, folder: Path) -> MaskedWindows | None:
        """Return the held-out windows; None if nothing is held out."""
        windows = self.data.heldout(folder)
        return None if windows is None else MaskedWindows(windows=windows, options=self)

    def summary(self, folder: Path) -> str:
        """Return the summary of `data`, and the fraction of its tokens that are predicted."""
        of_data = getattr(self.data, "summary", None)
        lines = [of_data(folder)] if of_data else []
        return "; ".join([*lines, f"{self.rate:.0%} of its tokens are predicted"])
