"""Read untrusted files: regular files of bounded size, and strict JSON. No jax.

Nothing is executed, no link leads out of a folder, and no declared size allocates memory.
SECURITY.md lists the formats. Next: `checkpoints/manifest_entries.py`, `imported.py`.
"""

import json
import math
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shardtrain.system.excerpts import short
from shardtrain.system.json_size import check_values
from shardtrain.system.plain_text import decode_text

MOST_BYTES = 1 << 27
"""Size of the largest file that is read into memory at once."""

MOST_DEPTH = 64
"""Largest nesting depth of JSON; a deeper one could overflow the stack of readers."""

MOST_DIGITS = 309
"""Digits of the largest finite float: integers and floats of JSON have the same range. Python's writers use
int(1e30), of 31 digits, for "no limit"."""

MOST_NAME = 4096

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a FIFO would block, and a device would never end.

    Raises:
      OSError: it is something else, or cannot be opened.
    """
    _check_regular(path, os.stat(path).st_mode)
    # the file may have been replaced since: open without blocking, and check what was opened
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _check_regular(path, os.fstat(file.fileno()).st_mode)
    except OSError:
        file.close()
        raise
    return file


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a regular file.

    Raises:
      OSError: see `open_regular`.
      ValueError: it is larger than `most_bytes`.
    """
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > most_bytes:
            raise ValueError(f"{path} has {num_bytes:,} bytes; at most {most_bytes:,} are read")
        try:
            return file.read(num_bytes)
        except OSError as error:  # without the name of a file
            raise OSError(error.errno, error.strerror, str(path)) from None


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Read a regular file as UTF-8 text, without the byte order mark at its beginning.

    Raises:
      OSError: see `open_regular`.
      ValueError: it is larger than `most_bytes`, or not UTF-8.
    """
    return decode_text(read_bytes(path, most_bytes))


def parse_json(text: str, *, ours: bool = False) -> Any:
    """Parse JSON strictly by its standard, within bounds.

    Args:
      text: the JSON.
      ours: whether to accept extensions of Python's writer: NaN, Infinity, and halves of surrogate pairs (in
        a path that is not UTF-8).

    Raises:
      ValueError: the text is not JSON, nested deeper than `MOST_DEPTH`, has too many values, repeats a key in
        an object, or has a number that no float holds, or half of a surrogate pair.

    >>> parse_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    check_values(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_int,
            parse_float=_float,
            parse_constant=float if ours else _refuse_constant,
        )
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH} levels") from None
    check_depth(value, ours=ours)
    return value


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """Read a JSON file.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: it is not a regular file, too large, or refused by `parse_json`.
    """
    try:
        return parse_json(read_text(path, most_bytes))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no JSON that can be read: {error}") from None


def check_depth(value: Any, *, ours: bool = True) -> None:
    """Check the depth of a value and, unless it is `ours`, that its texts are encodable, without recursion.

    Raises:
      ValueError: the value is nested deeper than `MOST_DEPTH`, or has half of a surrogate pair.
    """
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(f"it is nested deeper than {MOST_DEPTH} levels")
        below: list[Any] = []
        for each in level:
            if isinstance(each, str) and not (ours or each.isascii()):
                each.encode()  # half of a surrogate pair is refused here
            elif isinstance(each, dict):
                below += each.values() if ours else [*each, *each.values()]
            elif isinstance(each, list):
                below += each
        level = below


def name_problem(name: object) -> str:
    """Return why a name in an untrusted file may not be used as a relative path; "" if it may.

    >>> name_problem("arrays/d/0"), name_problem("../a"), name_problem("/dev/zero")
    ('', 'leads out of its folder', 'leads out of its folder')
    """
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
        return f"is no text of 1 to {MOST_NAME:,} characters"
    if not name.isprintable():
        return "has control characters"
    if name.startswith("/") or ".." in name.split("/"):
        return "leads out of its folder"
    return "" if all(part not in ("", ".") for part in name.split("/")) else "is no plain path"


def stat_inside(folder: Path, name: str) -> os.stat_result:
    """Stat a regular file below a folder by an untrusted name; links are not followed.

    Raises:
      FileNotFoundError: the file does not exist.
      OSError: the name leads out of the folder, a part of it is a link, or it is not a regular file.
    """
    if problem := name_problem(name):
        raise OSError(f"the name {name!r} {problem}")
    path = folder
    *parents, _ = parts = name.split("/")
    for i, part in enumerate(parts):
        path = path / part
        found = path.lstat()
        if i < len(parents) and not stat.S_ISDIR(found.st_mode):
            raise OSError(f"{path} is {kind_text(found.st_mode)}, not a folder")
    _check_regular(path, found.st_mode)
    return found


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a file that `stat_inside` accepts.

    Raises:
      OSError: see `stat_inside`.
    """
    stat_inside(folder, name)
    return open_regular(folder / name)


def special_files(folder: Path) -> list[str]:
    """List links (not followed), FIFOs, devices and sockets below a folder, each as `path is a link`."""
    special = (entry for entry in _files(folder) if not entry.is_file(follow_symlinks=False))
    return sorted(
        f"{Path(entry.path).relative_to(folder)} is {kind_text(entry.stat(follow_symlinks=False).st_mode)}"
        for entry in special
    )


def crc32_of(file: BinaryIO) -> int:
    """Return the CRC-32 of the rest of a file."""
    found = 0
    while block := file.read(1 << 22):
        found = zlib.crc32(block, found)
    return found


def num_bytes_in(folder: Path) -> int:
    """Return the size of all files below a folder; links are not followed."""
    return sum(entry.stat(follow_symlinks=False).st_size for entry in _files(folder))


def _files(folder: Path) -> Iterator[os.DirEntry]:
    """Yield everything below a folder except folders."""
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                else:
                    yield entry


def check_whole_number(value: object, what: str, most: int, least: int = 0) -> int:
    """Return an integer in its range; a bool is refused.

    Raises:
      ValueError: the value is something else.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {short(value)}; it is a whole number from {least} to {most}")
    return value


def finite_number(value: object, what: str, most: float, least: float = 0.0) -> float:
    """Return a number in its range; NaN is refused.

    Raises:
      ValueError: the value is something else.
    """
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{what} is {short(value)}; it is a number from {least:g} to {most:g}")
    return value  # type: ignore[return-value]


def check_kind(value: object, kind: type, what: str) -> Any:
    """Return a value of exactly this type.

    Raises:
      ValueError: the value is of another type.
    """
    if type(value) is not kind:
        raise ValueError(f"{what} is {short(value)}; it is {kind.__name__}")
    return value


def kind_text(mode: int) -> str:
    """Return the kind of a path, from its mode."""
    return KINDS.get(stat.S_IFMT(mode), "no regular file")


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is {kind_text(mode)}, not a regular file")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {short(twice)} occurs twice in one object")
    return found


def _int(text: str) -> int:
    if len(text.lstrip("-")) > MOST_DIGITS:
        raise ValueError(
            f"the number {text[:20]}... has {len(text):,} digits; at most {MOST_DIGITS} are read"
        )
    _float(text)
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is too large; a float holds numbers below 1.8e308")
    return value


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no number in JSON")
