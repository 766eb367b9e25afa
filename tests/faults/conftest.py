"""Runs that are to be hurt: tiny ones, under mpiexec or launch, each with devices of its own."""

import importlib.util
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = """
import os, signal, sys, threading, time
from pathlib import Path
from shardtrain.trainer.config import Run
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.data import Text
from shardtrain.islands.rank_environment import find_rank_environment
from tiny_language_model import TinyConfig

HERE = Path(__file__).parent
HURT, FIRST = os.environ.get("HURT"), not (HERE / "hurt").exists()


def hurt():
    metrics = HERE / "run/metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text().count("\\n") >= 3):
        time.sleep(0.05)
    (HERE / "hurt").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


RANK = find_rank_environment(os.environ).rank
MINE = HURT and FIRST and RANK == int(os.environ["HURT_RANK"])


class Slow:
    fingerprint = "slow"

    def __init__(self, source): self.source = source
    def __len__(self): return len(self.source)
    def __getitem__(self, index):
        if MINE and (HERE / "run/metrics.jsonl").is_file(): time.sleep(1000)
        return self.source[index]


class SlowText(Text):
    def train(self, folder): return Slow(super().train(folder))


def run() -> Run:
    if MINE and HURT == "stop":
        threading.Thread(target=hurt, daemon=True).start()
    data = SlowText if HURT == "sleep" else Text
    return Run(
        model=TinyConfig(),
        data=data(paths=(HERE / "text.txt",), seq=8),
        run_dir=HERE / "run",
        log_every=1,
        batch=8,
        evaluate_every=None,
        checkpoints=CheckpointPolicy(every_steps=2),
        steps=1_000_000 if FIRST else 1,
    )
"""
CHEAP = """
from pathlib import Path

import optax
from flax import nnx
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy
from shardtrain.data import Text
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.recovery import Recovery


class Bigram(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(nnx.initializers.normal()(rngs.params(), (256, 256)))

    def __call__(self, tokens):
        return self.table[tokens]


def run() -> Run:
    return Run(
        model=Bigram,
        data=Text(paths=(Path("text.txt"),), seq=8, heldout_fraction=0),
        optimizer=optax.sgd(0.5, momentum=0.9),
        strategy=Strategy(layout=Layout(unnamed="replicate")),
        run_dir=Path("run"),
        log_every=1,
        batch=8,
        evaluate_every=None,
        recovery=Recovery(fingerprint_every=None),
        checkpoints=CheckpointPolicy(every_steps=2, keep=2),
        steps=1_000_000,
    )
"""
LONG_SECONDS = 900
OUTPUT = (Path("err"), Path("out"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a run that hurts itself on rank HURT_RANK as HURT says: stop, sleep."""
    write_text(tmp_path)
    (tmp_path / "tiny.py").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_text(folder):
    letters = random.Random(0).choices("abcdefgh \n", k=3000)
    (folder / "text.txt").write_text("".join(letters))


@pytest.fixture(scope="module")
def cheap(tmp_path_factory):
    """A folder with a run whose lives cost half a second each, see `lives.py`."""
    folder = tmp_path_factory.mktemp("cheap")
    write_text(folder)
    (folder / "tiny.py").write_text(CHEAP)
    return folder


@pytest.fixture(scope="module")
def make_lives(cheap):
    """The class of `lives.py`, for that folder."""
    spec = importlib.util.spec_from_file_location("lives", Path(__file__).with_name("lives.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *before: module.Lives(cheap, *before)


@pytest.fixture(scope="module")
def program(make_lives):
    with make_lives() as lives:
        yield lives


@pytest.fixture
def lives(program):
    """The program, with nothing printed yet; a life that a failed test left ends."""
    program.outputs.clear()
    yield program
    program.end()


@pytest.fixture
def mpirun(warm_python):
    """The words that start a run on so many ranks."""
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = shutil.which("mpiexec", path=beside)
    assert command is not None
    return lambda num_ranks: [command, "-n", str(num_ranks), *warm_python, "-m", "shardtrain"]


@pytest.fixture
def started():
    """Start words; what they print goes to the files `out` and `err`."""
    processes = []

    def start(words, **environment):
        with Path("out").open("w") as out, Path("err").open("w") as err:
            process = subprocess.Popen(words, stdout=out, stderr=err, env={**os.environ, **environment})
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def until():
    """Wait for something while a process runs."""

    def until(condition, process=None, seconds=LONG_SECONDS):
        deadline = time.monotonic() + seconds
        while not condition():
            assert process is None or process.poll() is None, (
                Path("err").read_text() + Path("out").read_text()
            )
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.05)

    return until
