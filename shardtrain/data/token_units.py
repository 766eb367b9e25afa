"""Units of work of tokenizing: rows of files that become one shard, whatever processes do it.

A unit that was written is not written again. Next: `tokenize.py`.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardtrain.data.documents import OnError, Piece, encode_rows, open_rows, texts
from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData
from shardtrain.data.sources.numpy_tokens import ENDS
from shardtrain.data.token_manifest import MOST_TOKENS, TOTALS, shard_problem
from shardtrain.data.tokenizer import Tokenizer
from shardtrain.data.tokens import write_tokens
from shardtrain.system.atomic_write import new_file, replace_file
from shardtrain.system.untrusted_files import of_kind, open_regular, read_json, whole_number

INDEX = ".index"
"""Folder, in that of the shards, of where the rows of files begin; hidden, so that no pattern matches it."""

BLOCK_BYTES = 1 << 20
OWNER_ONLY = 0o600
MOST_LISTED = 20
"""Errors that the record of a unit lists; all are counted."""


class Unit(NamedTuple):
    """What becomes the shard of a number.

    Attributes:
      number: from 0.
      pieces: rows of files, in order.
    """

    number: int
    pieces: list[Piece]

    @property
    def name(self) -> str:
        """The name of the shard, without an ending."""
        return f"shard-{self.number:05}"


def make_units(files: Sequence[SourceFile], unit_bytes: int, folder: Path, on_error: OnError) -> list[Unit]:
    """Cut files into units of about as many bytes; small files share one, large ones are cut at rows.

    Raises:
      BadData: a file that has to be cut is damaged, and `on_error` is "stop".
    """
    units: list[Unit] = []
    pieces: list[Piece] = []
    filled = 0
    for file in files:
        for piece, size in _pieces(file, unit_bytes, folder, on_error):
            if pieces and filled + size > unit_bytes:
                units.append(Unit(len(units), pieces))
                pieces, filled = [], 0
            pieces.append(piece)
            filled += size
    return [*units, Unit(len(units), pieces)] if pieces else units


def _pieces(
    file: SourceFile, unit_bytes: int, folder: Path, on_error: OnError
) -> Iterator[tuple[Piece, int]]:
    """Yield the pieces of a file, and the bytes of each."""
    whole = Piece(file)
    num_bytes = file.path.stat().st_size
    if num_bytes <= 1.5 * unit_bytes or FORMATS[file.format].whole:
        yield whole, num_bytes
        return
    try:
        num_rows = len(open_rows(file, folder / INDEX))
    except BadData:
        if on_error == "stop":
            raise
        yield whole, num_bytes  # the unit reports it
        return
    rows = max(1, num_rows * unit_bytes // num_bytes)
    for start in range(0, num_rows, rows):
        stop = min(start + rows, num_rows)
        yield whole._replace(start=start, stop=stop), num_bytes * (stop - start) // num_rows


def write_unit(unit: Unit, out: Path, tokenizer: Tokenizer, field: str, on_error: OnError) -> dict[str, Any]:
    """Write the shard of a unit: its tokens, the ends of its documents, and last its record.

    Args:
      unit: what to read.
      out: the folder of the shards.
      tokenizer: makes the tokens.
      field: the field with the text.
      on_error: "stop" raises an error; "skip" leaves the row out and counts it.

    Returns:
      The record.

    Raises:
      BadData: a row cannot be read, and `on_error` is "stop".
    """
    rows = (
        (piece.file.path, row, text)
        for piece in unit.pieces
        for row, text in texts(piece, field, out / INDEX)
    )
    skipped: list[str] = []
    num_skipped, last = 0, (Path(), "")
    ends: list[int] = []
    total = 0

    def documents() -> Iterator[np.ndarray]:
        nonlocal total, num_skipped, last
        for tokens in encode_rows(rows, len, tokenizer.encode):
            if isinstance(tokens, BadData):
                if on_error == "stop":
                    raise tokens
                num_skipped += 1
                # a group of rows that is damaged has one error for all
                if (tokens.path, tokens.why) != last and len(skipped) < MOST_LISTED:
                    extent = " (the whole file is left out)" if tokens.row is None else ""
                    skipped.append(f"{tokens.place}: {tokens.why}{extent}")
                last = tokens.path, tokens.why
            elif len(tokens):
                total += len(tokens) + 1
                ends.append(total)
                yield tokens

    path = out / f"{unit.name}.npy"
    dtype = next(name for name in ("uint8", "uint16", "uint32") if tokenizer.vocab <= np.iinfo(name).max + 1)
    write_tokens(path, documents(), dtype=dtype, separator=tokenizer.separator)
    with new_file(path.with_suffix(ENDS)) as file:
        file.write(np.array(ends, "<u8").tobytes())
    record = {
        "file": path.name,
        "num_tokens": total,
        "num_documents": len(ends),
        "num_skipped": num_skipped,
        "skipped": skipped,
        "checksum": checksum(path),
        "ends_checksum": checksum(path.with_suffix(ENDS)),
    }
    replace_file(record_path(out, unit), json.dumps(record).encode())
    return record


def is_written(out: Path, unit: Unit) -> bool:
    """Return whether the shard of a unit is there, with the ends of its documents and its record."""
    try:
        return not shard_problem(out / f"{unit.name}.npy", read_record(out, unit))
    except (OSError, ValueError):
        return False


def read_record(out: Path, unit: Unit) -> dict[str, Any]:
    """Read the record of a unit, which may have come with a run folder.

    Raises:
      OSError, ValueError: there is none, or it is damaged.
    """
    record = of_kind(read_json(record_path(out, unit)), dict, "a record")
    for name in (*TOTALS, "checksum", "ends_checksum"):
        whole_number(record.get(name), name, MOST_TOKENS)
    skipped = of_kind(record.get("skipped"), list, "skipped")
    return {**record, "file": f"{unit.name}.npy", "skipped": list(map(str, skipped))}


def record_path(out: Path, unit: Unit) -> Path:
    """Return the file that says that a unit is written."""
    return out / f"{unit.name}.json"


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    found = 0
    with open_regular(path) as file:
        while block := file.read(BLOCK_BYTES):
            found = zlib.crc32(block, found)
    return found
