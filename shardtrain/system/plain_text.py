"""Decode plain text in UTF-8, as lines or as a table, without byte order marks and blank lines.

Next: `untrusted_files.py`, which reads the bytes.
"""

import codecs
import csv
import io
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

MARK = "\ufeff"
"""The byte order mark, which some editors and exports write at the start of a text."""

UNSUPPORTED = {
    codecs.BOM_UTF32_LE: "UTF-32",  # it starts with the mark of UTF-16
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order mark -> its encoding, which is not supported."""


def decode_text(content: bytes) -> str:
    r"""Decode UTF-8, without the byte order mark at its beginning.

    Raises:
      ValueError: it is not UTF-8; the message names the encoding of another mark.

    >>> decode_text(b"\xef\xbb\xbfa"), decode_text(b"\xc3\x9f")
    ('a', 'ß')
    """
    if problem := encoding_problem(content):
        raise ValueError(problem)
    try:
        return content.decode().lstrip(MARK)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at its byte {error.start:,}") from None


def encoding_problem(head: bytes) -> str:
    r"""Return why a text with these first bytes is not supported, if a mark names its encoding; else "".

    >>> encoding_problem(b"\xff\xfea\0")
    'it is in UTF-16, as its first bytes ff fe say, and UTF-8 is read; convert it: iconv -f UTF-16 -t UTF-8'
    """
    mark = next((mark for mark in UNSUPPORTED if head.startswith(mark)), None)
    if mark is None:
        return ""
    name = UNSUPPORTED[mark]
    said = f"as its first bytes {mark.hex(' ')} say"
    return f"it is in {name}, {said}, and UTF-8 is read; convert it: iconv -f {name} -t UTF-8"


def is_blank(line: str | bytes) -> bool:
    r"""Return whether a line is empty or white space, apart from a byte order mark.

    >>> is_blank(b" \r"), is_blank("\ufeff\t"), is_blank(b"\xc2\xa0"), is_blank(b"a")
    (True, True, True, False)
    """
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    return not text.strip().strip(MARK).strip()


def text_lines(text: str) -> list[tuple[int, str]]:
    r"""Return (number from 1, line without its end) of the lines that are not blank, each without a mark.

    Only \n, \r\n and \r end a line: other characters, such as U+2028, may be within a JSON text.

    >>> text_lines("\ufeffa\r\n \t\r\nb\u2028c\n\n")
    [(1, 'a'), (3, 'b\u2028c')]
    """
    lines = enumerate(re.split("\r\n|\r|\n", text), 1)
    return [(number, line.lstrip(MARK)) for number, line in lines if not is_blank(line)]


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Read the lines of a file, which may also be a pipe; see `text_lines`.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not UTF-8.
    """
    try:
        return text_lines(decode_text(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_csv(text: str, **options: Any) -> tuple[list[str], list[tuple[int, dict[Any, Any]]]]:
    r"""Read a table whose first row names the columns, without blank rows.

    Args:
      text: the content of the file.
      options: options of `csv.reader`.

    Returns:
      The names, and (number of its last line, name -> cell) of each row; a missing cell is None, and cells
      without a column have the name None.

    Raises:
      csv.Error: it is no table.

    >>> read_csv("a,b\r\n \r\n1,2\r\n,\r\n")
    (['a', 'b'], [(3, {'a': '1', 'b': '2'})])
    """
    reader = csv.reader(io.StringIO(text.lstrip(MARK), newline=""), **options)
    found = [(reader.line_num, cells) for cells in reader if not all(map(is_blank, cells))]
    names = found[0][1] if found else []
    return names, [(number, dict(zip_longest(names, cells))) for number, cells in found[1:]]
