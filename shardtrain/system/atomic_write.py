"""Write files and folders that appear whole, under a fresh temporary name first, and touch no other. No jax.

What stands in the way of a temporary name is somebody else's and stays: names are made exclusively.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

READABLE = 0o666


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Fill a folder that gets its name when the block ends without an error; else it is removed again.

    Args:
      out: what it will be called; it must not be there, or be an empty folder.

    Raises:
      FileExistsError: it holds something.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with new_folder(Path(folder, "out")) as filled:
    ...         _ = (filled / "a").write_text("b")
    ...     [path.name for path in Path(folder).iterdir()], Path(folder, "out", "a").read_text()
    (['out'], 'b')
    """
    out = out.resolve()
    refuse_filled(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # private until it is whole; the folder inside has the mode that the user's umask gives
    with tempfile.TemporaryDirectory(prefix=f".{out.name[:64]}.", dir=out.parent) as own:
        filled = Path(own, "new")
        filled.mkdir()
        yield filled
        refuse_filled(out)
        filled.rename(out)


def refuse_filled(out: Path) -> None:
    """Refuse to write a folder over what is there.

    Raises:
      FileExistsError: a folder that holds something, or a file.
    """
    if out.is_dir() and next(out.iterdir(), None) is None:
        return
    if out.exists() or out.is_symlink():
        what = "holds something already" if out.is_dir() else "is there already, and no folder"
        raise FileExistsError(f"{out} {what}; give a folder that is empty or not there")


def replace_file(path: Path, content: bytes, mode: int = READABLE) -> None:
    """Write a file anew, see `new_file`."""
    with new_file(path, mode) as file:
        file.write(content)


@contextmanager
def new_file(path: Path, mode: int = READABLE) -> Iterator[BinaryIO]:
    """Write a file that gets its name when the block ends without an error, in place of a link too.

    Its temporary name begins with a dot and ends in `.part`; as long as it is written it is locked, see
    `clear_parts`.

    Args:
      path: the file; its folder is there.
      mode: its permissions, less the umask.

    Raises:
      OSError: it cannot be written; what was there before is still there.
    """
    part, file = _part_of(path, mode)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def clear_parts(folder: Path, names: str) -> None:
    """Delete what processes that were killed left of files they were writing.

    Args:
      folder: where the files were to be.
      names: a pattern of their names, such as `text-*`.
    """
    for part in folder.glob(f".{names}.????????????????.part"):
        try:
            handle = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue  # a link, or gone
        try:
            # who writes it holds its lock; without locks nobody can tell
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink(missing_ok=True)
        except OSError:
            continue
        finally:
            os.close(handle)


def open_own(path: Path, *, append: bool) -> BinaryIO:
    """Open a file of our own for writing, unbuffered; a link in its place is not followed.

    Raises:
      OSError: it is a link, or cannot be opened.
    """
    if path.is_symlink():
        raise OSError(f"{path} is a link, and is not written through; remove it")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    flags |= os.O_APPEND if append else os.O_TRUNC
    return os.fdopen(os.open(path, flags, READABLE), "ab" if append else "wb", buffering=0)  # type: ignore[return-value]


def _part_of(path: Path, mode: int) -> tuple[Path, BinaryIO]:
    """A new file beside another, under a name that nobody has, and locked."""
    while True:
        part = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return part, os.fdopen(handle, "wb")
        os.close(handle)  # it was taken for a left one before it was locked
