"""What a rank leaves, however it ends."""

import subprocess
import sys

from shardtrain.islands.watchdog.activity import activity_record
from shardtrain.islands.watchdog.step_file import NOTHING, STEP_FILE, LastStep, read_step_file

PROGRAM = """
import os, signal, sys
from shardtrain.islands.watchdog.activity import activity_record
activity = activity_record()
for step in range(1, 8): activity.begin_step(step)
if sys.argv[1] == "hung": activity.step_file.write_hung()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_step_of_a_killed_process_is_known(tmp_path):
    path = tmp_path / "rank-0.step"
    assert read_step_file(path) == NOTHING
    for how, hung in (("crash", False), ("hung", True)):
        words = [sys.executable, "-c", PROGRAM, how]
        assert subprocess.run(words, env={STEP_FILE: str(path)}, check=False).returncode == -9
        assert read_step_file(path) == LastStep(7, hung)


def test_a_file_that_cannot_be_is_none(tmp_path):
    activity = activity_record({STEP_FILE: str(tmp_path / "no" / "folder")})
    activity.begin_step(3)
    assert (activity.step, activity.step_file) == (3, None)
    (tmp_path / "short").write_bytes(b"12")
    assert read_step_file(tmp_path / "short") == NOTHING
