"""Sinks of tracking services, by their own libraries: W&B offline, and MLflow with a database."""

import dataclasses
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import wandb
from mlflow.tracking import MlflowClient
from quiet_training import InMemory, random_tokens, train_quietly
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.cli.run_options import TEXTS
from shardtrain.report import sinks
from shardtrain.report.sinks import SINKS, check_installed, open_sinks
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.report.sinks.mlflow import open_mlflow
from shardtrain.report.sinks.tracked_run import TrackedSink, open_tracked, run_options
from shardtrain.report.sinks.wandb import open_wandb
from shardtrain.trainer.config import Run

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")


@pytest.fixture(autouse=True)
def _services_in_the_run_folder(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def history(folder: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    """(step, value) of a metric at MLflow, in the order in which they were logged."""
    client = MlflowClient(f"sqlite:///{folder.resolve() / 'mlflow.db'}")
    found = client.get_metric_history(run_id(folder, "mlflow"), name)
    return [(each.step, each.value) for each in found]


def run_id(folder: Path, service: str) -> str:
    return (folder / f"{service}_run.txt").read_text().split("\n")[0]


class Recorder:
    """A sink of a user, made by a function in the list."""

    def __init__(self) -> None:
        self.opened: list[int | None] = []
        self.steps: list[int] = []

    def __call__(self, folder: Path, resume_after: int | None, report: Any) -> "Recorder":
        self.opened.append(resume_after)
        return self

    def write(self, step: int, values: Any) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.steps.append(-1)


RUN = Run(
    model=TinyConfig(vocab=32),
    data=InMemory(random_tokens()),
    batch=8,
    steps=5,
    log_every=1,
    checkpoints=CheckpointPolicy(every_steps=2),
)


class Killed(Exception):
    """Stands for the end of a process."""


@pytest.mark.full
def test_a_run_that_is_killed_and_resumed_is_one_run_there_and_has_each_step_once(tmp_path, monkeypatch):
    own = Recorder()
    run = dataclasses.replace(RUN, run_dir=tmp_path, sinks=("jsonl", "wandb", "mlflow", own))

    def fail(self: Recorder, step: int, values: Any) -> None:
        self.steps.append(step)
        if step == 3:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "write", fail)
        with pytest.raises(Killed):
            train_quietly(run)
    ids = {service: run_id(tmp_path, service) for service in ("wandb", "mlflow")}
    train_quietly(run)
    assert {service: run_id(tmp_path, service) for service in ("wandb", "mlflow")} == ids
    # it was resumed from step 2: step 3 is logged again to files, and not to the services
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert history(tmp_path) == [(int(line["step"]), line["train/loss"]) for line in lines]
    assert (tmp_path / "wandb_run.txt").read_text() == f"{ids['wandb']}\n1\n2\n3\n4\n5\n"
    assert (own.opened, own.steps) == ([None, 2], [1, 2, 3, -1, 3, 4, 5, -1])
    # one offline folder for each start, all of the same run
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert {path.name.rpartition("-")[2] for path in folders} == {ids["wandb"]}
    first, second = (next(path.glob("*.wandb")).read_bytes() for path in folders)
    for line in lines:
        is_first = line["step"] <= 3
        value = repr(line["train/loss"]).encode()
        assert (value in first, value in second) == (is_first, not is_first)
    # the options of the run are there
    client = MlflowClient(f"sqlite:///{tmp_path.resolve() / 'mlflow.db'}")
    found = client.get_run(ids["mlflow"])
    assert found.data.params["model.vocab"] == "32"
    assert found.info.status == "FINISHED"
    assert b"model.vocab" in first


KILLED = """
import os, signal, sys, time
from pathlib import Path
from shardtrain.report.sinks.wandb import open_wandb

sink = open_wandb(Path(sys.argv[1]), None, print)
for step in (1, 2, 3):
    sink.write(step, {"train/loss": 1000.5 + step})
# W&B's own process writes the file; what has not left this one when it is killed is lost
(path,), deadline = Path(sys.argv[1]).rglob("*.wandb"), time.monotonic() + 300
while time.monotonic() < deadline and not all(b"%.1f" % (1000.5 + n) in path.read_bytes() for n in (1, 2, 3)):
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_wandb_has_the_steps_of_a_run_that_does_not_end(tmp_path, warm_python):
    (tmp_path / "program.py").write_text(KILLED)
    subprocess.run([*warm_python, tmp_path / "program.py", tmp_path], check=False)
    (path,) = tmp_path.rglob("*.wandb")
    assert all(f"{1000.5 + step}".encode() in path.read_bytes() for step in (1, 2, 3))
    assert (tmp_path / "wandb_run.txt").read_text().endswith("\n1\n2\n3\n")


def test_mlflow_has_the_steps_of_a_run(tmp_path):
    sink = open_mlflow(tmp_path, None, print)
    assert sink is not None
    sink.write(1, {"train/loss": 2.0, "grad_norm": math.nan})
    sink.close()
    assert history(tmp_path) == [(1, 2.0)]


def test_a_library_that_is_missing_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ValueError) as error:
        check_installed(("jsonl", "tensorboard", "wandb", "mlflow"))
    assert str(error.value).splitlines()[1:] == [
        "  - wandb needs the library wandb: install it with uv sync --extra wandb in a clone, elsewhere"
        " with pip install 'path/to/shardtrain[wandb]'; or leave wandb out of --sinks",
        "  - mlflow needs the library mlflow: install it with uv sync --extra mlflow in a clone, elsewhere"
        " with pip install 'path/to/shardtrain[mlflow]'; or leave mlflow out of --sinks",
    ]
    run = dataclasses.replace(RUN, run_dir=tmp_path / "run", sinks=("jsonl", "wandb"))
    with pytest.raises(ValueError, match="wandb needs the library wandb"):
        train_quietly(run)
    assert not (tmp_path / "run").exists()


def test_a_service_that_fails_is_an_error_at_the_first_start_and_a_warning_at_the_next(tmp_path, monkeypatch):
    def fail(**options: Any) -> Any:
        raise RuntimeError("api_key not configured\nmore")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(
        ValueError, match="metrics cannot be sent to W&B: RuntimeError: api_key not configured"
    ):
        open_wandb(tmp_path, None, print)
    warnings: list[str] = []
    assert open_wandb(tmp_path, 4, warnings.append) is None
    assert "cannot be sent to W&B" in warnings[0]
    assert "the run continues without it" in warnings[0]
    # sinks that were opened before are closed
    own = Recorder()
    with pytest.raises(ValueError, match="cannot be sent"):
        open_sinks(tmp_path, None, print, ("jsonl", own, "wandb"))
    assert own.steps == [-1]


def test_steps_that_a_service_does_not_take_are_reported_once_and_end_no_run(tmp_path):
    warnings: list[str] = []
    logged = []

    def log(step: int, values: Any) -> None:
        if step in (2, 3):
            raise OSError("no network")
        logged.append(step)

    def finish() -> None:
        raise TimeoutError("no answer")

    sink = TrackedSink("W&B", tmp_path / "run.txt", None, warnings.append)
    sink.start(lambda run_id: ("abc", log, finish))
    for step in (1, 2, 3, 4):
        sink.write(step, {})
    sink.close()
    assert logged == [1, 4]
    assert warnings == [
        "WARNING: W&B did not accept the metrics of step 2: OSError: no network. The run continues, and"
        " metrics.jsonl has them",
        "WARNING: W&B may lack the last metrics: TimeoutError: no answer",
        "WARNING: W&B did not accept the metrics of 2 steps in total",
    ]
    again = TrackedSink("W&B", tmp_path / "run.txt", 1, warnings.append)
    assert (again.run_id, again.last_step) == ("abc", 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc\n1\n12", ("abc", 1)),  # torn
        ("abc\n", ("abc", None)),
        ("", (None, None)),
        ("../abc\n1\n", (None, None)),
        ("abc\nx\n7\n", ("abc", 7)),
    ],
)
def test_the_file_with_the_id_is_read_as_far_as_it_can_be_trusted(text, expected, tmp_path):
    (tmp_path / "run.txt").write_text(text)
    found = TrackedSink("one", tmp_path / "run.txt", 5, pytest.fail)
    assert (found.run_id, found.last_step) == expected
    # without a checkpoint the run is a new one
    assert TrackedSink("one", tmp_path / "run.txt", None, pytest.fail).run_id is None


def test_a_sink_that_is_added_later_begins_with_the_resumed_step(tmp_path):
    steps: list[int] = []
    sink = open_tracked(
        "one",
        tmp_path / "run.txt",
        7,
        print,
        lambda run: ("id", lambda step, values: steps.append(step), print),
    )
    assert sink is not None
    sink.write(8, {})
    sink.close()
    assert steps == [8]


def test_options_come_from_the_run_file(tmp_path):
    assert run_options(tmp_path) == {}
    (tmp_path / "run.txt").write_text("batch = 32\nloss = 'a:b'\nodd = <object>\n")
    assert run_options(tmp_path) == {"batch": 32, "loss": "a:b", "odd": "<object>"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("tensorboard",), "sinks lacks jsonl: from metrics.jsonl a resumed run knows which lines it has"),
        (("jsonl", "wandbb"), "sinks has 'wandbb' (did you mean 'wandb'?)"),
        (("jsonl", "jsonl"), "sinks is jsonl, jsonl; name each once"),
        ("jsonl", "sinks is 'jsonl'; give a list, each item text or a function: sinks=('jsonl',)"),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(given, told):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(RUN, sinks=given)
    assert told in str(error.value)


def test_the_list_is_an_option():
    form = TEXTS["sinks"]
    assert form.read("jsonl, wandb") == ("jsonl", "wandb")
    assert form.write(("jsonl", "wandb")) == "jsonl,wandb"
    assert form.write(("jsonl", Recorder())) == "jsonl,given in Python"
    assert all(name in form.help for name in SINKS)
