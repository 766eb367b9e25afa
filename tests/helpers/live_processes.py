"""Processes of this machine, as /proc shows them."""

from pathlib import Path


def _facts(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def alive(pid):
    """Whether a process is there, and no zombie."""
    try:
        return _facts(pid)[0] != "Z"
    except OSError:
        return False


def parent(pid):
    return int(_facts(pid)[1])
