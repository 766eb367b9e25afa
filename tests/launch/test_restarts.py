"""Starting again: how often, when it is given up; and launches of programs that crash once, or always."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardtrain.launch.restarts import LaunchEnd, Restarts, run_again

ROOT = Path(__file__).parents[2]


def ended(code, step=0, asked=False):
    return LaunchEnd(code=code, asked=asked, step=step)


@pytest.mark.parametrize(
    ("ends", "code", "pauses", "text"),
    [
        ([ended(1, 7), ended(75, 9), ended(0)], 0, [1, 2], "exit code 75 at step 9; restart 2 of 3 in 2 s"),
        (
            [ended(1, 7), ended(137, 7)],
            137,
            [1],
            "step 7 failed twice in a row, and would fail again",
        ),
        ([ended(1, 7), ended(1, 9), ended(1, 7), ended(5, 8)], 5, [1, 2, 4], "all 3 restarts are used"),
        (
            [ended(1), ended(1)],
            1,
            [1],
            "it failed before its first step twice in a row: given up",
        ),
        ([ended(2)], 2, [], ""),
        ([ended(130, 7, asked=True)], 130, [], ""),
    ],
)
def test_when_it_is_started_again(ends, code, pauses, text):
    told, slept, starts = [], [], []

    def start(number):
        starts.append(number)
        return ends[number]

    assert run_again(start, Restarts(most=3), told.append, slept.append) == code
    assert slept == pauses
    assert starts == list(range(len(ends)))
    assert text in "".join(told)
    assert bool(told) == bool(text)


@pytest.mark.parametrize(
    ("changes", "text"), [({"most": -1}, "restarts is -1"), ({"backoff_seconds": 61.0}, "use 0 to 60")]
)
def test_numbers_that_cannot_be(changes, text):
    with pytest.raises(ValueError, match=text):
        Restarts(**changes)


START = """
import os, sys
from pathlib import Path
from shardtrain.launch import local, mpi
from shardtrain.launch.job import Job
from shardtrain.launch.restarts import Restarts, run_again
from shardtrain.launch.supervise import supervise_once
job = Job(arguments=("program.py",), islands=2, program=(sys.executable,), logs=Path("logs"))
launch = local.launch_by(job, mpi.find_mpiexec(), os.environ)
environ = dict(os.environ)
restarts = Restarts(most=3, backoff_seconds=0.1)
sys.exit(run_again(lambda number: supervise_once(launch, job.logs, environ), restarts, sys.stderr.write))
"""
RANKS = """
import os, signal, sys, time
from pathlib import Path
from shardtrain.islands.watchdog.activity import activity_record
from shardtrain.islands.rank_environment import find_rank_environment
rank, marks = find_rank_environment(os.environ).rank, activity_record()
starts = Path(f"starts-{rank}")
with starts.open("a") as file: file.write(".")
number = len(starts.read_text())
# what one of them does at once ends the other, which is to have started
both = [Path(f"starts-{each}") for each in (0, 1)]
while not all(each.exists() and len(each.read_text()) >= number for each in both): time.sleep(0.02)
for step in range(1, 6): marks.begin_step(step)
"""


def launched(folder, program):
    (folder / "program.py").write_text(RANKS + program)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", START]
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=900, check=False
    )
    return done, [len((folder / f"starts-{rank}").read_text()) for rank in (0, 1)]


def test_a_rank_that_crashes_once_is_started_again(tmp_path):
    program = "if number == 1 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    done, starts = launched(tmp_path, program + "if number == 1: time.sleep(60)\n")
    assert (done.returncode, starts) == (0, [2, 2]), done.stderr
    assert "island 1 failed first: rank 1 on " in done.stderr
    assert "killed by SIGKILL" in done.stderr
    assert "launch: ended with exit code 137 at step 5; restart 1 of 3 in 0.1 s\n" in done.stderr


@pytest.mark.full
def test_one_that_crashes_at_the_same_step_is_given_up(tmp_path):
    done, starts = launched(tmp_path, "if rank == 0: sys.exit(7)\ntime.sleep(60)\n")
    assert (done.returncode, starts) == (7, [2, 2]), done.stderr
    text = "step 5 failed twice in a row, and would fail again: given up after 1 of 3 restarts\n"
    assert done.stderr.endswith(f"launch: {text}")


def test_a_time_limit_is_no_crash_of_a_rank(tmp_path):
    """Ranks that end with 75 in order are asked again as a whole, and none is said to have failed."""
    done, starts = launched(tmp_path, "sys.exit(75 if number == 1 else 0)\n")
    assert (done.returncode, starts) == (0, [2, 2]), done.stderr
    assert "failed first" not in done.stderr
    assert "stopped by the time limit: islands 0, 1\n" in done.stderr
    assert "ended with exit code 75 at step 5; restart 1 of 3" in done.stderr
