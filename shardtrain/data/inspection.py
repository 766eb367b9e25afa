"""Inspect files of data: sizes, statistics, single samples, and all rows that cannot be read.

Next: `sources/`, `tokenize.py`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardtrain.data.documents import Piece, open_rows, read_texts
from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData, Record
from shardtrain.data.sources.numpy_tokens import ENDS
from shardtrain.data.token_manifest import Manifest
from shardtrain.data.tokenize import checksum
from shardtrain.data.tokens import TokenArray
from shardtrain.system.untrusted_files import open_regular

QUANTILES = (0, 25, 50, 75, 95, 100)
CHUNK_TOKENS = 1 << 24


class FileFacts(NamedTuple):
    """The size of a file, and its numbers of rows and tokens.

    Attributes:
      file: the file.
      num_bytes: its size.
      num_rows: number of rows, or of documents of tokens; None if unknown or not readable.
      num_tokens: number of tokens; None for text.
      problem: why the file cannot be read; "" if it can.
    """

    file: SourceFile
    num_bytes: int
    num_rows: int | None
    num_tokens: int | None
    problem: str = ""


def file_facts(file: SourceFile) -> FileFacts:
    """Return the size of a file, and its numbers of rows and tokens."""
    num_bytes = 0 if file.path.is_dir() else file.path.stat().st_size
    find = FORMATS[file.format].tokens
    try:
        if find is None:
            opened = open_rows(file, None)
            num_rows = len(opened)
            if num_rows and not FORMATS[file.format].whole:
                opened.read(num_rows - 1)  # says that the file is cut off, if it is
            return FileFacts(file, num_bytes, num_rows, None)
        tokens = find(file.path)
        rows = None if tokens.ends is None else len(tokens.ends())
        return FileFacts(file, num_bytes, rows, tokens.num_tokens)
    except BadData as error:
        return FileFacts(file, num_bytes, None, None, error.why)


def find_row(files: Sequence[SourceFile], row: int) -> tuple[SourceFile, int, Record]:
    """Return the row with a number that counts over all files: its file, its number there, its fields.

    Raises:
      ValueError: there are fewer rows.
      BadData: the row cannot be read.
    """
    before = 0
    for file in files:
        rows = open_rows(file, None)
        if row < before + len(rows):
            return file, row - before, rows.read(row - before)
        before += len(rows)
    raise ValueError(f"row is {row}; there are {before:,} rows, use 0 to {before - 1}")


def read_lengths(files: Sequence[SourceFile], field: str) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (lengths of the documents of a file, number of rows that cannot be read), file after file.

    Lengths are int64 (num_documents,), in characters of text, or in tokens; a token file without ends of
    documents counts as one document.
    """
    for file in files:
        find = FORMATS[file.format].tokens
        if find is None:
            found = [
                len(text) if isinstance(text, str) else -1 for _, text in read_texts(Piece(file), field, None)
            ]
            sizes = np.array(found, np.int64)
            yield sizes[sizes >= 0], int((sizes < 0).sum())
            continue
        try:
            tokens = find(file.path)
            ends = np.array([tokens.num_tokens]) if tokens.ends is None else tokens.ends()
            yield np.diff(np.asarray(ends, np.int64), prepend=0), 0
        except BadData:
            yield np.empty(0, np.int64), 1


def find_problems(files: Sequence[SourceFile], field: str, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Read all files, and yield their problems; yield "" after each file."""
    expected = {
        manifest.folder / shard["file"]: (shard, manifest)
        for manifest in manifests
        for shard in manifest.shards
    }
    for file in files:
        find = FORMATS[file.format].tokens
        if find is None:
            for _, text in read_texts(Piece(file), field, None):
                if isinstance(text, BadData):
                    yield f"{text.place}: {text.why}"
        else:
            try:
                yield from _token_problems(find(file.path), expected.get(file.path))
            except BadData as error:
                yield f"{error.place}: {error.why}"
        yield ""


def _token_problems(tokens: TokenArray, expected: tuple[dict, Manifest] | None) -> Iterator[str]:
    if tokens.ends is not None:
        ends = np.asarray(tokens.ends(), np.int64)
        if (np.diff(ends, prepend=0) <= 0).any():
            yield f"{tokens.path}: its documents do not end one after the other"
    if expected is None:
        return
    shard, manifest = expected
    for path, name in ((tokens.path, "checksum"), (tokens.path.with_suffix(ENDS), "ends_checksum")):
        if name in shard and checksum(path) != shard[name]:
            yield f"{path}: it does not have the checksum of its manifest"
    top = find_largest(tokens)
    if top >= manifest.vocab:
        yield f"{tokens.path}: token {top} is not below the vocabulary of {manifest.vocab}"


def find_largest(tokens: TokenArray) -> int:
    """Return the largest token of a file; -1 if it has none."""
    found = -1
    with open_regular(tokens.path) as file:
        file.seek(tokens.offset)
        while len(chunk := np.fromfile(file, tokens.dtype, CHUNK_TOKENS)):
            found = max(found, int(chunk.max()))
    return found
