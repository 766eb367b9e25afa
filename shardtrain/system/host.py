"""Read facts of this host from files, each in well under a millisecond. No jax."""

import os
import platform
import re
import resource
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any


def system_facts() -> dict[str, str | None]:
    """Return `machine`, `system` (distribution and kernel), `libc` and `driver` of this host."""
    return {
        "machine": platform.machine(),
        "system": f"{system_name()}, Linux {platform.release()}",
        "libc": " ".join(platform.libc_ver()),
        "driver": driver(),
    }


def system_name() -> str:
    """Return the name of the Linux distribution."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "?")
    except OSError:
        return os.uname().sysname


def driver() -> str | None:
    """Return the version of NVIDIA's driver; None without one.

    >>> driver() is None or driver()[0].isdigit()
    True
    """
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


def memory_bytes(name: str, file: Path = Path("/proc/meminfo")) -> int | None:
    """Return an entry of meminfo in bytes, such as MemTotal; None without one."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def peak_resident_bytes() -> int:
    """Return the peak of the resident memory of this process.

    >>> peak_resident_bytes() > 1 << 20
    True
    """
    # called for every line of metrics: this takes a microsecond, and the kernel's file 20 or more
    with_starter = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return with_starter if _had_most(with_starter) else _own_peak_bytes() or with_starter


@lru_cache(maxsize=1)
def _had_most(with_starter: int) -> bool:
    """Return whether the larger peak, of this process and of its parent before exec, is its own."""
    return (_own_peak_bytes() or 0) > 0.99 * with_starter


def _own_peak_bytes(file: Path = Path("/proc/self/status")) -> int | None:
    try:
        found = re.search(rb"^VmHWM:\s*(\d+)", file.read_bytes(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


def network_links(folder: Path = Path("/sys/class/net")) -> dict[str, Any]:
    """Return interface -> its state and, if the driver reports it, its speed in Mbit/s.

    Loopback is left out. See `infiniband_links` for InfiniBand.
    """
    links = {}
    for path in sorted(folder.glob("*")):
        if path.name != "lo" and (path / "operstate").exists():
            speed = _read(path / "speed")
            links[path.name] = {
                "state": _read(path / "operstate"),
                "mbit_per_second": int(speed) if speed and speed.isdecimal() else None,
            }
    return links


def infiniband_links(folder: Path = Path("/sys/class/infiniband")) -> dict[str, Any]:
    """Return port -> its state and rate, of InfiniBand and compatible devices."""
    return {
        f"{port.parents[1].name}/{port.name}": {"state": _read(port / "state"), "rate": _read(port / "rate")}
        for port in sorted(folder.glob("*/ports/*"))
    }


def list_gpu_files() -> list[Path]:
    """List the device files of NVIDIA GPUs."""
    return [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]


def parse_ranges(text: str) -> list[int]:
    """Parse a list of numbers and ranges, as in a cpulist file.

    >>> parse_ranges("0-2,8\\n")
    [0, 1, 2, 8]
    """
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return [number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)]


def ranges_text(numbers: Sequence[int]) -> str:
    """Format numbers as a list of ranges.

    >>> ranges_text([0, 1, 2, 8])
    '0-2,8'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # a speed cannot be read while its interface is down
        return None
