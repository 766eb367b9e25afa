"""Write files and folders atomically: under a new temporary name first, then renamed. No jax.

Temporary names are created exclusively, so files of other processes are never overwritten.
"""

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

READABLE = 0o666


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Create a folder atomically: a temporary folder is renamed at the end of the context.

    Args:
      out: the final path; it must not exist, or be an empty folder.

    Raises:
      FileExistsError: `out` is not empty.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with new_folder(Path(folder, "out")) as filled:
    ...         _ = (filled / "a").write_text("b")
    ...     [path.name for path in Path(folder).iterdir()], Path(folder, "out", "a").read_text()
    (['out'], 'b')
    """
    out = out.resolve()
    refuse_filled(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # private until it is complete; the folder inside gets the mode of the user's umask
    with tempfile.TemporaryDirectory(prefix=f".{out.name[:64]}.", dir=out.parent) as own:
        filled = Path(own, "new")
        filled.mkdir()
        yield filled
        refuse_filled(out)
        filled.rename(out)


def refuse_filled(out: Path) -> None:
    """Check that a path does not exist or is an empty folder.

    Raises:
      FileExistsError: it is a file or a folder with content.
    """
    if out.is_dir() and next(out.iterdir(), None) is None:
        return
    if out.exists() or out.is_symlink():
        what = "holds something already" if out.is_dir() else "is there already, and no folder"
        raise FileExistsError(f"{out} {what}; give a folder that is empty or not there")


def replace_file(path: Path, content: bytes, mode: int = READABLE) -> None:
    """Write or replace a file atomically, see `new_file`."""
    with new_file(path, mode) as file:
        file.write(content)


@contextmanager
def new_file(path: Path, mode: int = READABLE) -> Iterator[BinaryIO]:
    """Write a file atomically: a temporary file replaces `path` (also a link) at the end of the context.

    The temporary name begins with a dot and ends in `.part`. The file is locked while it is written, see
    `clear_parts`.

    Args:
      path: the final path; its folder exists.
      mode: permissions, reduced by the umask.

    Raises:
      OSError: the file cannot be written; a previous file is unchanged.
    """
    part, file = _create_part(path, mode)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def create_file(path: Path, content: bytes, mode: int = READABLE) -> bool:
    """Create a file atomically, with all its content, unless it exists: of several processes one succeeds.

    Args:
      path: the final path; its folder exists.
      content: of the file.
      mode: permissions, reduced by the umask.

    Returns:
      Whether this call created the file. On a network file system False may also mean that it did, and the
      answer was lost.

    Raises:
      OSError: the file cannot be written, or the file system has no hard links.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     create_file(Path(folder, "a"), b"1"), create_file(Path(folder, "a"), b"2"), os.listdir(folder)
    (True, False, ['a'])
    """
    part, file = _create_part(path, mode)
    try:
        with file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.link(part, path)
        return True
    except FileExistsError:
        return False
    finally:
        # the final file is the same inode: a later write to the temporary name would change it
        part.unlink(missing_ok=True)


def take_away(paths: Iterable[Path], own: Path) -> None:
    """Delete files and folders that other processes may be about to rename: each is whole or gone for them.

    Args:
      paths: the files and folders; one that is gone already is skipped.
      own: the beginning of a path in the same file system that no other process uses.
    """
    for each in paths:
        # a name of its own: a file system may keep files of what was deleted before
        place = own.with_name(f"{own.name}.{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):
            each.rename(place)
            if place.is_file():
                place.unlink()
        shutil.rmtree(place, ignore_errors=True)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_full(error: BaseException) -> bool:
    """Return whether a write failed for lack of space or quota, by the system's message in the error."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def write_advice(error: BaseException) -> str:
    """Return the change to make after an error of a write.

    >>> write_advice(OSError(28, os.strerror(errno.ENOSPC))), write_advice(PermissionError(13, "no"))
    ('free space', 'make it writable')
    """
    return "free space" if is_full(error) else "make it writable"


def clear_parts(folder: Path, names: str) -> None:
    """Delete the temporary files of processes that were killed.

    Args:
      folder: the folder of the final files.
      names: a glob pattern of the final names, such as `text-*`.
    """
    for part in folder.glob(f".{names}.????????????????.part"):
        unlink_unlocked(part)


def unlink_unlocked(path: Path) -> None:
    """Delete a file unless it is locked, a link, or gone.

    Args:
      path: the file, which its users lock (`flock`). On a file system without locks nothing is deleted,
        because users are unknown.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return
    finally:
        os.close(handle)


def open_own(path: Path, *, append: bool, is_new: bool = False) -> BinaryIO:
    """Open a file for unbuffered writing; a link is refused, not followed.

    Raises:
      FileExistsError: `is_new`, and the file exists.
      OSError: it is a link, or cannot be opened.
    """
    if path.is_symlink():
        raise OSError(f"{path} is a link, which is not followed; remove it")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    flags |= (os.O_APPEND if append else os.O_TRUNC) | (os.O_EXCL if is_new else 0)
    return os.fdopen(os.open(path, flags, READABLE), "ab" if append else "wb", buffering=0)  # type: ignore[return-value]


def _create_part(path: Path, mode: int) -> tuple[Path, BinaryIO]:
    """Create a locked temporary file next to the final one, under an unused name."""
    while True:
        part = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return part, os.fdopen(handle, "wb")
        os.close(handle)  # another process deleted it as abandoned before it was locked
