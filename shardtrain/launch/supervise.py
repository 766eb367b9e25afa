"""Run a launcher until it ends, and report how: Ctrl-C asks all ranks to save, a second one kills them.

The launcher gets its own session, so that the terminal's Ctrl-C reaches only this process, which forwards it
as SIGUSR1: MPI launchers forward that signal, and end at others.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shardtrain.islands.launcher_variables import HOST
from shardtrain.islands.watchdog.step_file import NOTHING
from shardtrain.launch.launcher import Launch
from shardtrain.launch.log_folder import ASKED
from shardtrain.launch.outcome import diagnose_launch
from shardtrain.launch.rank import LOST, guard, kill_group, step_file_path
from shardtrain.launch.rank_end import has_failed, read_ranks
from shardtrain.launch.restarts import LaunchEnd
from shardtrain.system import terminal
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.stop_signals import STOPPING, Repeats, select_handled

if TYPE_CHECKING:
    from shardtrain.launch.elastic import Islands

LOOK_EVERY_SECONDS = 0.1
GRACE_SECONDS = 2.0
HUNG_SECONDS = 9.0
"""Seconds in which the ranks of a hung run must write their stacks and end; a launcher may itself hang."""

LEFT_BEHIND_SECONDS = 3.0
KILLED, KILLED_TEXT = 128 + signal.SIGKILL, "\nkilled; what was saved before is still there\n"


def supervise_once(
    launch: Launch,
    logs: Path,
    environ: Mapping[str, str],
    *,
    time_seconds: float | None = None,
    stop_seconds: float = 120,
) -> LaunchEnd:
    """Run a launch once, and report how it ended.

    Args:
      launch: the command, its environment and files.
      logs: the folder for the logs of its ranks.
      environ: the environment of the command, without the variables that the launch adds.
      time_seconds: time limit, at which the ranks are killed; None disables it.
      stop_seconds: seconds before the time limit at which the ranks are asked to stop.

    Returns:
      How the launch ended, with the exit code of the rank that failed first (128 + n for signal n), or else
      of the launcher.

    Raises:
      OSError: the command cannot be run, or a file cannot be written.
    """
    logs.mkdir(parents=True, exist_ok=True)
    # how ranks ended in an earlier start of this launch
    for path in logs.glob("rank-*.json"):
        path.unlink()
        step_file_path(path).unlink(missing_ok=True)
        path.with_suffix(LOST).unlink(missing_ok=True)
    (logs / ASKED).unlink(missing_ok=True)
    for path, text in launch.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    # run the command, then make sure that no rank outlives it
    ranks = LaunchedRanks(launch, environ, logs)
    with Supervisor(ranks) as supervisor:
        code = supervisor.wait(time_seconds, stop_seconds)
    _end_left_behind(logs)
    # what to report, and whether another start helps, follows from how the ranks ended
    ends = read_ranks(logs)
    step = max((end.last.step for end in ends), default=NOTHING.step)
    if supervisor.killed and not ranks.failed:
        supervisor.tell(KILLED_TEXT)
        return LaunchEnd(code=KILLED, asked=supervisor.asked, step=step)
    outcome = diagnose_launch(ends, Path(launch.command[0]).name, code, supervisor.asked_by)
    supervisor.tell(outcome.text)
    return replace(outcome, asked=supervisor.asked or outcome.asked, step=step)


class Supervisor:
    """Runs processes to their end: the handlers of signals, and the time limit.

    Args:
      processes: what runs.
    """

    def __init__(self, processes: "LaunchedRanks | Islands") -> None:
        self._processes = processes
        self.asked_by: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}
        self._repeats = Repeats()
        self.killed = self.asked = False

    def __enter__(self) -> "Supervisor":
        # first take over the signals: one that comes during the start must reach the ranks, too
        for number in select_handled(STOPPING):
            self._before[number] = signal.signal(number, self._handle_signal)
        try:
            self._processes.start()
        except OSError:
            self._restore()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._processes.poll() is None:
            self._processes.kill()
        self._processes.close()
        self._restore()

    def wait(self, time_seconds: float | None, stop_seconds: float) -> int:
        """Wait for the end; return the exit code.

        Args:
          time_seconds: time limit, at which the processes are killed; None disables it.
          stop_seconds: seconds before the time limit at which they are asked to stop.
        """
        began = time.monotonic()
        while (code := self._processes.poll()) is None:
            self._processes.look(LOOK_EVERY_SECONDS)
            # the time limit: ask for a stop ahead of it, kill at it
            passed = time.monotonic() - began
            if time_seconds is not None and not self.asked and passed > time_seconds - stop_seconds:
                self._ask(f"{stop_seconds} s before the time limit")
            if time_seconds is not None and not self.killed and passed > time_seconds:
                self._kill()
        return code

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self._repeats(number):
            return
        if self.asked:
            self._kill()
        else:
            self.asked_by = signal.Signals(number)
            self._ask(self.asked_by.name)

    def _ask(self, why: str) -> None:
        self.asked = True
        self._processes.ask(self.asked_by)
        self.tell(f"\n{why}: all {self._processes.plural} are asked to stop and save; Ctrl-C kills them\n")

    def _kill(self) -> None:
        self.killed = True
        self._processes.kill()

    def tell(self, text: str) -> None:
        """Print a message, if the terminal still exists."""
        # the terminal may be gone, and then the ranks must still be asked to save
        with contextlib.suppress(OSError):
            terminal.err(text)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]


class LaunchedRanks:
    """The running process of a launcher, which starts the ranks; `elastic.Islands` has the same methods."""

    plural = "ranks"

    def __init__(self, launch: Launch, environ: Mapping[str, str], logs: Path) -> None:
        self._launch, self._environ, self._logs = launch, environ, logs
        self._next_look_seconds = 0.0
        self._failed_seconds: float | None = None
        self._grace_seconds = GRACE_SECONDS
        self.failed = False

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._launch.command,
            env=self._launch.full_environment(self._environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._release = guard(self._process.pid)

    def poll(self) -> int | None:
        if (code := self._process.poll()) is not None:
            # what the launcher printed last
            while self._relay(0):
                pass
        return code

    def look(self, wait_seconds: float) -> None:
        self._relay(wait_seconds)
        self._look_for_failures(time.monotonic())

    def ask(self, asked_by: signal.Signals | None) -> None:
        # record what SIGUSR1 represents; ranks that cannot read this treat it as Ctrl-C
        with contextlib.suppress(OSError):
            replace_file(self._logs / ASKED, (asked_by or signal.SIGINT).name.encode())
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        kill_group(self._process.pid)

    def close(self) -> None:
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._release()

    def _relay(self, wait_seconds: float) -> bool:
        """Copy the launcher's output; it does not own the terminal, so as not to end with it."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        if not select.select([pipe], [], [], wait_seconds)[0]:
            return False
        data = os.read(pipe, 1 << 16)
        rest = data
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(1, rest) :]
        if not data:
            # its end of the pipe is closed, and it still runs
            time.sleep(wait_seconds)
        return bool(data)

    def _look_for_failures(self, now_seconds: float) -> None:
        """End the launcher if a rank has failed: MPI itself does so only after MPI_Init."""
        if self.failed or now_seconds < self._next_look_seconds:
            return
        self._next_look_seconds = now_seconds + 1
        # a failure starts a period of grace, in which MPI or the other ranks' watchdogs end them
        if self._failed_seconds is None and has_failed(self._logs):
            self._failed_seconds = now_seconds
            hung = any(end.last.hung for end in read_ranks(self._logs))
            self._grace_seconds = HUNG_SECONDS if hung else GRACE_SECONDS
        if self._failed_seconds is not None and now_seconds - self._failed_seconds > self._grace_seconds:
            self.failed = True
            self.kill()


def _end_left_behind(logs: Path) -> None:
    """Kill `launch.rank` processes on this host that did not end with their launcher."""
    here = {socket.gethostname(), os.environ.get(HOST)}
    records = [json.loads(path.read_text(encoding="utf-8")) for path in logs.glob("rank-*.json")]
    pids = [record["pid"] for record in records if record["host"] in here]
    deadline = time.monotonic() + LEFT_BEHIND_SECONDS
    while (pids := [pid for pid in pids if _is_keeper(pid)]) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_SECONDS)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_keeper(pid: int) -> bool:
    try:
        return b"shardtrain.launch.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
