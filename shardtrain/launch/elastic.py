"""Start elastic islands on this machine, each a process of its own without MPI, and start again what dies.

`local.py` makes their commands, `supervise.py` has the signals and the time limit.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtrain.errors.exit_codes import DONE, TEMPORARY_FAILURE, USAGE_ERROR
from shardtrain.islands.binding import bind_cpus
from shardtrain.launch.launcher import Launch
from shardtrain.launch.local import place_here
from shardtrain.launch.rank import Follower, guard, kill_group
from shardtrain.launch.rank_end import error_text, read_log
from shardtrain.launch.restarts import Restarts
from shardtrain.launch.supervise import KILLED, KILLED_TEXT, Supervisor
from shardtrain.system import terminal
from shardtrain.system.atomic_write import open_own
from shardtrain.system.stop_signals import STOPPING

LEFT = {128 + number for number in STOPPING}
"""Exit codes of an island that a signal asked to leave, and that did."""


def supervise_islands(
    launches: Sequence[Launch],
    logs: Path,
    restarts: Restarts,
    environ: Mapping[str, str],
    *,
    time_seconds: float | None = None,
    stop_seconds: float = 120,
) -> int:
    """Run elastic islands until all have ended.

    Args:
      launches: the command of each island.
      logs: the folder for a log of each.
      restarts: number and spacing of the restarts of islands that die, of all together.
      environ: the environment of the commands, without the variables that they add.
      time_seconds: time limit, at which the islands are killed; None disables it.
      stop_seconds: seconds before the time limit at which the islands are asked to leave.

    Returns:
      0 if an island ended with 0: the run is done. Else 75 if the last one ended with 75, or else the code
      of the first that failed, or of the signal for which all have left.

    Raises:
      OSError: a command cannot be run, or a log cannot be written.
    """
    islands = Islands(launches, logs, restarts, environ)
    with Supervisor(islands) as supervisor:
        islands.tell = supervisor.tell
        code = supervisor.wait(time_seconds, stop_seconds)
    if supervisor.killed:
        supervisor.tell(KILLED_TEXT)
        return KILLED
    if supervisor.asked:
        # the islands may have got another signal for it
        return code if code not in LEFT or not supervisor.asked_by else 128 + supervisor.asked_by
    if code not in (DONE, TEMPORARY_FAILURE) and islands.first_failure:
        supervisor.tell(islands.first_failure[1])
    return code


@dataclass(frozen=True, kw_only=True)
class _Running:
    """The process of an island."""

    process: subprocess.Popen
    log: Path
    log_from: int
    follower: Follower
    release: Callable[[], None]


class Islands:
    """The processes of elastic islands, some of which wait for their restart."""

    plural = "islands"

    def __init__(
        self, launches: Sequence[Launch], logs: Path, restarts: Restarts, environ: Mapping[str, str]
    ) -> None:
        self._launches, self._logs, self._restarts, self._environ = launches, logs, restarts, environ
        self._running: dict[int, _Running] = {}
        self._due_seconds: dict[int, float] = {}
        self._num_restarts = 0
        self._codes: list[int] = []
        self._asked = False
        # (exit code, report)
        self.first_failure: tuple[int, str] | None = None
        self.tell: Callable[[str], object] = terminal.err

    def start(self) -> None:
        for number in range(len(self._launches)):
            self._start(number)

    def look(self, wait_seconds: float) -> None:
        for number, due_seconds in list(self._due_seconds.items()):
            if due_seconds <= time.monotonic():
                del self._due_seconds[number]
                self._start(number)
        for each in self._running.values():
            each.follower.look()
        time.sleep(wait_seconds)

    def poll(self) -> int | None:
        for number, each in list(self._running.items()):
            if (returncode := each.process.poll()) is not None:
                del self._running[number]
                self._end(number, each, returncode)
        return None if self._running or self._due_seconds else self._choose_code()

    def ask(self, asked_by: signal.Signals | None) -> None:
        # the signals for which every program of elastic islands leaves, a loop of one's own too
        number = asked_by if asked_by is signal.SIGINT else signal.SIGTERM
        self._asked = True
        self._due_seconds.clear()
        for each in self._running.values():
            each.process.send_signal(number)

    def kill(self) -> None:
        self._due_seconds.clear()
        for each in self._running.values():
            kill_group(each.process.pid)

    def close(self) -> None:
        for each in self._running.values():
            each.process.wait()
            each.release()

    def _start(self, number: int) -> None:
        launch, log = self._launches[number], self._logs / f"rank-{number}.log"
        environment = {"PYTHONUNBUFFERED": "1", **launch.full_environment(self._environ)}
        before, cores = os.sched_getaffinity(0), bind_cpus(place_here(number, len(self._launches)))
        with open_own(log, append=True) as file:
            log_from = file.tell()
            try:
                # it inherits the cores before it starts a thread
                os.sched_setaffinity(0, cores or before)
                process = subprocess.Popen(
                    launch.command,
                    env=environment,
                    cwd=launch.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            finally:
                os.sched_setaffinity(0, before)
        prefix = f"[island {number}] " if len(self._launches) > 1 else ""
        self._running[number] = _Running(
            process=process,
            log=log,
            log_from=log_from,
            follower=Follower(log, log_from, prefix),
            release=guard(process.pid),
        )

    def _end(self, number: int, ended: _Running, returncode: int) -> None:
        """Record the end of an island, and decide whether to start it again."""
        # end data workers and other children of the program
        kill_group(ended.process.pid)
        ended.follower.finish()
        ended.release()
        code = returncode if returncode >= 0 else 128 - returncode
        self._codes.append(code)
        if code == DONE or self._asked or returncode in LEFT:
            return
        how = f"exit code {code}" if returncode >= 0 else f"killed by {signal.Signals(-returncode).name}"
        error = error_text(read_log(ended.log, ended.log_from))
        text = f"\n=== island {number} failed first: {how} ===\n{error}\n\nwhole log: {ended.log}\n"
        self.first_failure = self.first_failure or (code, text)
        # a mistake of the user, or a run that is done: another start does not help
        if code == USAGE_ERROR or DONE in self._codes or not self._restarts.most:
            then = ""
        elif self._num_restarts == self._restarts.most:
            then = f"; all {self._num_restarts} restarts are used"
        else:
            pause = self._restarts.pause_seconds(self._num_restarts)
            self._num_restarts += 1
            self._due_seconds[number] = time.monotonic() + pause
            then = f"; restart {self._num_restarts} of {self._restarts.most} in {pause:g} s"
        self.tell(f"launch: island {number} ended: {how}{then}\n")

    def _choose_code(self) -> int:
        if DONE in self._codes:
            return DONE
        *_, last = self._codes
        if last == TEMPORARY_FAILURE or self._asked or self.first_failure is None:
            return last
        return self.first_failure[0]
