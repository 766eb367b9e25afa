"""Real runs that hang: a rank is stopped, leaves, or sleeps in a data source; a sentence, and all end."""

import re
from pathlib import Path

import pytest
from live_processes import alive

from shardtrain.errors.exit_codes import TEMPORARY_FAILURE
from shardtrain.report.sinks.json_lines import read_jsonl

TRAIN = ["train", "tiny.py", "--cpu-devices", "1"]
GONE_SECONDS = 300  # ends what would hang for ever


def hurt():
    """The process that hurt itself."""
    return int(Path("hurt").read_text() or 0)


@pytest.mark.full
def test_of_three_ranks_one_is_stopped(folder, mpirun, started, until):
    """Under a bare mpiexec, which does not notice."""
    options = ["--watch.silence-seconds", "8"]
    process = started([*mpirun(3), *TRAIN, *options], HURT="stop", HURT_RANK="1")
    until(lambda: Path("hurt").exists() and hurt(), process)
    pid = hurt()
    assert process.wait(GONE_SECONDS) == TEMPORARY_FAILURE
    err = Path("err").read_text()
    named = r"shardtrain watchdog: island 1 \(host \S+\) has sent no heartbeat for \d+ s: its process "
    assert len(re.findall(named, err)) == 1, err
    assert re.search(rf"{named}{pid} is stopped \(by SIGSTOP\)\n", err), err
    assert re.search(r"its last heartbeat: at (step \d+|the start), in '.*' for", err)
    assert re.search(r"island 2 \(host \S+\): at step \d+, in '", err)
    assert "--watch.silence-seconds 1" in err
    stacks = Path("run/stacks.txt").read_text()
    assert f"(stacks of the ranks that could write them: {folder}/run/stacks.txt)" in err
    assert {line.split(",")[1] for line in stacks.splitlines() if line[:3] == "==="} == {" rank 0", " rank 2"}
    assert "in run_loop" in stacks
    until(lambda: not alive(pid), seconds=GONE_SECONDS)


def test_launch_tells_it_restarts_and_goes_on(folder, started, until, warm_shardtrain):
    words = [*warm_shardtrain, "launch", "--islands", "2", "--logs", "logs"]
    words += ["--restarts", "2", "--", *TRAIN, "--watch.silence-seconds", "8"]
    process = started(words, HURT="stop", HURT_RANK="1")
    until(lambda: Path("hurt").exists() and hurt(), process)
    until(lambda: "restart 1 of 2" in Path("err").read_text(), process, GONE_SECONDS)
    # the launcher may still be ending it
    until(lambda: not alive(hurt()), process, GONE_SECONDS)
    assert process.wait(900) == 0, Path("err").read_text()
    err, out = Path("err").read_text(), Path("out").read_text()
    assert err.count("=== the run hung: island 0 on ") == 1
    assert re.search(r" ===\nshardtrain watchdog: island 1 .* has sent no heartbeat for", err)
    assert re.search(r"\nlaunch: ended with exit code 75 at step \d+; restart 1 of 2 in 1 s\n", err)
    assert "resumed from step " in out
    # the first start had done what the second was asked for
    assert read_jsonl(Path("run/metrics.jsonl"))[-1]["step"] >= 2


@pytest.mark.full
def test_a_rank_that_reads_for_ever_is_to_blame(folder, mpirun, started):
    """And not the one that waits for it."""
    options = ["--watch.stall-seconds", "4"]
    process = started([*mpirun(2), *TRAIN, *options], HURT="sleep", HURT_RANK="1")
    assert process.wait(900) == TEMPORARY_FAILURE
    err = Path("err").read_text()
    text = r"watchdog: island 1 \(host \S+\) makes no progress: at step \d+, in 'reading a batch' for"
    assert re.search(text, err), err
    assert re.search(r"\n +island 0 \(host \S+\): at step \d+, in 'combine gradients' for ", err)
    assert re.search(r"allowed are 4 s; if it was only slow: --watch.stall-seconds \d+\n", err)
    stacks = Path("run/stacks.txt").read_text()
    assert "tiny.py" in stacks
    assert "in __getitem__" in stacks


@pytest.mark.full
def test_a_run_that_is_alone_is_watched(folder, started, warm_python):
    words = [*warm_python, "-m", "shardtrain", *TRAIN, "--watch.stall-seconds", "4"]
    assert started(words, HURT="sleep", HURT_RANK="0").wait(900) == TEMPORARY_FAILURE
    text = r"watchdog: the run on host \S+ makes no progress: at step \d+, in 'reading a batch' for"
    assert re.search(text, Path("err").read_text())
    assert "in __getitem__" in Path("run/stacks.txt").read_text()
