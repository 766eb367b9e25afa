"""Read the limits of control groups (version 1 and 2) on CPU time and memory of this process. No jax."""

from pathlib import Path
from typing import Any

NO_LIMIT_BYTES = 2**60
"""Limits of this size or more are ignored: cgroup version 1 writes such a number for no limit."""


def limits(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> dict[str, Any]:
    """Return the tightest limits of the groups of this process, from its own up to the root.

    Returns:
      `cores`: number of cores whose time this process may use, possibly a fraction; `memory_bytes`. None
      means no limit.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return {"cores": None, "memory_bytes": None}
    cores: list[float] = []
    memory: list[int] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        for name in controllers.split(","):
            for folder in _folders(root / name if name else root, group):
                cores += _read_cores(folder)
                memory += _read_memory(folder)
    return {"cores": min(cores, default=None), "memory_bytes": min(memory, default=None)}


def _folders(mount: Path, group: str) -> list[Path]:
    """Return a group's folder and its parents; in a container possibly only the mount itself."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:end]) for end in range(len(parts), -1, -1)]


def _read_cores(folder: Path) -> list[float]:
    if text := _read(folder / "cpu.max"):
        quota, _, period = text.partition(" ")
        return [] if quota == "max" else [int(quota) / int(period or 100_000)]
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return [int(quota) / int(period)] if quota and period and int(quota) > 0 else []


def _read_memory(folder: Path) -> list[int]:
    texts = [_read(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return [int(text) for text in texts if text and text != "max" and int(text) < NO_LIMIT_BYTES]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
