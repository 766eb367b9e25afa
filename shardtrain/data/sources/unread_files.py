"""Explain files that cannot be read: recognise what they are, and say how to convert them.

Next: `find.py`, which recognises the files that can be read.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shardtrain.data.sources.columns import open_zstd
from shardtrain.system.untrusted_files import open_regular

HEAD_BYTES = 512
TAR_MARK, TAR_PLACE = b"ustar", 257
WRITE_ROWS = "write its rows as JSON lines or Parquet"


class Kind(NamedTuple):
    """A kind of files that cannot be read.

    Attributes:
      what: a description that follows "it is".
      change: how to convert the file; after a colon a command, to which the name of the file is appended.
      open_file: opens compressed files; None for other kinds.
    """

    what: str
    change: str
    open_file: Callable[[Path], Any] | None = None


GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
BY_CONTENT = {
    GZIP: Kind("compressed by gzip", "decompress it: gunzip -k", gzip.GzipFile),
    ZSTD: Kind("compressed by zstd", "decompress it: zstd -d", open_zstd),
    b"BZh": Kind("compressed by bzip2", "decompress it: bunzip2 -k", bz2.BZ2File),
    b"\xfd7zXZ\0": Kind("compressed by xz", "decompress it: unxz -k", lzma.LZMAFile),
    b"\x04\x22\x4d\x18": Kind("compressed by lz4", "decompress it: lz4 -d"),
    b"PK\x03\x04": Kind("a zip archive", "unpack it: unzip"),
    b"7z\xbc\xaf\x27\x1c": Kind("a 7-Zip archive", "unpack it: 7z x"),
    b"Rar!": Kind("a RAR archive", "unpack it: unrar x"),
    b"PAR1": Kind("a Parquet file", "give it the ending .parquet"),
    b"ARROW1": Kind("an Arrow file", "give it the ending .arrow"),
    b"\x93NUMPY": Kind("an array of numpy", "give it the ending .npy"),
    b"%PDF": Kind("a PDF document", "extract its text: pdftotext"),
    b"SQLite format 3\0": Kind("an SQLite database", WRITE_ROWS),
    b"\x89HDF": Kind("an HDF5 file", WRITE_ROWS),
    b"Obj\x01": Kind("an Avro file", WRITE_ROWS),
    **{b"\x80" + bytes([i]): Kind("a pickle of Python, which may run code", WRITE_ROWS) for i in range(2, 6)},
}
"""First bytes -> kind."""

TAR = Kind("a tar file", "give it the ending .tar")
BY_ENDING = {
    ".orc": Kind("an ORC file", WRITE_ROWS),
    **dict.fromkeys((".csv", ".tsv"), Kind("a table as text", WRITE_ROWS)),
    **dict.fromkeys(
        (".html", ".htm", ".xml"), Kind("a page with markup", "extract its text, as a .txt file")
    ),
}
"""Suffix -> kind, for files that cannot be recognised by their first bytes."""


def explain_content(head: bytes) -> str:
    r"""Describe a file by its first bytes, and say how to convert it; return "" if it is not recognised.

    >>> explain_content(b"PK\x03\x04"), explain_content(b"a text")
    ('it is a zip archive; unpack it: unzip FILE', '')
    """
    kind = _recognise_kind(head)
    return "" if kind is None else f"it is {kind.what}; {_change(kind, 'FILE')}"


def explain_file(path: Path) -> str:
    """Describe a file by content or name, and say how to convert it; return "" if it is not recognised."""
    kind = _recognise_kind(_head(open_regular, path)) or BY_ENDING.get(path.suffix.lower())
    if kind is None:
        return ""
    inside = _recognise_kind(read_compressed_head(path))
    what = kind.what if inside is None else f"{inside.what} {kind.what}, and read uncompressed alone"
    return f"it is {what}; {_change(kind, path)}"


def read_compressed_head(path: Path) -> bytes:
    """Return the first decompressed bytes of a file; b"" if it is not compressed, or damaged."""
    kind = _recognise_kind(_head(open_regular, path))
    return b"" if kind is None or kind.open_file is None else _head(kind.open_file, path)


def _head(open_file: Callable[[Path], Any], path: Path) -> bytes:
    try:
        with open_file(path) as file:
            return file.read(HEAD_BYTES)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ImportError):
        return b""


def _recognise_kind(head: bytes) -> Kind | None:
    if head[TAR_PLACE:].startswith(TAR_MARK):
        return TAR
    return next((kind for mark, kind in BY_CONTENT.items() if head.startswith(mark)), None)


def _change(kind: Kind, path: Path | str) -> str:
    return f"{kind.change} {path}" if ": " in kind.change else kind.change
