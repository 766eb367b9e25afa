"""Definition of a format of data files, and the error for data that cannot be read.

Next: `__init__.py`, the registry of formats.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.data.tokens import TokenArray

Record = Mapping[str, Any]
"""One row of a file: field -> text, bytes, number, array, or None."""

SKIP_HINT = "repair it, or leave out what cannot be read: --data.on-error skip"


class BadData(ValueError):
    """A file, or one of its rows, cannot be read.

    Attributes:
      path: the file.
      why: the reason.
      row: the number of the row, from 0; None means the whole file.
    """

    def __init__(self, path: Path, why: str, row: int | None = None) -> None:
        self.path, self.why, self.row = path, why, row
        super().__init__(f"{self.place}: {why}; {SKIP_HINT}")

    @property
    def place(self) -> str:
        """The file, and the row if the error is about a row."""
        return f"{self.path}" if self.row is None else f"{self.path}, row {self.row}"

    def __reduce__(self) -> tuple[type["BadData"], tuple[Path, str, int | None]]:
        return BadData, (self.path, self.why, self.row)


class Rows(ABC):
    """The rows of a file, which several threads may read at once."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, row: int, /) -> Record:
        """Return a row.

        Raises:
          BadData: the row cannot be read.
        """

    def iterate(self, start: int, stop: int | None, /) -> Iterator[tuple[int, Record | BadData]]:
        """Yield (number, row or its error) from row `start` on, up to `stop` or the end."""
        for row in range(start, len(self) if stop is None else stop):
            try:
                yield row, self.read(row)
            except BadData as error:
                yield row, error


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of files.

    Args:
      summary: a short description, for help and tables.
      suffixes: suffixes of file names, in lower case; the longest matching suffix of all formats wins.
      magic: the first bytes of a file, which identify it under any name; empty if there are none.
      rows: opens a file as rows: (path, folder for an index) -> rows. None for tokens.
      tokens: finds the tokens of a file. None for rows.
      whole: whether a file can only be read from its beginning, and not row by row.
      needs: the module that reads it, if it is optional, and the extra that installs it.

    `rows` and `tokens` raise BadData for a damaged file, and FileNotFoundError.
    """

    summary: str
    suffixes: tuple[str, ...]
    magic: bytes = b""
    rows: Callable[[Path, Path | None], Rows] | None = None
    tokens: Callable[[Path], TokenArray] | None = None
    whole: bool = False
    needs: tuple[str, str] | None = None
