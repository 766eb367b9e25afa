"""Windows over tokens: sample i is tokens[i*seq : i*seq + seq + 1]; the last ones are held out.

Next: `batches.py` (their order).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.data.tokens import TokenShards, check_tokens, token_file
from shardtrain.errors.field_types import too_small, wrong_types
from shardtrain.errors.messages import refuse

FINGERPRINT_BLOCKS = 1024
FINGERPRINT_BLOCK_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Windows:
    """A random-access source: tokens `start` to `stop` of files, cut into windows.

    Neighbours share one token: the last target of one is the first input of the next.

    Args:
      path: the token file, or the folder or pattern of the files, for messages.
      shards: the tokens.
      seq: tokens that a model reads in one window; a sample has one more, the last target.
      vocab: size of the vocabulary; every token must be below it.
      start: the first token.
      stop: one past the last token.
      num_skipped: how many documents were left out of the tokens, where that was allowed; None: it was not.
    """

    path: Path
    shards: TokenShards = field(compare=False)
    seq: int
    vocab: int
    start: int
    stop: int
    num_skipped: int | None = None

    def __len__(self) -> int:
        return max(0, self.stop - self.start - 1) // self.seq

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`.

        Returns:
          {"tokens": int32 (seq + 1,)}

        Raises:
          IndexError: no such sample.
          ValueError: a token is negative, or not below `vocab`.
        """
        return {"tokens": self.stacked_samples([index])["tokens"][0]}

    def stacked_samples(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return some samples as rows; see `Source`.

        Returns:
          {"tokens": int32 (len(indices), seq + 1)}

        Raises:
          IndexError, ValueError: as for one.
        """
        num = len(self)
        if missing := [index for index in indices if not 0 <= index < num]:
            raise IndexError(f"sample {missing[0]} of {num}")
        begins = [self.start + index * self.seq for index in indices]
        windows = [self.shards.read(begin, begin + self.seq + 1) for begin in begins]
        tokens = np.concatenate(windows).reshape(len(windows), -1)
        width = self.seq + 1
        check_tokens(tokens, self.vocab, lambda at: self.shards.place(begins[at // width] + at % width))
        return {"tokens": tokens.astype(np.int32)}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the sizes and of blocks of tokens at equal distances, to tell one source from another.

        A saved position refers to the same samples only in a source of the same fingerprint.
        """
        # blocks at equal distances, not all tokens: a source may have terabytes
        num_tokens = self.stop - self.start
        found = hashlib.sha256(f"{self.seq} {num_tokens}".encode())
        step = max(FINGERPRINT_BLOCK_TOKENS, num_tokens // FINGERPRINT_BLOCKS)
        for begin in range(self.start, self.stop, step):
            tokens = self.shards.read(begin, min(begin + FINGERPRINT_BLOCK_TOKENS, self.stop))
            found.update(tokens.astype("<i8").data)
        return found.hexdigest()[:16]


def split_problems(data: Any) -> list[str]:
    """Return what is wrong with the values of data, one line each: types, `seq` and `heldout_fraction`."""
    problems = wrong_types(data) + (too_small(data, seq=1) if hasattr(data, "seq") else [])
    if not 0 <= data.heldout_fraction < 1:
        fraction = f"heldout_fraction is {data.heldout_fraction}"
        problems.append(f"{fraction}; use 0 (nothing held out) or more, below 1")
    return problems


def split_tokens(path: Path, seq: int, heldout_fraction: float, vocab: int) -> tuple[Windows, Windows | None]:
    """Split a token file into training windows and, at its end, held-out windows.

    No token is in both. Tokens at the end of each part that fill no window are not used.

    Args:
      path: the token file.
      seq: tokens per window.
      heldout_fraction: fraction of the windows that is held out, from 0 to 1; above 0 at least one window.
      vocab: size of the vocabulary; every token is below it.

    Returns:
      (training, held-out); None if nothing is held out.

    Raises:
      ValueError: the file has too few tokens.
    """
    shards = token_file(path)
    whole = Windows(path=path, shards=shards, seq=seq, vocab=vocab, start=0, stop=shards.num_tokens)
    return split_windows(whole, heldout_fraction)


def split_windows(windows: Windows, heldout_fraction: float) -> tuple[Windows, Windows | None]:
    """Split windows into those to train on and, at the end, held-out ones; see `split_tokens`.

    Raises:
      ValueError: there are too few tokens.
    """
    seq, num_tokens = windows.seq, windows.stop
    # both parts need a window at least, with its last target
    windows_needed = 2 if heldout_fraction > 0 else 1
    if num_tokens < windows_needed * (seq + 1):
        raise ValueError(too_short(windows.path, num_tokens, seq, windows_needed))
    # round to whole windows: one at least is held out, and one is left to train on
    num_heldout = 0
    if heldout_fraction > 0:
        max_heldout = (num_tokens - (seq + 1) - 1) // seq
        num_heldout = min(max_heldout, max(1, round(heldout_fraction * ((num_tokens - 1) // seq))))
    # the held-out windows end with the file; the two parts share no token
    border = num_tokens - (num_heldout * seq + 1) if num_heldout else num_tokens
    train, heldout = replace(windows, stop=border), replace(windows, start=border)
    return train, heldout if num_heldout else None


def too_short(path: Path, num_tokens: int, seq: int, windows_needed: int) -> str:
    """Return the error message for a file with too few tokens.

    >>> too_short(Path("a.npy"), 100, 64, 2)
    'a.npy has 100 tokens; 2 windows of seq 64 need 2 * (64 + 1) = 130. Give more, or use seq 49 or less.'
    """
    longest = num_tokens // windows_needed - 1
    windows = f"{windows_needed} windows" if windows_needed > 1 else "1 window"
    change = f"Give more, or use seq {longest} or less." if longest > 0 else "Give more."
    needed = f"{windows_needed} * ({seq} + 1) = {windows_needed * (seq + 1)}"
    return f"{path} has {num_tokens} tokens; {windows} of seq {seq} need {needed}. {change}"


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The data of a run: a token file of your own, from any tokenizer; see `write_tokens`.

    Args:
      path: a one-dimensional .npy file of integers.
      vocab: size of the vocabulary; every token is below it.
      seq: tokens per window.
      heldout_fraction: fraction at the end of the file that is held out of training.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    path: Path
    vocab: int
    seq: int = 256
    heldout_fraction: float = 0.05

    def __post_init__(self) -> None:
        problems = split_problems(self)
        if isinstance(self.vocab, int) and not 1 <= self.vocab <= 2**31:
            problems.append(f"vocab is {self.vocab}; use 1 to 2**31")
        refuse("these tokens cannot be used", problems)

    def train(self, folder: Path) -> Windows:
        """Return the windows to train on; nothing is written into `folder`.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is not a token file, or too short.
        """
        return split_tokens(self.path, self.seq, self.heldout_fraction, self.vocab)[0]

    def heldout(self, folder: Path) -> Windows | None:
        """Return the held-out windows; None if nothing is held out."""
        return split_tokens(self.path, self.seq, self.heldout_fraction, self.vocab)[1]
