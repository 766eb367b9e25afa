"""Read the state of another rank's process, and name the likely cause of its silence. No MPI."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shardtrain.islands.watchdog.diagnosis import Watch


class Peer(NamedTuple):
    """Name, host and process of a rank.

    Args:
      name: its name in messages.
      host: its host.
      pid: its process id.
    """

    name: str
    host: str
    pid: int


def cause_text(peer: Peer, here: str) -> str:
    """Return the likely cause of a silent rank, from the state of its process.

    Args:
      peer: the rank.
      here: the host of this process.

    >>> cause_text(Peer("island 1 (host b)", "b", 12), "a")
    'it is stopped, host b is down, or the network between it and host a is cut'
    """
    if peer.host != here:
        return f"it is stopped, host {peer.host} is down, or the network between it and host {here} is cut"
    if (state := read_process_state(peer.pid)) is None:
        return f"its process {peer.pid} is gone"
    return f"its process {peer.pid} {STATES.get(state, 'is there, but its Python does not run')}"


def is_at_work(peer: Peer, here: str, seconds: float, watch: Watch) -> bool:
    """Return whether a rank without heartbeats still works: a library may hold Python's lock there.

    Args:
      peer: the rank.
      here: the host of this process.
      seconds: seconds since its last heartbeat.
      watch: the limits.
    """
    if peer.host != here or seconds > watch.silent_work_seconds:
        return False
    return read_process_state(peer.pid) not in (None, *STATES)


def read_process_state(pid: int) -> str | None:
    """Return the state of a process as Linux's letter for it; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


STATES: Mapping[str, str] = {
    "T": "is stopped (by SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "is dead",
    "X": "is dead",
    "D": "waits in the kernel, for a disk or a file system",
}
