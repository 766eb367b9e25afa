"""`python -m shardtrain.launch.rank LOGS -- PROGRAM ...`: run one rank's program and keep its log.

It works under any launcher. The program writes directly to LOGS/rank-N.log, so that no output is lost however
the rank ends; its lines are copied to standard output, with a prefix for ranks other than 0. How the rank
ended is recorded in LOGS/rank-N.json for `outcome.py`.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from shardtrain.errors.exit_codes import TEMPORARY_FAILURE
from shardtrain.islands.rank_environment import RankEnvironment, find_rank_environment
from shardtrain.islands.rank_placement import PROCESSES, RankPlacement, find_placement, parse_processes
from shardtrain.islands.watchdog.step_file import STEP_FILE, read_step_file
from shardtrain.launch.log_folder import ASKED
from shardtrain.system import terminal
from shardtrain.system.atomic_write import open_own, replace_file
from shardtrain.system.stop_signals import write_raw

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LOOK_EVERY_SECONDS = 0.05
USAGE_ERROR, NOT_FOUND = 2, 127
LOST = ".lost"
"""Suffix of the file with the time at which the process that keeps a rank's log was lost."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a rank's program.

    Returns:
      Its exit code, or 128 + the number of the signal that ended it. 0 if it stopped because a signal or the
      time limit asked it to: at another code launchers kill the other ranks, which may still be saving.
    """
    parser = argparse.ArgumentParser(prog="shardtrain.launch.rank", description=__doc__)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--usr1", default="USR1", metavar="NAME", help="the signal that SIGUSR1 represents")
    own, *program = _split(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(own)
    if not program:
        parser.error("the program is missing: LOGS -- python -m shardtrain train ...")
    try:
        environment = find_rank_environment(os.environ)
        processes = parse_processes(os.environ.get(PROCESSES, "1"))
        placement = find_placement(environment.rank, environment.size, processes)
    except ValueError as mistake:
        terminal.err(f"shardtrain.launch.rank: {mistake}\n")
        return USAGE_ERROR
    close_listeners()
    try:
        keeper = Keeper(options.logs, environment, placement, signal.Signals[f"SIG{options.usr1}"])
    except OSError as error:
        terminal.err(
            f"shardtrain.launch.rank: the log of rank {environment.rank} cannot be written: {error}\n"
        )
        return USAGE_ERROR
    return keeper.run(program)


def close_listeners() -> None:
    """Close the listening sockets that a launcher left open: MPICH's listens on all addresses."""
    with contextlib.suppress(FileNotFoundError):  # a system without /proc
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it is no socket, or the one by which the folder was listed
                found = socket.socket(fileno=int(name))
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                os.close(found.detach()) if listens else found.detach()


def _split(arguments: Sequence[str]) -> list:
    """Return [the words before the first --, *the words after it]."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return [arguments[:at], *arguments[at + 1 :]]


def line_prefix(environment: RankEnvironment, placement: RankPlacement) -> str:
    """Return the prefix of the lines of a rank; the output of rank 0 has none.

    >>> environment = RankEnvironment(launcher="none", rank=1, size=3, local_rank=1, local_size=3, host="a")
    >>> line_prefix(environment, RankPlacement(island=1, num_islands=2, process=0, num_processes=2))
    '[island 1.0] '
    """
    return f"[island {placement.name}] " if environment.rank else ""


class Keeper:
    """Runs one program: writes its output to the log, forwards signals to it, and records how it ended."""

    def __init__(
        self, logs: Path, environment: RankEnvironment, placement: RankPlacement, usr1: signal.Signals
    ) -> None:
        self._environment, self._usr1 = environment, usr1
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"rank-{environment.rank}.log"
        self._record_path = logs / f"rank-{environment.rank}.json"
        self._step_file = step_file_path(self._record_path).resolve()
        self._lost = self._record_path.with_suffix(LOST)
        for of_an_earlier_start in (self._step_file, self._lost):
            of_an_earlier_start.unlink(missing_ok=True)
        open_own(self._log, append=True).close()
        names = ("rank", "size", "host")
        self._record: dict[str, Any] = {name: getattr(environment, name) for name in names} | vars(placement)
        self._record |= dict.fromkeys(("asked", "code", "signal", "end_seconds"))
        self._record["log_from"] = self._log.stat().st_size
        self._prefix = line_prefix(environment, placement)
        self._asked: list[signal.Signals] = []
        self._asked_path = logs / ASKED
        self._child: subprocess.Popen | None = None

    def run(self, program: Sequence[str]) -> int:
        """Run a program to its end; return the exit code for this process."""
        # signals are passed on from the start, and the record tells the launcher that this rank exists
        parent = os.getppid()
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        self._write_record(pid=os.getpid(), start_seconds=time.time())
        try:
            child = self._child = self._start(program)
        except OSError as error:
            text = f"shardtrain.launch.rank: {program[0]} cannot be run: {error.strerror or error}\n"
            with contextlib.suppress(OSError), open_own(self._log, append=True) as log:
                log.write(text.encode())
            self._write_record(code=NOT_FOUND, end_seconds=time.time())
            return NOT_FOUND
        # signals that came before there was a program
        for number in list(self._asked):
            child.send_signal(number)
        release = guard(child.pid, lost=self._lost)
        follow = Follower(self._log, self._record["log_from"], self._prefix)
        # show the log while the program runs; end it if nobody is left to end it
        while child.poll() is None:
            follow.look()
            # the launcher died without ending this rank
            if self._environment.launcher != "none" and os.getppid() != parent:
                self._record["orphaned"] = True
                kill_group(child.pid)
            time.sleep(LOOK_EVERY_SECONDS)
        # end data workers and other children of the program
        kill_group(child.pid)
        follow.finish()
        release()
        return self._record_end(child.returncode)

    def _start(self, program: Sequence[str]) -> subprocess.Popen:
        environment = {"PYTHONUNBUFFERED": "1", **os.environ, STEP_FILE: str(self._step_file)}
        with open_own(self._log, append=True) as log:
            # a session of its own: a signal to this process's group reaches it once, forwarded from here
            return subprocess.Popen(
                program, stdout=log, stderr=log, env=environment, start_new_session=True, close_fds=False
            )

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        meant = self._represented_signal() if number == signal.SIGUSR1 else signal.Signals(number)
        self._asked.append(meant)
        self._record["asked"] = meant.name
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, meant)

    def _represented_signal(self) -> signal.Signals:
        """Return the signal that SIGUSR1 represents: the one that the launch received, if recorded."""
        try:
            return signal.Signals[self._asked_path.read_text(encoding="utf-8").strip()]
        except (OSError, KeyError):
            return self._usr1

    def _record_end(self, returncode: int) -> int:
        code = returncode if returncode >= 0 else 128 - returncode
        try:
            self._write_record(
                code=code, signal=-returncode if returncode < 0 else None, end_seconds=time.time()
            )
        except OSError as error:
            write_raw(f"shardtrain.launch.rank: {self._record_path} cannot be written: {error}\n")
        # a stop that was asked for is a success, so that the launcher does not end the other ranks
        at_time_limit = code == TEMPORARY_FAILURE and not read_step_file(self._step_file).hung
        return 0 if at_time_limit or code in {128 + number for number in self._asked} else code

    def _write_record(self, **news: Any) -> None:
        self._record |= news
        replace_file(self._record_path, json.dumps(self._record).encode())


def step_file_path(record: Path) -> Path:
    """Return the path of the step file that belongs to a rank's record.

    >>> step_file_path(Path("logs/rank-3.json")).name
    'rank-3.step'
    """
    return record.with_suffix(".step")


class Follower:
    """Copies new lines of a log to standard output; without a prefix also unfinished lines."""

    def __init__(self, log: Path, start: int, before: str) -> None:
        self._file = log.open("rb")
        self._file.seek(start)
        self._before = before.encode()
        self._rest = b""

    def look(self) -> None:
        """Copy new lines."""
        before = self._rest
        while new := self._file.read(1 << 16):
            *lines, self._rest = (self._rest + new).split(b"\n")
            self._write([self._line(line) for line in lines])
        # unchanged since the last call: a progress bar or a prompt, not a line being written
        if self._rest and self._rest == before and not self._before:
            self._write([self._rest])
            self._rest = b""

    def finish(self) -> None:
        """Copy the rest, also an unfinished line."""
        self.look()
        if self._rest:
            self._write([self._line(self._rest) if self._before else self._rest])
        self._file.close()

    def _line(self, line: bytes) -> bytes:
        if not self._before:
            return line + b"\n"
        # of a progress bar, which is redrawn in one line, only the last state
        return self._before + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"

    def _write(self, lines: Sequence[bytes]) -> None:
        """Write lines in pieces that a pipe takes at once, so that launchers do not mix parts of lines."""
        pieces = [b""]
        for line in lines:
            if len(pieces[-1]) + len(line) > select.PIPE_BUF:
                pieces.append(b"")
            pieces[-1] += line
        # the reader is gone: the log continues
        with contextlib.suppress(OSError):
            for piece in pieces:
                while piece:
                    piece = piece[os.write(1, piece) :]


def guard(group: int, lost: Path | None = None):
    """End a process group when this process dies, however it dies.

    Args:
      group: the process group.
      lost: file for the time of death, in seconds since the epoch; None writes none.

    Returns:
      A function that cancels the guard.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            # not reached by signals to the parent's group, and without its open files
            os.setsid()
            os.closerange(0, read)
            os.closerange(read + 1, os.sysconf("SC_OPEN_MAX"))
            if os.read(read, 1) == b"":
                seconds = time.time()
                kill_group(group)
                if lost is not None:
                    replace_file(lost, str(seconds).encode())
        finally:
            os._exit(0)
    os.close(read)

    def release() -> None:
        os.write(write, b".")
        os.close(write)
        os.waitpid(pid, 0)

    return release


def kill_group(group: int) -> None:
    """Kill a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
