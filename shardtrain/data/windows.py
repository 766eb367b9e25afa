"""Cut token files into windows of equal length; the last windows are held out of training.

Sample i is tokens[i*seq : i*seq + seq + 1]. Next: `batches.py`, which loads windows in a random order.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from shardtrain.data.samples import SplitData, find_split_problems
from shardtrain.data.tokens import TokenShards, check_tokens, token_file
from shardtrain.errors.messages import refuse

FINGERPRINT_BLOCKS = 1024
FINGERPRINT_BLOCK_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Windows:
    """A random-access source: tokens `start` to `stop` of files, cut into windows.

    Neighbouring windows share one token: the last target of one is the first input of the next. A document
      that
    the end of a window cuts is continued in the next window, with `separate` as a document of its own.

    Args:
      path: the token file, or the folder or pattern of the files, for messages.
      shards: the tokens.
      seq: number of tokens that a model reads in one window; a sample has one more, the last target.
      vocab: size of the vocabulary; every token must be below it.
      start: the first token.
      stop: one past the last token.
      num_skipped: number of documents that were left out of the tokens; None means that none may be left out.
      separate: whether samples number the documents of a window, so that documents do not see each other.
    """

    path: Path
    shards: TokenShards = field(compare=False)
    seq: int
    vocab: int
    start: int
    stop: int
    num_skipped: int | None = None
    separate: bool = False

    def __len__(self) -> int:
        return max(0, self.stop - self.start - 1) // self.seq

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`.

        Returns:
          {"tokens": int32 (seq + 1,)}; with `separate` also "segments": int32 (seq,), the number of the
          document of each input in this window, from 0; and "weights": float32 (seq,), 0 where the target is
          the first token of the next document.

        Raises:
          IndexError: no such sample.
          ValueError: a token is negative, or not below `vocab`.
        """
        return {name: rows[0] for name, rows in self.stacked_samples([index]).items()}

    def stacked_samples(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return several samples, stacked; see `Source`.

        Returns:
          As `__getitem__`, each array with a first dim of len(indices).

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
        sample = {"tokens": tokens.astype(np.int32)}
        if self.separate:
            starts, weights = np.zeros(tokens.shape, np.int32), np.ones((len(begins), self.seq), np.float32)
            for row, begin in enumerate(begins):
                # a document ends before these inputs; the target before is the first token of the next one
                ends = self.shards.ends_in(begin + 1, begin + self.seq + 1) - begin
                starts[row, ends], weights[row, ends - 1] = 1, 0
            sample |= {"segments": np.cumsum(starts[:, :-1], 1, dtype=np.int32), "weights": weights}
        return sample

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
        return found.hexdigest()[:16] + " separate" * self.separate


def split_tokens(path: Path, seq: int, heldout_fraction: float, vocab: int) -> tuple[Windows, Windows | None]:
    """Split a token file into training windows and, at its end, held-out windows.

    No token is in both. Tokens at the end of each part that fill no window are not used.

    Args:
      path: the token file.
      seq: tokens per window.
      heldout_fraction: fraction of the windows that is held out, from 0 to 1; above 0 at least one window is.
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
    """Split windows into training windows and, at the end, held-out windows; see `split_tokens`.

    Raises:
      ValueError: there are too few tokens.
    """
    seq, num_tokens = windows.seq, windows.stop
    # both parts need a window at least, with its last target
    windows_needed = 2 if heldout_fraction > 0 else 1
    if num_tokens < windows_needed * (seq + 1):
        raise ValueError(describe_too_short(windows.path, num_tokens, seq, windows_needed))
    # round to whole windows: one at least is held out, and one is left to train on
    num_heldout = 0
    if heldout_fraction > 0:
        max_heldout = (num_tokens - (seq + 1) - 1) // seq
        num_heldout = min(max_heldout, max(1, round(heldout_fraction * ((num_tokens - 1) // seq))))
    # the held-out windows end with the file; the two parts share no token
    border = num_tokens - (num_heldout * seq + 1) if num_heldout else num_tokens
    train, heldout = replace(windows, stop=border), replace(windows, start=border)
    return train, heldout if num_heldout else None


def describe_too_short(path: Path, num_tokens: int, seq: int, windows_needed: int) -> str:
    """Return the error message for a file with too few tokens.

    >>> describe_too_short(Path("a.npy"), 100, 64, 2)
    'a.npy has 100 tokens; 2 windows of seq 64 need 2 * (64 + 1) = 130. Give more, or use seq 49 or less.'
    """
    longest = num_tokens // windows_needed - 1
    windows = f"{windows_needed} windows" if windows_needed > 1 else "1 window"
    change = f"Give more, or use seq {longest} or less." if longest > 0 else "Give more."
    needed = f"{windows_needed} * ({seq} + 1) = {windows_needed * (seq + 1)}"
    return f"{path} has {num_tokens} tokens; {windows} of seq {seq} need {needed}. {change}"


@dataclass(frozen=True, kw_only=True)
class Tokens(SplitData[Windows]):
    """Train on a token file of your own, made by any tokenizer; see `write_tokens`.

    Args:
      path: a one-dimensional .npy file of integers.
      vocab: size of the vocabulary; every token is below it.
      seq: tokens per window.
      heldout_fraction: fraction of the tokens, at the end of the file, that is held out of training.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    path: Path
    vocab: int
    seq: int = 256
    heldout_fraction: float = 0.05

    def __post_init__(self) -> None:
        problems = find_split_problems(self)
        if isinstance(self.vocab, int) and not 1 <= self.vocab <= 2**31:
            problems.append(f"vocab is {self.vocab}; use 1 to 2**31")
        refuse("these tokens cannot be used", problems)

    def split(self, folder: Path) -> tuple[Windows, Windows | None]:
        """Return the windows to train on and the held-out windows; nothing is written into `folder`.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is not a token file, or too short.
        """
        return split_tokens(self.path, self.seq, self.heldout_fraction, self.vocab)
