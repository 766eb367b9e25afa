"""Read plain text in UTF-8; each file is one document."""

from pathlib import Path

from shardtrain.data.sources.format import BadData, Format, Record, Rows
from shardtrain.data.sources.unread_files import explain_content
from shardtrain.system.plain_text import decode_text
from shardtrain.system.untrusted_files import read_bytes

MOST_BYTES = 1 << 31
"""Largest number of bytes of a document."""


class TextFile(Rows):
    """A text file, as a single row with the field text."""

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self._path = path
        path.stat()

    def __len__(self) -> int:
        return 1

    def read(self, row: int) -> Record:
        if row != 0:
            raise IndexError(row)
        content = b""
        try:
            content = read_bytes(self._path, MOST_BYTES)
            return {"text": decode_text(content)}
        except ValueError as error:
            raise BadData(self._path, explain_content(content) or str(error), 0) from None


FORMAT = Format(
    summary="plain text, a document in each file", suffixes=(".txt", ".text", ".md"), rows=TextFile
)
