"""A process that XLA ends leaves a mark of the program, which the next start reads, says and removes."""

import json
import os
import signal
import subprocess
import time
from functools import partial

import pytest

from shardtrain.system.run_lock import hold_lock
from shardtrain.system.stop_signals import StopSignals
from shardtrain.trainer.run_folder import MARK, ProgramMark, remove_mark, take_mark

ABORTING = """
import os
import sys
from pathlib import Path
import jax
import shardtrain as st
from tiny_language_model import TinyConfig

layout, folder, text = st.Layout(mesh={"data": 8}, zero=1), *map(Path, sys.argv[1:])

def abort():
    # as a check of XLA that fails: no exception, no handler
    mark = folder / "program.json"
    if mark.exists() and "the training step" in mark.read_text():
        os.abort()

def loss(apply, batch):
    jax.debug.callback(abort)
    return st.next_token_loss(apply, batch)

st.train(st.Run(
    model=TinyConfig(), data=st.Text(seq=8, paths=(text,)), loss=loss,
    strategy=st.Strategy(layout=layout), batch=8, steps=1, run_dir=folder,
))
"""


def test_a_mark_is_there_as_long_as_its_program_first_runs(tmp_path):
    mark, path = ProgramMark(tmp_path, "--zero 1"), tmp_path / MARK
    there = []
    step = mark.first_run("the step", lambda state, batch: there.append(path.exists()) or 1.0)
    assert [step(0, [1]), step(0, [1]), step(0, [[1, 2]])] == [1.0, 1.0, 1.0]
    # another shape is another program
    assert there == [True, False, True]
    assert not path.exists()
    with pytest.raises(KeyError, match="the step"), mark.running("the step"):
        {}[json.loads(path.read_text())["program"]]
    assert not path.exists()


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    with ProgramMark(tmp_path / "new", "").running("the step"):
        assert (tmp_path / "new" / MARK).exists()
    assert not (tmp_path / "new").exists()


def test_who_interrupts_the_start_leaves_no_mark(tmp_path):
    ended = []
    stop = StopSignals(ended.append)
    stop.before_end = partial(remove_mark, tmp_path)
    with stop, ProgramMark(tmp_path, "").running("the step"):
        os.kill(os.getpid(), signal.SIGINT)
        while not ended:
            time.sleep(0.01)
        assert not (tmp_path / MARK).exists()


def test_ranks_that_write_nothing_mark_nothing():
    with ProgramMark(None, "").running("the step"):
        pass
    assert ProgramMark(None, "").first_run("the step", max) is max


NO_MARKS = ("[]", '{"program": 1}', '{"program": "a\\nb", "options": "", "jax": ""}')


@pytest.mark.parametrize("content", NO_MARKS)
def test_a_mark_of_somebody_else_is_removed(content, tmp_path):
    (tmp_path / MARK).write_text(content)
    assert "is no mark of a program" in (take_mark(tmp_path) or "")
    assert take_mark(tmp_path) is None


def test_a_mark_of_a_run_that_goes_on_is_left(tmp_path):
    with hold_lock(tmp_path), ProgramMark(tmp_path, "").running("the step"):
        assert take_mark(tmp_path) is None
        assert (tmp_path / MARK).exists()


def test_the_start_after_an_abort_says_which_program_it_was(warm_python, tmp_path):
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("the quick brown fox jumps over the lazy dog " * 20)
    (tmp_path / "aborting.py").write_text(ABORTING)
    command = [*warm_python, str(tmp_path / "aborting.py"), str(folder), str(text)]
    starts = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2)]
    assert all(done.returncode < 0 for done in starts), starts
    said = ["an earlier start of this run ended" in done.stdout for done in starts]
    assert said == [False, True]
    (line,) = [line for line in starts[1].stdout.splitlines() if "an earlier start" in line]
    assert "while the training step was compiled or run for the first time (jax " in line
    assert "--mesh data=8 --zero 1" in line
    assert take_mark(folder)
    assert not (folder / MARK).exists()
