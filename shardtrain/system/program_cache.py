"""Keep compiled programs for the next start, and count the programs that were loaded or compiled.

jax reads and writes them; this module chooses the folder, deletes old programs and formats the log line. It
imports jax only where that is called. Next: `xla_flags.py`.
"""

import contextlib
import os
import platform
import re
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISVTX
from typing import Any, Self

from shardtrain.system.untrusted_files import read_bytes

LIMIT_BYTES = 2 * 2**30
"""Largest size of the programs of one kind of device; the oldest are deleted at a start."""

CHUNK_BYTES = 1 << 24

LEAST_SECONDS = 0.1
"""Compile time below which a program is not kept; the default of jax is 1 s."""

CHECKED = "checked"
"""File whose time of change is the time up to which all programs were checked to be complete."""

WRITING_SECONDS = 60.0
"""Seconds after which an incomplete program is no longer being written."""

SYSTEM_OWNERS = (0, 65534)
"""Owners of parent folders: root, and its number inside a container that does not map it."""

ZSTANDARD = b"\x28\xb5\x2f\xfd"
"""First bytes of a program that jax compressed by zstandard; without that library it uses zlib."""

_HIT, _MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"
_COMPILED = "/jax/core/compile/backend_compile_duration"


def cache_folder(environ: Mapping[str, str], kind: str) -> Path:
    """Return the folder of the programs for one kind of device in the user's cache.

    >>> cache_folder({"XDG_CACHE_HOME": "/c"}, "NVIDIA H200").as_posix()
    '/c/shardtrain/programs/NVIDIA_H200'
    """
    # the specification of XDG ignores a path that is not absolute
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    base = named if named.is_absolute() else Path.home() / ".cache"
    return base / "shardtrain" / "programs" / re.sub(r"\W+", "_", kind)


def find_program_folder() -> str | None:
    """Return the folder in which jax keeps programs, or None."""
    import jax

    return getattr(jax.config, "jax_compilation_cache_dir", None)


def make_hardware_key() -> str:
    """Return a key that is equal for hardware with identical rounding: device kind, and features of a CPU."""
    import jax

    kind = jax.devices()[0].device_kind
    if jax.devices()[0].platform != "cpu":
        return kind
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{kind} of {platform.node()}"
    features = sorted(
        {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    )
    return f"{kind} {zlib.crc32(repr(features).encode()):08x}"


def keep_programs(environ: Mapping[str, str]) -> str:
    """Let jax keep compiled programs, unless the user chose a folder for them or none can be made.

    A processor of another model may lack instructions of a program, so each kind has its own folder.

    Returns:
      A warning if other users could put programs into the folder, so that nothing is kept.
    """
    import jax

    if find_program_folder() or not getattr(jax.config, "jax_enable_compilation_cache", True):
        return ""
    try:
        folder = cache_folder(environ, make_hardware_key())
        make_private(folder)
        if who := find_other_writers(folder):
            return (
                f"WARNING: compiled programs are not kept, as {who} and they are loaded as code: make"
                f" {folder} and the folders above it your own (chmod go-w), delete it, or choose another by"
                " XDG_CACHE_HOME"
            )
        drop_broken(folder)
        delete_oldest(folder, LIMIT_BYTES)
    except (OSError, RuntimeError):  # the second: there is no home directory
        return ""
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    return ""


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents for this user only, whatever the umask is."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def find_other_writers(folder: Path) -> str:
    """Return why other users can put files into a folder; "" if they cannot.

    A group may write to parent folders that this user owns: the umask 002 makes such folders for the user's
    own group.
    """
    for each in (folder, *folder.resolve().parents):
        stat = each.stat()
        is_own = stat.st_uid == os.geteuid()
        sticky = each != folder and stat.st_mode & S_ISVTX
        forbidden = 0o022 if each == folder or not is_own else 0o002
        if not is_own and (each == folder or stat.st_uid not in SYSTEM_OWNERS):
            return f"{each} belongs to another user (number {stat.st_uid})"
        if stat.st_mode & forbidden and not sticky:
            return f"others can write to {each}"
    return ""


def drop_broken(folder: Path) -> None:
    """Delete programs whose writing was interrupted; jax would compile them at every start.

    Each program is read once, at the first start after it was written.
    """
    checked, until = folder / CHECKED, time.time() - WRITING_SECONDS
    since = checked.stat().st_mtime if checked.exists() else 0.0
    for path in folder.glob("*-cache"):
        # another process may delete it; one file that cannot be read is no reason to keep none
        with contextlib.suppress(OSError, ValueError):
            if not path.is_file():
                # jax would wait for a pipe
                path.unlink()
            elif since <= path.stat().st_mtime < until and not is_whole(read_bytes(path, LIMIT_BYTES)):
                path.unlink()
    checked.touch(mode=0o600)
    os.utime(checked, (until, until))


def is_whole(program: bytes) -> bool:
    """Return whether the file of a program is complete, by the checksum of its compression.

    >>> is_whole(zlib.compress(b"program")), is_whole(zlib.compress(b"program")[:-3])
    (True, False)
    """
    if program.startswith(ZSTANDARD):  # jax writes no checksum in its frames
        return True
    reader = zlib.decompressobj()
    try:
        # a part at a time, as a small file may be made of gigabytes
        while reader.decompress(program, CHUNK_BYTES):
            program = reader.unconsumed_tail
    except zlib.error:
        return False
    return reader.eof


def delete_oldest(folder: Path, limit_bytes: int) -> None:
    """Delete the oldest programs of a folder until the others have at most `limit_bytes`."""
    found = []
    for path in folder.glob("*-cache"):
        try:
            stat = path.stat()
        except FileNotFoundError:  # another process prunes too
            continue
        found.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size


class ProgramCounts:
    """Counts programs that jax compiles or loads from its cache while this is entered."""

    def __init__(self) -> None:
        self.loaded, self.kept, self.programs, self.compile_seconds = 0, 0, 0, 0.0

    def __enter__(self) -> Self:
        import jax

        jax.monitoring.register_event_listener(self._count)
        jax.monitoring.register_event_duration_secs_listener(self._add)
        return self

    def __exit__(self, *exception: object) -> None:
        import jax

        jax.monitoring.unregister_event_listener(self._count)
        jax.monitoring.unregister_event_duration_listener(self._add)

    def _count(self, event: str, **_: Any) -> None:
        self.loaded += event == _HIT
        self.kept += event == _MISS

    def _add(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            self.programs += 1
            self.compile_seconds += duration_secs

    def text(self, folder: str | None) -> str:
        """Return the line of the log; empty if no programs are kept.

        Args:
          folder: the folder of the kept programs, or None.

        >>> counts = ProgramCounts()
        >>> counts.loaded, counts.programs, counts.compile_seconds = 7, 19, 1.25
        >>> counts.text("/c")
        'programs: 7 loaded from /c, 0 compiled and kept, 12 small ones compiled; 1.2 s for all'
        """
        if folder is None:
            return ""
        small = self.programs - self.loaded - self.kept
        return (
            f"programs: {self.loaded} loaded from {folder}, {self.kept} compiled and kept, {small} small ones"
            f" compiled; {self.compile_seconds:.1f} s for all"
        )
