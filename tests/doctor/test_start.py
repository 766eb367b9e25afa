"""The start of MPI is watched from outside: a process that waits or ends in it still has its last words."""

import subprocess
import sys

PROGRAM = """
import os, time
from shardtrain.doctor.start import watch_mpi_start
with watch_mpi_start("rank 1 of 2 (host a)", {seconds}):
    {inside}
print("came through")
"""


def run(inside, seconds=200.0):
    program = PROGRAM.format(inside=inside, seconds=seconds)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_start_that_hangs_is_ended_with_who_and_what_to_do():
    done = run("time.sleep(100)", seconds=0.3)
    assert done.returncode == -9
    assert done.stderr.startswith("shardtrain doctor: rank 1 of 2 (host a): MPI did not start within 0 s")


def test_a_start_that_ends_the_process_is_told():
    done = run("os._exit(16)")
    assert done.returncode == 16
    assert "the process ended while MPI started" in done.stderr


def test_a_start_that_goes_well_leaves_nothing():
    done = run("pass")
    assert (done.returncode, done.stdout, done.stderr) == (0, "came through\n", "")
