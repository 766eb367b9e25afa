"""Make each document a sample of its own length, for batches of documents of similar length.

`token_batches.py` makes the batches. Next: `windows.py`, where documents share windows instead.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np

from shardtrain.data.tokens import TokenShards
from shardtrain.data.windows import Windows

BLOCK_TOKENS = 1 << 28
"""Number of tokens whose document ends are in memory at the same time."""


@dataclass(frozen=True, kw_only=True)
class DocumentPieces:
    """A random-access source of documents; longer documents are cut into pieces.

    Args:
      windows: the tokens; `windows.seq` is the largest number of inputs of a piece.
      starts: the first token of each piece, int64 (n,).
      lengths: number of inputs of each piece, int32 (n,): one less than its tokens.
    """

    windows: Windows
    starts: np.ndarray
    lengths: np.ndarray

    bucketed = True
    """The size of batches of these samples is counted in tokens."""

    @classmethod
    def of(cls, windows: Windows) -> Self:
        """Return the pieces of all documents.

        Raises:
          ValueError: no document has two tokens.
        """
        found = list(_find_pieces(windows.shards, windows.seq))
        starts, lengths = (np.concatenate([each[i] for each in found]) for i in (0, 1))
        if not len(starts):
            raise ValueError(f"{windows.path} has no document of two tokens or more; give some with text")
        return cls(windows=windows, starts=starts, lengths=lengths)

    def split(self, heldout_fraction: float) -> tuple[Self, Self | None]:
        """Split into pieces to train on and, at the end, whole documents that are held out.

        Args:
          heldout_fraction: approximate fraction of the tokens that is held out; above 0 at least one
            document.

        Raises:
          ValueError: there is only one document.
        """
        if heldout_fraction == 0:
            return self, None
        # pieces of one document overlap by a token, and those of another one never touch
        begins = np.flatnonzero(np.diff(self.starts) != self.lengths[:-1]) + 1
        if not len(begins):
            raise ValueError(
                f"{self.windows.path} has one document, and whole documents are held out; give more, or use"
                " --data.heldout-fraction 0"
            )
        before = np.cumsum(self.lengths)[begins - 1] / self.lengths.sum()
        border = int(begins[np.argmin(abs(before - (1 - heldout_fraction)))])
        train, heldout = (
            replace(self, starts=self.starts[part], lengths=self.lengths[part])
            for part in (slice(border), slice(border, None))
        )
        return train, heldout

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`.

        Returns:
          {"tokens": int32 (lengths[index] + 1,)}

        Raises:
          IndexError: no such sample.
          ValueError: a token is negative, or not below the size of the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start, length = int(self.starts[index]), int(self.lengths[index])
        return replace(self.windows, seq=length, start=start, stop=start + length + 1)[0]

    @property
    def num_skipped(self) -> int | None:
        """Number of documents that were left out of the tokens, see `Windows`."""
        return self.windows.num_skipped

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens and of where the pieces begin and end."""
        found = hashlib.sha256(f"{self.windows.fingerprint} bucketed".encode())
        found.update(self.starts.astype("<i8").data)
        found.update(self.lengths.astype("<i4").data)
        return found.hexdigest()[:16]


def _find_pieces(shards: TokenShards, seq: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (starts, lengths) of pieces of at most `seq` inputs, for `BLOCK_TOKENS` tokens at a time."""
    first = 0
    num_tokens = shards.num_tokens
    for start, stop in pairwise([*range(0, num_tokens, BLOCK_TOKENS), num_tokens]):
        ends = shards.ends_in(start + 1, stop + 1)
        begins = np.concatenate([[first], ends[:-1]])[: len(ends)]
        first = int(ends[-1]) if len(ends) else first
        inputs = ends - begins - 1
        counts = -(-inputs // seq)
        # the number of each piece in its document
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(begins, counts) + number * seq
        yield starts, np.minimum(np.repeat(inputs, counts) - number * seq, seq).astype(np.int32)
