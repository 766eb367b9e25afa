"""`shardtrain launch --islands N -- train ...` as a user runs it: trains, stops, dies, and says why not."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_processes import alive

from shardtrain import cli
from shardtrain.errors.exit_codes import TEMPORARY_FAILURE
from shardtrain.report.sinks.json_lines import read_jsonl

RUN = """
import os
from pathlib import Path

import jax

from shardtrain.trainer.config import Run
from shardtrain.data import Text
from shardtrain.functional.loss import next_token_loss
from shardtrain.islands.rank_environment import find_rank_environment
from shardtrain.islands.watchdog.stragglers import StepTimer
from tiny_language_model import TinyConfig

HERE = Path(__file__).parent
now = [0.0]


def slow_loss(apply, batch):
    rank = find_rank_environment(os.environ).rank
    seconds = float(os.environ["SECONDS_A_ROW"].split(",")[rank]) * len(batch["tokens"])

    def pass_time():
        now[0] += seconds

    jax.debug.callback(pass_time)
    return next_token_loss(apply, batch)


def run() -> Run:
    if "SECONDS_A_ROW" in os.environ:
        StepTimer.__init__.__defaults__ = (lambda: now[0],)
    mlp = 16 + find_rank_environment(os.environ).rank * int(os.environ.get("WIDER", "0"))
    return Run(
        model=TinyConfig(mlp=mlp),
        data=Text(paths=(HERE / "text.txt",), seq=8),
        loss=slow_loss if "SECONDS_A_ROW" in os.environ else next_token_loss,
        run_dir=HERE / "run",
        log_every=1,
        batch=8,
        steps=1_000_000,
    )
"""
BINDING = 5  # rank, island, host, pid, devices and more
GONE_SECONDS = 300
LONG_SECONDS = 900
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    letters = random.Random(0).choices("abcdefgh \n", k=3000)
    (tmp_path / "text.txt").write_text("".join(letters))
    (tmp_path / "tiny.py").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start(warm_shardtrain):
    """Start two islands of one device each; what they print goes to the files `out` and `err`."""

    def start(*options, shardtrain=warm_shardtrain, **environment):
        words = [*shardtrain, "launch", "--islands", "2", "--logs", "logs", "--"]
        devices = [] if "--cpu-devices" in options else ["--cpu-devices", "1"]
        words += ["train", "tiny.py", *devices, *options]
        with Path("out").open("w") as out, Path("err").open("w") as err:
            return subprocess.Popen(words, stdout=out, stderr=err, env={**os.environ, **environment})

    return start


def ended(process, seconds=LONG_SECONDS):
    try:
        process.wait(seconds)
    finally:
        process.kill()
    return process.returncode, Path("out").read_text(), Path("err").read_text()


def until_steps(process):
    """Until the run has logged two steps."""
    metrics, deadline = Path("run/metrics.jsonl"), time.monotonic() + LONG_SECONDS
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, Path("err").read_text()
        assert time.monotonic() < deadline, "it never came to its second step"
        time.sleep(0.05)


def pids(out):
    """By island, from the table that is printed at the start."""
    rows = [line.split() for line in out.splitlines()]
    return {int(row[1]): int(row[3]) for row in rows if len(row) > BINDING and row[0] == row[1]}


def test_it_trains_stops_when_asked_and_goes_on_with_an_island_without_rows(folder, start):
    process = start()
    until_steps(process)
    process.send_signal(signal.SIGHUP)
    code, out, err = ended(process)
    assert code == 128 + signal.SIGHUP, err
    assert "SIGHUP: all ranks are asked to stop and save" in err
    assert "stopped by SIGHUP: islands 0, 1\n" in err
    (saved,) = Path("run/checkpoints").glob("step_*")
    step = int(saved.name.removeprefix("step_"))
    assert f"stopped by SIGHUP after step {step}, which is saved; the same command resumes from it\n" in out
    assert read_jsonl(Path("run/metrics.jsonl"))[-1]["step"] == step
    assert pids(out).keys() == {0, 1}

    # one row for two islands
    options = ["--steps", str(step + 2), "--batch", "1", "--combine", "adasum"]
    code, out, err = ended(start(*options))
    assert code == 0, err
    assert out.count("rank   island") == 1
    assert out.count("parameters: ") == 1
    assert f"resumed from step {step} in " in out
    last = read_jsonl(Path("run/metrics.jsonl"))[-1]
    assert last["step"] == step + 2
    # island 1 has nothing to say: what is combined is island 0's gradient
    assert last["orthogonality"] == pytest.approx(1)


@pytest.mark.full
def test_the_time_limit_stops_all_at_one_step_and_asks_to_come_again(folder, start):
    """It is over when the first step is done. These ranks start as a user's do."""
    plain = [sys.executable, "-m", "shardtrain"]
    code, out, err = ended(start("--time-limit", "0:2", "--time-margin", "1", shardtrain=plain))
    assert code == TEMPORARY_FAILURE, err
    assert err.endswith("stopped by the time limit: islands 0, 1\n")
    (saved,) = Path("run/checkpoints").glob("step_*")
    step = int(saved.name.removeprefix("step_"))
    assert step == read_jsonl(Path("run/metrics.jsonl"))[-1]["step"]
    assert (
        f"stopped by the time limit after step {step}, which is saved; the same command resumes from it"
        in out
    )


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(each, marks=pytest.mark.full) for each in CRASHES)],
)
def test_a_killed_rank_is_named_and_the_others_end(number, folder, start):
    process = start()
    until_steps(process)
    before = pids(Path("out").read_text())
    os.kill(before[1], number)
    code, _, err = ended(process, GONE_SECONDS)
    assert code == 128 + number, err
    assert "=== island 1 failed first: rank 1 on " in err
    assert f"killed by {number.name}" in err
    assert not any(map(alive, before.values()))


def test_islands_that_differ_are_told_apart_before_anything_is_saved(folder, start):
    code, out, err = ended(start(WIDER="8"))
    assert code == cli.USER_ERROR
    # what rank 0 printed before it ended may be there too
    report = err.partition(" failed first: ")[2]
    assert report.count("islands do not agree, so nothing was started:\n") == 1
    assert re.search(r"\n  model.mlp: 16 on island 0 \(host .*\); 24 on island 1 \(host .*\)\n", err)
    assert "parameters/blocks/down: float32 (1, 16, 8) on island 0 (host " in err
    assert "Traceback" not in out + err
    left = [path.name for path in Path("run").iterdir()]
    # the text, as numbers, and nothing of a run
    assert all(name.startswith("text-") for name in left), left


def test_a_mistake_ends_all_islands_with_one_message(folder, start):
    code, out, err = ended(start("--shares", "1,2,3"))
    assert code == cli.USER_ERROR
    headline, _, rest = err.partition(" ===\nshardtrain train: ")
    assert "failed first: rank " in headline
    assert "shares has 3 weights, and there are 2 islands" in rest
    assert "Traceback" not in out + err
    assert "sharded over" not in out + err
    assert not Path("run/checkpoints").exists()


def test_shares_follow_the_measured_speed_and_losses_stay_those_of_one_device(folder, start):
    options = ["--steps", "40", "--batch", "32"]
    # a device of the second island takes 1.5 times as long for a row, and it has one, not two
    unequal = ["--cpu-devices", "2,1", "--mesh", "data=-1"]
    code, out, err = ended(start(*options, *unequal, SECONDS_A_ROW="0.004,0.006"))
    assert code == 0, err
    assert "islands differ (2 x cpu; 1 x cpu): their rows follow the measured speed" in out
    changes = re.findall(r"after step (\d+): rows of the islands from now on: (\d+), (\d+)", out)
    assert 1 <= len(changes) <= 3, out
    step, first, second = map(int, changes[-1])
    assert step <= 36
    assert first + second == 32
    assert 22 <= first <= 26
    islands = [line["train/loss"] for line in read_jsonl(Path("run/metrics.jsonl"))]
    assert cli.main(["train", "tiny.py", *options, "--run-dir", "one"]) == 0
    one = [line["train/loss"] for line in read_jsonl(Path("one/metrics.jsonl"))]
    assert islands == pytest.approx(one, rel=2e-5)
    # it goes on with the rows that it had
    longer = ["--steps", "42", "--batch", "32", *unequal]
    code, out, err = ended(start(*longer, SECONDS_A_ROW="0.004,0.006"))
    assert code == 0, err
    assert f"rows of the islands, as they were measured before: {first}, {second}" in out
    assert len(read_jsonl(Path("run/metrics.jsonl"))) == len(one) + 2
