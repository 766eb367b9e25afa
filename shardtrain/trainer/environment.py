"""The file `environment.jsonl` of a run's folder: on what software and hardware each start of the run ran.

One line for each start, appended, as strict JSON; nothing is measured, no program is started, and MPI is not
imported where a run has none. Variables come from an allow list, see `system/shown_variables.py`.
"""

import json
import os
import platform
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from shardtrain import __version__
from shardtrain.islands.membership import Islands
from shardtrain.islands.rank_facts import flags
from shardtrain.system.atomic_write import open_own
from shardtrain.system.cgroup import limits
from shardtrain.system.host import infiniband_links, memory_bytes, network_links, ranges_text, system_facts
from shardtrain.system.packages import installed_packages
from shardtrain.system.shown_variables import shown_variables
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.coordination import Coordination

ENVIRONMENT = "environment.jsonl"


def record_environment(folder: Path, coordination: Coordination, output: RunConsole) -> None:
    """Append the environment of this start; a collective call of all ranks. The run continues if it fails."""
    ranks = coordination.all_gather("environment", rank_environment(coordination.islands))
    if not coordination.is_first:
        return
    line = json.dumps(start_record(ranks, coordination.islands), allow_nan=False)
    try:
        append_line(folder / ENVIRONMENT, line)
    except OSError as error:
        output.note(f"WARNING: {folder / ENVIRONMENT} cannot be written: {error}; the run continues")


def append_line(path: Path, line: str) -> None:
    """Append a line; one that a crash cut short is ended first, so that it spoils no other.

    Raises:
      OSError: the file cannot be written, or is a link.
    """
    with open_own(path, append=True) as file:
        data = line.encode() + b"\n"
        if file.tell() and _last_byte(path) != b"\n":
            data = b"\n" + data
        while data:
            data = data[file.write(data) :]


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def rank_environment(islands: Islands | None) -> dict[str, Any]:
    """Return the facts of this rank: its place, devices, cores and variables, and those of its host."""
    host = socket.gethostname() if islands is None else islands.environment.host
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        "rank": 0 if islands is None else islands.environment.rank,
        "island": 0 if islands is None else islands.seat.island,
        "process": jax.process_index(),
        "host": host,
        "pid": os.getpid(),
        "devices": _devices(),
        "cores": ranges_text(cores),
        "variables": shown_variables(os.environ),
        "of_host": {
            **system_facts(),
            "cores": os.cpu_count(),
            "memory_bytes": memory_bytes("MemTotal"),
            "limits": limits(),
            "network": network_links(),
            "infiniband": infiniband_links(),
        },
    }


def _devices() -> list[dict[str, Any]]:
    """Return the kinds of this process's devices, with the number and the usable memory of each."""
    kinds = Counter((d.platform, d.device_kind, _memory_bytes(d)) for d in jax.local_devices())
    names = ("platform", "kind", "memory_bytes")
    return [{**dict(zip(names, kind, strict=True)), "number": number} for kind, number in kinds.items()]


def _memory_bytes(device: Any) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")


def start_record(ranks: Sequence[Mapping[str, Any]], islands: Islands | None) -> dict[str, Any]:
    """Return the record of a start: what all ranks have in common once, then hosts and ranks.

    Args:
      ranks: from `rank_environment`, by rank.
      islands: of this process; its packages, flags and MPI are equal on all ranks, or the run is refused.
    """
    variables = ranks[0]["variables"]
    hosts: dict[str, Any] = {}
    for rank in ranks:
        hosts.setdefault(rank["host"], rank["of_host"])
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "packages": {**installed_packages(sys.path), "shardtrain": __version__},
        "mpi": None if islands is None else _mpi(islands),
        "flags": {name.removeprefix("flags/"): value for name, value in flags(os.environ).items()},
        "variables": variables,
        "hosts": hosts,
        "ranks": [_own(rank, variables) for rank in ranks],
    }


def _own(rank: Mapping[str, Any], common: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts of a rank without its host's; of its variables those that differ from rank 0."""
    found = {name: value for name, value in rank.items() if name not in ("of_host", "variables")}
    own = rank["variables"]
    names = [name for name in sorted({*own, *common}) if own.get(name) != common.get(name)]
    return {**found, "variables": {name: own.get(name) for name in names}}


def _mpi(islands: Islands) -> dict[str, str]:
    from shardtrain.islands.bridge import library_facts  # MPI has started: there are islands

    return {**library_facts(), "launcher": islands.environment.launcher}
