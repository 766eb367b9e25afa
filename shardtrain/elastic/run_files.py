"""Files of an elastic run: its members, their certificates, signs of life and checkpoints. No sockets.

A file of an epoch is made once and never changed, so the folder decides who is a member. Next: `sockets.py`.
"""

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardtrain.system.atomic_write import create_file, replace_file, sync, take_away
from shardtrain.system.untrusted_files import name_problem, read_bytes

EPOCHS, ALIVE, CHECKPOINTS, MEMBERS = "epochs", "alive", "checkpoints", "members"
NEW = ".new."
"""Begin of the name of a checkpoint that is being written, before the name of its island."""

PLAIN, MOST_PLAIN_BYTES = ".plain", 32
"""End of the name of a file with the step after which an epoch was continued without islands."""

MOST_EPOCH_BYTES = 1 << 24
MOST_CERTIFICATE_BYTES = 1 << 12

Found = TypeVar("Found")


@dataclass(frozen=True, order=True)
class SavedCheckpoint:
    """A checkpoint of the run folder, after `step` steps, written by a chief of an epoch."""

    step: int
    epoch: int
    folder: Path


class RunFiles:
    """The files by which islands of a run find each other.

    Args:
      folder: the folder of the run, shared by all islands; its file system needs hard links.
      late_seconds: limit for a file that exists and cannot be seen yet, as caches of network file systems
        have it.

    Raises:
      PermissionError: users other than the owner may read or write the folder of keys.
    """

    def __init__(self, folder: Path, *, late_seconds: float = 60.0) -> None:
        self.folder = folder
        self._epochs, self._keys = folder / EPOCHS, folder / "keys"
        self._alive, self._checkpoints = folder / ALIVE, folder / CHECKPOINTS
        self._members, self._leave = folder / MEMBERS, folder / "leave"
        self._late_seconds = late_seconds
        for each in (self._epochs, self._alive, self._checkpoints, self._members, self._leave):
            each.mkdir(parents=True, exist_ok=True)
        self._keys.mkdir(mode=0o700, exist_ok=True)
        found = self._keys.stat()
        if found.st_mode & 0o077 or found.st_uid != os.geteuid():
            raise PermissionError(
                f"{self._keys} has mode {found.st_mode & 0o777:o} and owner {found.st_uid}: others could let"
                f" islands into the run. It must be a folder of user {os.geteuid()} that nobody else may read"
                f" or write: chmod 700 {self._keys}"
            )

    def propose(self, number: int, content: bytes) -> bytes:
        """Make the file of an epoch unless it exists.

        Args:
          number: number of the epoch.
          content: of the file.

        Returns:
          The content of the epoch, which is that of the island that was first.

        Raises:
          TimeoutError: another island was first, and its file cannot be seen within the limit.
        """
        path = self._epoch_path(number)
        if create_file(path, content):
            sync(self._epochs)
            return content
        return self._wait(lambda: self.read(number), f"{path} exists, but cannot be read")

    def read(self, number: int) -> bytes | None:
        """Return the content of an epoch; None if there is no such epoch yet."""
        try:
            return read_bytes(self._epoch_path(number), MOST_EPOCH_BYTES)
        except FileNotFoundError:
            return None

    def wait_for(self, number: int) -> bytes:
        """Return the content of an epoch that exists, though this host may see it late.

        Raises:
          TimeoutError: it cannot be seen within the limit.
        """
        return self._wait(lambda: self.read(number), f"{self._epoch_path(number)} exists, but cannot be read")

    def newest(self) -> int:
        """Return the number of the newest epoch; 0 if there is none."""
        _refresh(self._epochs)
        names = (path.name.partition(".")[0] for path in self._epochs.glob("[0-9]*.json"))
        number = max((int(name) for name in names if name.isdecimal()), default=0)
        while self._epoch_path(number + 1).exists():  # the listing may be old all the same
            number += 1
        return number

    def mark_plain(self, step: int) -> None:
        """Record that a run without islands that come and go continues from a step; the lowest counts."""
        path = self._epochs / f"{self.newest()}{PLAIN}"
        if not path.exists() or step < int(read_bytes(path, MOST_PLAIN_BYTES)):
            replace_file(path, str(step).encode())

    def list_plain(self) -> dict[int, int]:
        """Return number of an epoch -> the step from which the run was continued by `mark_plain`."""
        return list_plain(self._epochs)

    def begun(self) -> float:
        """Return the time of the first epoch, which exists, in seconds since 1970."""
        return self._epoch_path(1).stat().st_mtime

    def write_certificate(self, name: str, certificate: bytes) -> None:
        """List the certificate of an island, so that the others let it in.

        Raises:
          ValueError: the name cannot be that of a file.
          FileExistsError: an island of this name has another certificate.
        """
        path = self._certificate_path(name)
        if not create_file(path, certificate, 0o600):
            raise FileExistsError(f"{path} exists; an island that comes again needs a new name")

    def describe_member(self, name: str, facts: Mapping[str, Any]) -> None:
        """Keep what an island is, such as its host and mesh, for `history.py`; the first call counts.

        Args:
          name: of the island.
          facts: values of JSON.

        Raises:
          ValueError: the name cannot be that of a file.
        """
        _check_name(name)
        create_file(self._members / f"{name}.json", json.dumps(facts).encode())

    def read_certificate(self, name: str) -> str | None:
        """Return the certificate of an island; None if the folder does not list it (yet).

        Raises:
          ValueError: the name cannot be that of a file, or the file is no text.
        """
        path = self._certificate_path(name)
        _refresh(self._keys)
        try:
            return read_bytes(path, MOST_CERTIFICATE_BYTES).decode("ascii")
        except FileNotFoundError:
            return None

    def touch_alive(self, name: str) -> None:
        """Show that a member is alive."""
        (self._alive / name).touch()

    def idle_seconds(self, name: str = "*") -> float:
        """Return the time since a member was last alive, by the clock of the file system; inf if never.

        Args:
          name: name of the member; by default, the last sign of life of any of them counts.
        """
        with tempfile.TemporaryFile(dir=self._epochs) as file:
            now = os.fstat(file.fileno()).st_mtime
        last = max((_fresh_mtime(path) for path in self._alive.glob(name)), default=-math.inf)
        return max(now - last, 0.0)

    def ask_to_leave(self, name: str) -> None:
        """Ask a member to leave after its step."""
        create_file(self._leave / name, b"")

    def is_asked_to_leave(self, name: str) -> bool:
        """Return whether a member was asked to leave."""
        _refresh(self._leave)
        return (self._leave / name).exists()

    @contextmanager
    def new_checkpoint(self, writer: str) -> Iterator[Path]:
        """Make a temporary folder for a checkpoint, deleted unless `commit_checkpoint` renames it.

        Args:
          writer: name of the island; no other island ever has it.
        """
        folder = self._checkpoints / f"{NEW}{writer}"
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def commit_checkpoint(self, epoch: int, step: int, folder: Path) -> bool:
        """Give a checkpoint its name, which carries step and epoch, unless there is a newer epoch.

        The newer epoch can come between the look for it and the renaming, which its chief ends by
        `revoke_checkpoints`. One that is beyond the first step of a later epoch is void, see `ledger.py`.

        Args:
          epoch: the epoch whose chief wrote it.
          step: number of steps applied in it.
          folder: the folder of `new_checkpoint`, filled.

        Returns:
          Whether the checkpoint has its name; False if an epoch is newer.

        Raises:
          FileNotFoundError: another chief has revoked it.
        """
        for path in sorted(folder.rglob("*"), reverse=True):
            sync(path)
        sync(folder)
        folder.chmod(0o755)  # private until it is complete
        if self.newest() > epoch:
            return False
        final = self._checkpoints / f"step-{step}-epoch-{epoch}"
        if not final.exists():  # else it is the same one, saved twice
            folder.rename(final)
            sync(self._checkpoints)
        return True

    def revoke_checkpoints(self, writer: str, select: Callable[[set[str]], set[str]]) -> None:
        """Delete what some islands have not committed, so that they cannot commit it any more.

        Args:
          writer: name of the island that takes over.
          select: names of islands with unfinished checkpoints -> those from whom it takes over.
        """
        _refresh(self._checkpoints)
        found = {path.name.removeprefix(NEW): path for path in self._checkpoints.glob(f"{NEW}*")}
        revoked = select(set(found) - {writer})
        take_away([found[name] for name in revoked], self._checkpoints / f".old.{writer}")

    def list_checkpoints(self) -> list[SavedCheckpoint]:
        """List all checkpoints by step and epoch, void ones too."""
        return list_checkpoints(self.folder)

    def _certificate_path(self, name: str) -> Path:
        _check_name(name)
        return self._keys / f"{name}.pem"

    def _epoch_path(self, number: int) -> Path:
        return self._epochs / f"{number}.json"

    def _wait(self, find: Callable[[], Found | None], problem: str) -> Found:
        deadline = time.monotonic() + self._late_seconds
        while (found := find()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{problem} within {self._late_seconds:g} s. Check that all islands see the same folder,"
                    " and that its file system does not cache missing files for longer"
                )
            time.sleep(0.02)
        return found


def list_plain(epochs: Path) -> dict[int, int]:
    """Return what `RunFiles.list_plain` does, without making anything.

    Args:
      epochs: the folder of the epochs.
    """
    paths = {path.name.removesuffix(PLAIN): path for path in epochs.glob(f"[0-9]*{PLAIN}")}
    return {
        int(name): int(read_bytes(path, MOST_PLAIN_BYTES)) for name, path in paths.items() if name.isdecimal()
    }


def list_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """List all checkpoints by step and epoch, void ones too, without making anything.

    Args:
      folder: the folder of `RunFiles`.
    """
    found = []
    for path in (folder / CHECKPOINTS).glob("step-*-epoch-*"):
        words = path.name.split("-")
        if len(words) == 4 and words[1].isdecimal() and words[3].isdecimal():
            found.append(SavedCheckpoint(int(words[1]), int(words[3]), path))
    return sorted(found)


def _check_name(name: str) -> None:
    problem = (
        name_problem(name) or ("/" in name and "has a slash") or (name[0] == "." and "begins with a dot")
    )
    if problem:
        raise ValueError(f"the name {name!r} of an island {problem}; use letters, digits and dashes")


def _refresh(folder: Path) -> None:
    """Change a folder, so that a network file system asks its server what is in it instead of its cache."""
    os.utime(folder)


def _fresh_mtime(path: Path) -> float:
    """Return the time of a change; opening a file makes a network file system ask its server."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return -math.inf
