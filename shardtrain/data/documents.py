"""Read the rows of files as documents or conversations, and yield errors for rows that cannot be read.

Next: `tokenize.py` and `chat_tokens.py`, which tokenize them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData, Record, Rows
from shardtrain.errors.messages import near, problems_error
from shardtrain.system.excerpts import some
from shardtrain.system.plain_text import decode_text

OnError = Literal["stop", "skip"]
"""What happens to data that cannot be read."""

BATCH_CHARACTERS = 1 << 20
"""Number of characters that a tokenizer gets at a time."""

Value = TypeVar("Value")
Encoded = TypeVar("Encoded")


class Piece(NamedTuple):
    """Rows of a file, from `start` up to `stop`; None means to the end of the file."""

    file: SourceFile
    start: int = 0
    stop: int | None = None


def open_rows(file: SourceFile, folder: Path | None) -> Rows:
    """Open a file as rows.

    Args:
      file: the file and its format.
      folder: the folder for the index of rows; None writes no index.

    Raises:
      BadData: the file is damaged.
      FileNotFoundError: the file is gone.
      ValueError: the file has tokens, not rows.
    """
    make = FORMATS[file.format].rows
    if make is None:
        raise ValueError(f"{file.path} has tokens; give it where tokens are read, not text")
    return make(file.path, folder)


def refuse_mixed(files: Sequence[SourceFile]) -> bool:
    """Return whether files have tokens; refuse a mixture of tokens and text.

    Raises:
      ValueError: some files have tokens and others text.
    """
    tokens = [file.path for file in files if FORMATS[file.format].tokens is not None]
    others = [file.path for file in files if FORMATS[file.format].tokens is None]
    if tokens and others:
        raise problems_error(
            "tokens and text cannot be mixed; make tokens of the text first, by shardtrain data tokenize",
            [f"tokens: {some(tokens, 3)}", f"text: {some(others, 3)}"],
        )
    return bool(tokens)


def read_rows(
    piece: Piece, parse: Callable[[Record], Value], folder: Path | None
) -> Iterator[tuple[int, Value | BadData]]:
    """Yield (row, value or error) for the rows of a piece; a file that cannot be opened is one error.

    Args:
      piece: the rows.
      parse: record -> value; raises ValueError if the record has none.
      folder: the folder for the index of rows; None writes no index.

    Raises:
      FileNotFoundError: the file is gone.
    """
    path = piece.file.path
    try:
        for row, record in open_rows(piece.file, folder).iterate(piece.start, piece.stop):
            try:
                value = record if isinstance(record, BadData) else parse(record)
            except BadData as error:
                value = error
            except ValueError as error:
                value = BadData(path, str(error), row)
            yield row, value
    except BadData as error:
        yield piece.start, error


def read_texts(piece: Piece, field: str, folder: Path | None) -> Iterator[tuple[int, str | BadData]]:
    """Yield (row, text or error) for the rows of a piece, with the text in `field`; see `read_rows`."""
    return read_rows(piece, lambda record: read_text_field(record, field), folder)


def read_text_field(record: Record, field: str) -> str:
    """Return the text in a field of a record.

    Raises:
      ValueError: it is missing, no text, or not UTF-8.
    """
    value = record.get(field)
    try:
        if isinstance(value, bytes):
            return decode_text(value)
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError as error:
        raise ValueError(f"field {field} is no valid Unicode at character {error.start:,}") from None
    except ValueError as error:
        raise ValueError(f"field {field}: {error}") from None
    if field not in record:
        raise ValueError(f"it has no field {near(field, record)}; name that of the text: --data.text")
    raise ValueError(f"field {field} is {type(value).__name__}, not text")


def encode_rows(
    rows: Iterable[tuple[Path, int, Value | BadData]],
    size: Callable[[Value], int],
    encode: Callable[[list[Value]], Sequence[Encoded]],
) -> Iterator[Encoded | BadData]:
    """Encode rows in batches of about `BATCH_CHARACTERS`; yield each encoded value or error, in order.

    Args:
      rows: (file, number of the row, value or error).
      size: value -> its number of characters.
      encode: values -> encoded values; raises ValueError if one of them cannot be encoded.
    """
    batch: list[tuple[Path, int, Value | BadData]] = []
    filled = 0
    for path, row, value in rows:
        batch.append((path, row, value))
        filled += 0 if isinstance(value, BadData) else size(value)
        if filled >= BATCH_CHARACTERS:
            yield from _encode_batch(batch, encode)
            batch, filled = [], 0
    yield from _encode_batch(batch, encode)


def _encode_batch(
    batch: Sequence[tuple[Path, int, Value | BadData]], encode: Callable[[list[Value]], Sequence[Encoded]]
) -> Iterator[Encoded | BadData]:
    try:
        encoded = iter(encode([value for *_, value in batch if not isinstance(value, BadData)]))
    except ValueError:
        encoded = None  # one at a time, to find the one that cannot be encoded
    for path, row, value in batch:
        if isinstance(value, BadData):
            yield value
            continue
        try:
            found = next(encoded) if encoded is not None else encode([value])[0]
        except ValueError as error:
            found = BadData(path, str(error), row)
        yield found


def sample_texts(
    files: Sequence[SourceFile], field: str, num_bytes: int, on_error: OnError = "stop"
) -> Iterator[str]:
    """Yield the first documents of each file, about as many bytes of each, to train a tokenizer on.

    Args:
      files: files of formats with rows.
      field: name of the field that has the text.
      num_bytes: approximate number of bytes of all documents; if a file is too short, later files give more.
      on_error: "stop" raises the error of a row; "skip" leaves the row out.

    Raises:
      BadData: a row cannot be read.
    """
    left = num_bytes
    for number, file in enumerate(files):
        quota = left // (len(files) - number)
        for _, text in read_texts(Piece(file), field, None):
            if quota <= 0:
                break
            if isinstance(text, BadData):
                if on_error == "stop":
                    raise text
                continue
            yield text
            size = len(text.encode())
            quota, left = quota - size, left - size
