"""Run cases, each in a child that is forked from a process which has imported everything and begun nothing.

Next: `fuzz.py`.
"""

import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from case import Case

SECONDS = 240.0
"""After so long a case has hung: XLA itself ends a wait of devices for each other after 40 s."""
CPU_SECONDS = 150
MOST_BYTES = 12 << 30
FAULTS = ("wrong", "abort", "hang", "error")
"""Ends that no case may have; the others are `right` and `refused`."""


class Child(NamedTuple):
    """A case that runs."""

    number: int
    case: Case
    process: int
    began: float
    folder: tempfile.TemporaryDirectory


def run_cases(cases: Iterable[tuple[int, Case]], jobs: int = 1) -> Iterator[tuple[int, Case, dict[str, Any]]]:
    """Run cases, some at a time, and yield each with its end as it comes.

    Args:
      cases: numbers and cases.
      jobs: children at a time.
    """
    waiting, running = iter(cases), []
    more = True
    while more or running:
        while more and len(running) < jobs:
            following = next(waiting, None)
            more = following is not None
            if following is not None:
                running.append(start(*following))
        for child in list(running):
            if (found := poll(child)) is not None:
                running.remove(child)
                yield child.number, child.case, found
        time.sleep(0.01)


def run_case(case: Case) -> dict[str, Any]:
    """Run one case and return its end."""
    return next(run_cases([(0, case)]))[2]


def start(number: int, case: Case) -> Child:
    """Fork a child that runs a case and writes its end into a folder."""
    folder = tempfile.TemporaryDirectory(prefix="fuzz_")
    process = os.fork()
    if process:
        return Child(number, case, process, time.monotonic(), folder)
    try:
        _become_a_case(case, Path(folder.name))
    finally:
        os._exit(3)


def _become_a_case(case: Case, folder: Path) -> None:
    """Run a case as this process's last work."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(folder)
    flags = [f"--xla_force_host_platform_device_count={case.num_devices}", os.environ.get("XLA_FLAGS", "")]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ["PJRT_NPROC"] = str(8 * case.num_devices)

    import warnings

    import jax
    from checked import check_case

    warnings.simplefilter("ignore")
    assert jax.device_count() == case.num_devices
    try:
        found = check_case(case)
    except BaseException as error:
        import traceback

        lines = [line for line in str(error).splitlines() if line.strip()][:2]
        text = f"{type(error).__name__}: {' '.join(lines)}"
        found = {"end": "error", "text": text[:600], "traceback": traceback.format_exc()[-6000:]}
    (folder / "found").write_text(json.dumps(found))
    os._exit(0)


def poll(child: Child) -> dict[str, Any] | None:
    """Return how a child ended, None while it runs; one that runs too long is ended."""
    ended, status, used = os.wait4(child.process, os.WNOHANG)
    seconds = time.monotonic() - child.began
    if not ended and seconds < SECONDS:
        return None
    if not ended:
        os.kill(child.process, signal.SIGKILL)
        _, status, used = os.wait4(child.process, 0)
    folder = Path(child.folder.name)
    found = {"end": "hang", "text": last_lines(folder / "output")}
    if (folder / "found").exists():
        found = json.loads((folder / "found").read_text())
    elif ended and os.WIFSIGNALED(status) and os.WTERMSIG(status) not in (signal.SIGXCPU, signal.SIGKILL):
        found |= {"end": "abort", "text": f"signal {os.WTERMSIG(status)}: {found['text']}"}
    elif ended and os.WIFEXITED(status):
        found |= {"end": "abort", "text": f"exit code {os.WEXITSTATUS(status)}: {found['text']}"}
    child.folder.cleanup()
    return {**found, "seconds": round(seconds, 2), "cpu": round(used.ru_utime + used.ru_stime, 2)}


def last_lines(path: Path) -> str:
    """Return the last lines of a child's output that say why it ended."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    telling = [line for line in lines if "Check failed" in line or "F0000" in line or "waiting" in line]
    return " | ".join(line.strip()[:300] for line in (telling or lines)[-2:])
