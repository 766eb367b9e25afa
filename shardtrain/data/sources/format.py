"""What a format of files is: how it is recognised and read; the error for what cannot be read.

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
      row: the number of the row, from 0; None for the whole file.
    """

    def __init__(self, path: Path, why: str, row: int | None = None) -> None:
        self.path, self.why, self.row = path, why, row
        super().__init__(f"{self.place}: {why}; {SKIP_HINT}")

    @property
    def place(self) -> str:
        """The file, and the row if it is one."""
        return f"{self.path}" if self.row is None else f"{self.path}, row {self.row}"

    def __reduce__(self) -> tuple[type["BadData"], tuple[Path, str, int | None]]:
        return BadData, (self.path, self.why, self.row)


class Rows(ABC):
    """The rows of a file, read by several threads at once."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, row: int, /) -> Record:
        """Return a row.

        Raises:
          BadData: it cannot be read.
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
      summary: what it is, for help and tables.
      suffixes: endings of names, in lower case; the longest ending of all formats wins.
      magic: the first bytes of a file, by which it is recognised under any name; empty: none.
      rows: opens a file as rows: (path, folder for an index) -> rows. None for tokens.
      tokens: finds the tokens of a file. None for rows.
      whole: whether a file can only be read from its beginning, and not row by row.
      needs: the module that reads it, if that is not always installed, and the extra with it.

    Raises:
      (of `rows` and `tokens`) BadData: the file is damaged. FileNotFoundError: there is none.
    """

    summary: str
    suffixes: tuple[str, ...]
    magic: bytes = b""
    rows: Callable[[Path, Path | None], Rows] | None = None
    tokens: Callable[[Path], TokenArray] | None = None
    whole: bool = False
    needs: tuple[str, str] | None = None
