"""Train an encoder-decoder on pairs of rows from two token files, of sources and of targets.

All rows of a file have one length and end in padding. Next: `batches.py`; `tokens.py` writes the files.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from shardtrain.data.samples import SplitData, find_split_problems
from shardtrain.data.tokens import TokenShards, check_tokens, token_file
from shardtrain.data.windows import FINGERPRINT_BLOCKS
from shardtrain.errors.field_types import too_small
from shardtrain.errors.messages import refuse


@dataclass(frozen=True, kw_only=True)
class PairRows:
    """A random-access source: rows `start` to `stop` of the two files.

    Args:
      pairs: the files and the lengths of their rows.
      start: the first row.
      stop: one past the last row.
    """

    pairs: "TokenPairs"
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`.

        Returns:
          {"source": int32 (source_seq,), "source_mask": int32, shaped the same, 0 for padding,
          "target": int32 (target_seq + 1,), the padding token first, "weights": float32 (target_seq,), 0 for
          padding}

        Raises:
          IndexError: no such sample.
          ValueError: a token is negative, or not below `vocab`.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source, target = (self._read(*file, self.start + index) for file in self.files)
        return {
            "source": source,
            "source_mask": _find_real(source, self.pairs.padding).astype(np.int32),
            "target": np.r_[self.pairs.padding, target].astype(np.int32),
            "weights": _find_real(target, self.pairs.padding).astype(np.float32),
        }

    def _read(self, shards: TokenShards, length: int, row: int) -> np.ndarray:
        tokens = shards.read(row * length, (row + 1) * length)
        check_tokens(tokens, self.pairs.vocab, lambda at: shards.place(row * length + at))
        return tokens.astype(np.int32)

    @cached_property
    def files(self) -> tuple[tuple[TokenShards, int], ...]:
        """(tokens, length of a row) of the sources, and of the targets."""
        pairs = self.pairs
        return (
            (token_file(pairs.source), pairs.source_seq),
            (token_file(pairs.target), pairs.target_seq),
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the sizes and of evenly spaced rows, which identifies the source."""
        found = hashlib.sha256(f"{self.start} {self.stop} {self.pairs.padding}".encode())
        for row in range(self.start, self.stop, max(1, len(self) // FINGERPRINT_BLOCKS)):
            for shards, length in self.files:
                found.update(f"{length} ".encode() + self._read(shards, length, row).tobytes())
        return found.hexdigest()[:16]


def _find_real(tokens: np.ndarray, padding: int) -> np.ndarray:
    """Return which positions come before the padding at the end.

    >>> _find_real(np.array([5, 0, 6, 0, 0]), 0).tolist()
    [True, True, True, False, False]
    """
    return np.cumsum((tokens != padding)[::-1])[::-1] > 0


@dataclass(frozen=True, kw_only=True)
class TokenPairs(SplitData[PairRows]):
    """Train an encoder-decoder on two token files; row i of one belongs to row i of the other.

    `write_tokens` writes such files, with rows as its documents. A shorter text is followed by padding,
    usually after the token that ends a text. The decoder's first input is the padding token.

    Args:
      source: a one-dimensional .npy file of integers, which the encoder reads.
      target: a one-dimensional .npy file of integers, which the decoder learns to write.
      vocab: size of the vocabulary; every token is below it.
      source_seq: tokens of a row of `source`.
      target_seq: tokens of a row of `target`.
      padding: the token that pads rows.
      heldout_fraction: fraction of the rows, at the end, that is held out of training.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    source: Path
    target: Path
    vocab: int
    source_seq: int = 512
    target_seq: int = 128
    padding: int = 0
    heldout_fraction: float = 0.05

    def __post_init__(self) -> None:
        problems = find_split_problems(self)
        problems = problems or too_small(self, vocab=1, source_seq=1, target_seq=1)
        if not problems and not 0 <= self.padding < self.vocab:
            problems.append(f"padding is {self.padding}; use 0 to {self.vocab - 1}, a token below vocab")
        refuse("these pairs cannot be used", problems)

    def split(self, folder: Path) -> tuple[PairRows, PairRows | None]:
        """Return the rows to train on and the held-out rows; nothing is written into `folder`.

        Raises:
          FileNotFoundError: a file is not there.
          ValueError: one is not a token file, or their numbers of rows differ.
        """
        whole = self._rows()
        if not self.heldout_fraction:
            return whole, None
        border = len(whole) - max(1, round(self.heldout_fraction * len(whole)))
        return replace(whole, stop=border), replace(whole, start=border)

    def _rows(self) -> PairRows:
        sizes = {"source": self.source_seq, "target": self.target_seq}
        counts = {name: token_file(getattr(self, name)).num_tokens for name in sizes}
        problems = [
            f"{name} has {counts[name]} tokens, and {counts[name]} % {name}_seq {size} ="
            f" {counts[name] % size}; fill its rows up to {size}"
            for name, size in sizes.items()
            if counts[name] % size
        ]
        num_rows = {name: counts[name] // size for name, size in sizes.items()}
        if not problems and num_rows["source"] != num_rows["target"]:
            problems.append(
                f"source has {num_rows['source']} rows and target {num_rows['target']};"
                " write as many into both"
            )
        least = 2 if self.heldout_fraction else 1
        if not problems and num_rows["source"] < least:
            problems.append(f"there are {num_rows['source']} rows; give {least} or more")
        refuse("these pairs cannot be used", problems)
        return PairRows(pairs=self, start=0, stop=num_rows["source"])
