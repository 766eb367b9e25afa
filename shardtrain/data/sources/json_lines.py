"""Read JSON lines, with an object in each line; plain, or compressed by gzip or zstd.

Compressed files are only read from their beginning. pyarrow reads zstd (`columns.py`).
"""

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from shardtrain.data.sources.columns import open_zstd
from shardtrain.data.sources.format import BadData, Format, Record, Rows
from shardtrain.data.sources.row_offsets import IndexedRows, read_part
from shardtrain.data.sources.unread_files import explain_content
from shardtrain.system.plain_text import decode_text, encoding_problem, is_blank
from shardtrain.system.untrusted_data import parse_record, read_lines
from shardtrain.system.untrusted_files import open_regular

BLOCK_BYTES, FEW_BYTES = 1 << 24, 1 << 10


def find_line_offsets(path: Path) -> np.ndarray:
    """Return the (start, stop) of each line that is not blank, int (n, 2), in bytes.

    Raises:
      BadData: a byte order mark says that it is not UTF-8.
    """
    found, heads, position, unfinished = [np.empty(0, np.int64)], [np.zeros(1, np.uint8)], 0, False
    with open_regular(path) as file:
        while block := file.read(BLOCK_BYTES):
            if not position and (problem := encoding_problem(block) or explain_content(block)):
                raise BadData(path, problem)
            content = np.frombuffer(block, np.uint8)
            ends = np.flatnonzero(content == ord("\n"))
            found.append(ends + position)
            # the first byte of the line after each end; after the last end of a block, the end itself
            heads.append(content.take(ends + 1, mode="clip"))
            position += len(block)
            unfinished = not block.endswith(b"\n")
        stops = np.concatenate([*found, [position] if unfinished else np.empty(0, np.int64)]).astype(np.int64)
        starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
        filled = stops > starts
        # blank lines begin with white space or a byte order mark, not with a printable byte of ASCII
        odd = np.concatenate(heads)[: len(stops)]
        for line in np.flatnonzero(filled & ((odd <= ord(" ")) | (odd > ord("~")))):
            filled[line] = not _is_blank(file, int(starts[line]), int(stops[line]))
    return np.stack([starts, stops], 1)[filled]


def _is_blank(file: BinaryIO, start: int, stop: int) -> bool:
    """Return whether a part of a file is blank; most parts that are not differ in their first bytes."""
    few = os.pread(file.fileno(), min(stop - start, FEW_BYTES), start)
    return is_blank(few) and (
        stop - start <= FEW_BYTES or is_blank(os.pread(file.fileno(), stop - start, start))
    )


def parse_line(line: bytes, path: Path, row: int) -> Record:
    """Return the object in a line.

    Raises:
      BadData: it is not UTF-8, or not a JSON object.
    """
    try:
        text = decode_text(line)
    except ValueError as error:
        raise BadData(path, str(error).replace("it is", "the line is"), row) from None
    try:
        record = parse_record(text)
    except ValueError as error:
        raise BadData(path, f"the line is no JSON ({error})", row) from None
    if not isinstance(record, dict):
        raise BadData(path, f"the line is a JSON {type(record).__name__}, not an object", row)
    return record


class JsonLines(IndexedRows):
    """The lines of a file, located by an index of their offsets; a blank line is no row."""

    find = staticmethod(find_line_offsets)

    def read(self, row: int) -> Record:
        start, stop = map(int, self._offsets[row])
        return parse_line(read_part(self.path, start, stop - start, row), self.path, row)


class CompressedLines(Rows):
    """The lines of a compressed file, which is only read from its beginning."""

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO]) -> None:
        self._path, self._open = path, open_file
        path.stat()

    def __len__(self) -> int:
        return sum(1 for _ in self.iterate(0, None))

    def read(self, row: int) -> Record:
        for _, record in self.iterate(row, row + 1):
            if isinstance(record, BadData):
                raise record
            return record
        raise IndexError(row)

    def iterate(self, start: int, stop: int | None) -> Iterator[tuple[int, Record | BadData]]:
        for row, line in enumerate(islice(self._lines(), stop)):
            if isinstance(line, BadData):
                yield row, line
            elif row >= start:
                try:
                    yield row, parse_line(line, self._path, row)
                except BadData as error:
                    yield row, error

    def _lines(self) -> Iterator[bytes | BadData]:
        row = 0
        if not self._path.stat().st_size:
            # an empty file that was compressed has some bytes
            yield BadData(self._path, "it has 0 bytes: it was cut off before its beginning")
            return
        try:
            with self._open(self._path) as file:
                for line in read_lines(file):
                    if not row and (problem := encoding_problem(line) or explain_content(line)):
                        yield BadData(self._path, f"what it compresses cannot be read: {problem}")
                        return
                    if not is_blank(line):
                        row += 1
                        yield line.removesuffix(b"\n")
        except (OSError, EOFError, ValueError, zlib.error) as error:
            if isinstance(error, FileNotFoundError):
                raise
            yield BadData(self._path, f"it cannot be decompressed from here on ({error})", row)


FORMAT = Format(
    summary="JSON lines, an object in each", suffixes=(".jsonl", ".ndjson", ".json"), rows=JsonLines
)
GZIP = Format(
    summary="JSON lines in gzip",
    suffixes=(".jsonl.gz", ".ndjson.gz", ".json.gz"),
    magic=b"\x1f\x8b",
    rows=lambda path, folder: CompressedLines(path, gzip.GzipFile),  # type: ignore[arg-type]
    whole=True,
)
ZSTD = Format(
    summary="JSON lines in zstd",
    suffixes=(".jsonl.zst", ".ndjson.zst", ".json.zst"),
    magic=b"\x28\xb5\x2f\xfd",
    rows=lambda path, folder: CompressedLines(path, open_zstd),
    whole=True,
    needs=("pyarrow", "arrow"),
)
