"""Lock a folder so that one process at a time writes to it; released when the process ends. No jax.

The lock file is in the folder itself, so that every path of the folder, also through links, leads to the same
lock.
"""

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

LOCK = ".lock"

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EIO)
"""Error codes of file systems without locks."""

NO_FILE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""Error codes with which no lock file can be created; on a full disk users must still be able to delete."""

FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LockHeld(ValueError):
    """Another process holds the lock."""


@contextmanager
def hold_lock(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a folder within this context, or none if the file system cannot lock or is full.

    Args:
        folder: an existing folder.
        shared: let other processes hold it too that share it.

    Raises:
        Locked: another process holds it.
        OSError: the lock file is a link.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with hold_lock(Path(folder)):
    ...         [path.name for path in Path(folder).iterdir()]
    ['.lock']
    """
    file = _open(folder / LOCK)
    if file is None:
        yield
        return
    try:
        try:
            _lock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        except BlockingIOError:
            raise LockHeld(f"another process holds the lock of {folder}") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(file)


@contextmanager
def hold_locks(folders: Iterable[Path], if_held: str, *, shared: bool = False) -> Iterator[None]:
    """Hold the locks of several folders within this context, see `hold_lock`.

    Raises:
        ValueError: another process holds one of them; `if_held` says what to do.
    """
    try:
        with ExitStack() as stack:
            for folder in folders:
                stack.enter_context(hold_lock(folder, shared=shared))
            yield
    except LockHeld:
        raise ValueError(if_held) from None


def _open(path: Path) -> int | None:
    if path.is_symlink():
        raise OSError(f"{path} is a link, which cannot be a lock; remove it")
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
    try:
        # the file may be another user's, who may hold the lock: reading is enough
        return os.open(path, os.O_RDONLY | FLAGS)
    except OSError as error:
        if error.errno not in (*NO_FILE, errno.ENOENT):
            raise
        return None


def _lock(file: int, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        # on NFS an exclusive lock needs write access; a shared one also detects another holder
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
