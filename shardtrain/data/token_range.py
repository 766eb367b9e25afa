"""Which tokens of files samples are made of, and the first one that is beyond a vocabulary.

Next: `trainer/sources.py`, which asks before the first step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardtrain.data.bucketed import DocumentPieces
from shardtrain.data.chat import ChatWindows
from shardtrain.data.masked import MaskedWindows
from shardtrain.data.mixture import MixedSource
from shardtrain.data.packed import PackedWindows
from shardtrain.data.token_pairs import PairRows
from shardtrain.data.tokens import TokenFile
from shardtrain.data.windows import Windows

CHUNK_TOKENS = 1 << 20
MOST_TOKENS = 1 << 28
"""Tokens of a range that are read, in less than a second; of a longer one, chunks at equal distances."""


class TokenRange(NamedTuple):
    """Tokens `start` to `stop` of one or more files.

    Attributes:
      read: (start, stop) -> tokens, integers (stop - start,).
      place: number of a token -> its file and place there, for messages.
      start, stop: those that samples are made of.
      vocab: size of the vocabulary that the data says they have; None: it is not known here.
    """

    read: Callable[[int, int], np.ndarray]
    place: Callable[[int], str]
    start: int
    stop: int
    vocab: int | None

    def first_outside(self, vocab: int) -> tuple[int, str] | None:
        """Return the first token that is negative or not below `vocab`, and its place; None: all are."""
        num_tokens = self.stop - self.start
        step = max(CHUNK_TOKENS, num_tokens // (MOST_TOKENS // CHUNK_TOKENS))
        for begin in range(self.start, self.stop, step):
            chunk = self.read(begin, min(begin + CHUNK_TOKENS, self.stop))
            if chunk.max() >= vocab or chunk.min() < 0:
                where = int(np.flatnonzero((chunk < 0) | (chunk >= vocab))[0])
                return int(chunk[where]), self.place(begin + where)
        return None


def token_ranges(source: Any) -> list[TokenRange]:
    """Return the tokens of files that the samples of a source are made of; [] of samples of another kind."""
    match source:
        case MixedSource():
            return [each for part in source.sources for each in token_ranges(part)]
        case PackedWindows() | MaskedWindows() | DocumentPieces():
            return token_ranges(source.windows)
        case Windows():
            if source.shards is None:
                return [_in_file(source.path, source.start, source.stop, source.vocab)]
            shards = source.shards
            return [TokenRange(shards.read, shards.place, source.start, source.stop, source.vocab)]
        case PairRows():
            pairs = source.pairs
            return [
                _in_file(path, source.start * length, source.stop * length, pairs.vocab)
                for path, length in ((pairs.source, pairs.source_seq), (pairs.target, pairs.target_seq))
            ]
        case ChatWindows():
            tokens = source.tokens.tokens
            return [_in_file(tokens.path, 0, tokens.num_tokens, None)._replace(read=source.read)]
    return []


def _in_file(path: Path, start: int, stop: int, vocab: int | None) -> TokenRange:
    return TokenRange(TokenFile(path).read, lambda token: f"{path}, token {token:,}", start, stop, vocab)
