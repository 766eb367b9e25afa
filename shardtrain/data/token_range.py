"""Find the first token of the data that is not in the model's vocabulary.

Next: `trainer/sources.py`, which does so before the first step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardtrain.data.bucketed import DocumentPieces
from shardtrain.data.chat import ChatWindows
from shardtrain.data.masked import MaskedWindows
from shardtrain.data.mixture import MixedSource
from shardtrain.data.token_pairs import PairRows
from shardtrain.data.tokens import find_outside
from shardtrain.data.windows import Windows

CHUNK_TOKENS = 1 << 20
MOST_TOKENS = 1 << 28
"""Largest number of tokens that is checked, in less than a second; longer ranges are sampled evenly."""


class TokenRange(NamedTuple):
    """Tokens `start` to `stop` of one or more files.

    Attributes:
      read: (start, stop) -> tokens, integers (stop - start,).
      place: number of a token -> its file and place there, for messages.
      start, stop: the range of tokens that samples contain.
      vocab: size of the vocabulary that the data states; None means unknown.
    """

    read: Callable[[int, int], np.ndarray]
    place: Callable[[int], str]
    start: int
    stop: int
    vocab: int | None

    def first_outside(self, vocab: int) -> tuple[int, str] | None:
        """Return the first token that is negative or not below `vocab`, and its place; None if none is."""
        num_tokens = self.stop - self.start
        step = max(CHUNK_TOKENS, num_tokens // (MOST_TOKENS // CHUNK_TOKENS))
        for begin in range(self.start, self.stop, step):
            chunk = self.read(begin, min(begin + CHUNK_TOKENS, self.stop))
            if (at := find_outside(chunk, vocab)) is not None:
                return int(chunk[at]), self.place(begin + at)
        return None


def token_ranges(source: Any) -> list[TokenRange]:
    """Return the ranges of tokens that the samples of a source contain; [] if they are no tokens."""
    match source:
        case MixedSource():
            return [each for part in source.sources for each in token_ranges(part)]
        case MaskedWindows() | DocumentPieces():
            return token_ranges(source.windows)
        case Windows(shards=shards):
            return [TokenRange(shards.read, shards.place, source.start, source.stop, source.vocab)]
        case PairRows(start=start, stop=stop, pairs=pairs):
            return [
                TokenRange(shards.read, shards.place, start * seq, stop * seq, pairs.vocab)
                for shards, seq in source.files
            ]
        case ChatWindows():
            shards = source.tokens.tokens
            return [TokenRange(source.read, shards.place, 0, shards.num_tokens, None)]
    return []
