"""The documents of files of rows: the text of each row, one after the other, and what cannot be read.

Next: `tokenize.py`, which makes tokens of them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData, Record, Rows
from shardtrain.errors.messages import near, problems_error
from shardtrain.system.excerpts import some
from shardtrain.system.plain_text import decode_text

OnError = Literal["stop", "skip"]
"""What to do with data that cannot be read."""


class Piece(NamedTuple):
    """Rows of a file: from `start` up to `stop`; None: to its end.

    `state` is its size in bytes and its time of modification in ns when it was found; None: not noted.
    """

    path: str
    format: str
    start: int = 0
    stop: int | None = None
    state: tuple[int, int] | None = None


def open_rows(file: SourceFile, folder: Path | None) -> Rows:
    """Open a file as rows.

    Args:
      file: the file and its format.
      folder: the folder of indices; None writes none.

    Raises:
      BadData: it is damaged.
      FileNotFoundError: it is gone.
      ValueError: it has tokens, and no rows.
    """
    make = FORMATS[file.format].rows
    if make is None:
        raise ValueError(f"{file.path} has tokens; give it where tokens are read, not text")
    return make(file.path, folder)


def refuse_mixed(files: Sequence[SourceFile]) -> bool:
    """Return whether files have tokens, and not text.

    Raises:
      ValueError: some have tokens and others text.
    """
    tokens = [file for file in files if FORMATS[file.format].tokens is not None]
    others = [file for file in files if FORMATS[file.format].tokens is None]
    if tokens and others:
        raise problems_error(
            "tokens and text cannot be mixed; make tokens of the text first, by shardtrain data tokenize",
            [
                f"tokens: {some([f.path for f in tokens], 3)}",
                f"text: {some([f.path for f in others], 3)}",
            ],
        )
    return bool(tokens)


def texts(piece: Piece, field: str, folder: Path | None) -> Iterator[tuple[int, str | BadData]]:
    """Yield (row, text or its error) of the rows of a piece; a file that cannot be opened is one error.

    Args:
      piece: the rows.
      field: the field with the text.
      folder: the folder of indices.

    Raises:
      FileNotFoundError: the file is gone.
    """
    path = Path(piece.path)
    try:
        rows = open_rows(SourceFile(path, piece.format), folder)
        for row, record in rows.iterate(piece.start, piece.stop):
            try:
                yield row, record if isinstance(record, BadData) else text_of(record, field, path, row)
            except BadData as error:
                yield row, error
    except BadData as error:
        yield piece.start, error


def text_of(record: Record, field: str, path: Path, row: int) -> str:
    """Return the text in a field of a record.

    Raises:
      BadData: it is missing, no text, or not UTF-8.
    """
    value = record.get(field)
    if isinstance(value, bytes):
        try:
            value = decode_text(value)
        except ValueError as error:
            raise BadData(path, f"field {field}: {error}", row) from None
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadData(
                path, f"field {field} is no valid Unicode at character {error.start:,}", row
            ) from None
        return value
    if field not in record:
        raise BadData(path, f"it has no field {near(field, record)}; name that of the text: --data.text", row)
    raise BadData(path, f"field {field} is {type(value).__name__}, not text", row)
