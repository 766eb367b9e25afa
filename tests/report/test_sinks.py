"""The contract of metric sinks, held against every entry of the registry."""

import math
import os
import struct

import pytest

from shardtrain.report.sinks import DEFAULT_SINKS, EXTRAS, SINKS, open_sinks
from shardtrain.report.sinks.json_lines import METRICS, read_jsonl
from shardtrain.system import log_file

# of a deprecated feature of sqlalchemy, which MLflow uses
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

FILES = [name for name in SINKS if name not in EXTRAS]
"""The sinks that write files themselves; the others send to a service, here one in the run folder."""

VALUES = {"train/loss": 2.5, "heldout/loss": math.inf, "grad_norm": math.nan}


@pytest.fixture(autouse=True)
def _services_in_the_run_folder(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def contents(folder):
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


def marks(step):
    """Metrics whose names and values are of this step alone; a float32 has the values exactly."""
    return {f"loss_of_{step}/a": 1000.5 + step, f"rate_of_{step}/b": 2000.5 + step}


def holds(content, name, value):
    forms = (str(value).encode(), *(struct.pack(form, value) for form in ("<f", "<d", ">d")))
    return name.encode() in content and any(form in content for form in forms)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name == "mlflow")) for name in SINKS]
)
def test_every_name_and_value_of_every_step_is_in_a_file_also_after_a_restore(name, tmp_path):
    warnings = []
    for resume_after, steps in ((None, (1, 2, 3)), (2, (4, 5))):
        sink = SINKS[name](tmp_path, resume_after, warnings.append)
        assert sink is not None
        for step in steps:
            sink.write(step, VALUES | marks(step))
        sink.close()
    assert warnings == []
    for step in (1, 2, 4, 5):
        for metric, value in marks(step).items():
            assert any(holds(content, metric, value) for content in contents(tmp_path)), (metric, value)
    # step 3 was after the restored one: it is not in a file to which the run goes on writing
    for content in contents(tmp_path) if name in FILES else ():
        assert not (b"loss_of_3/a" in content and b"loss_of_5/a" in content)


def test_a_run_writes_to_all_sinks_and_knows_its_last_step(tmp_path):
    sinks, last_step = open_sinks(tmp_path, None, print)
    assert last_step is None
    sinks.write(3, VALUES)
    sinks.close()
    assert read_jsonl(tmp_path / METRICS)[0]["train/loss"] == 2.5
    assert len(list(tmp_path.iterdir())) == len(DEFAULT_SINKS)
    again, last_step = open_sinks(tmp_path, 3, print)
    again.close()
    assert last_step == 3


@pytest.mark.parametrize("name", FILES)
def test_each_step_is_in_the_file_when_write_returns(name, tmp_path):
    """A run that is killed keeps its metrics."""
    sink = SINKS[name](tmp_path, None, print)
    assert sink is not None
    sizes = [size_of(tmp_path)]
    for step in (1, 2, 3):
        sink.write(step, VALUES)
        sizes.append(size_of(tmp_path))
    assert sizes == sorted(set(sizes))
    sink.close()


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_reported_and_does_not_end_the_run(name, tmp_path, monkeypatch):
    reports = []
    sink = SINKS[name](tmp_path, None, reports.append)
    assert sink is not None
    fstat = os.fstat

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_file.os, "fstat", full)
    sink.write(1, VALUES)
    monkeypatch.setattr(log_file.os, "fstat", fstat)
    assert ["No space left on device" in report for report in reports] == [True]
    sink.write(2, VALUES)
    sink.close()
    assert "is written again" in reports[1]


@pytest.mark.parametrize("resume_after", [None, 2])
def test_metrics_that_another_process_has_taken_over_are_not_written(resume_after, tmp_path):
    said: list[str] = []

    def open_shared(step):
        return open_sinks(tmp_path, step, said.append, ["jsonl"], is_shared=True)[0]

    first = open_shared(None)
    for step in (1, 2, 3):
        first.write(step, marks(step))
    second = open_shared(resume_after)
    second.write(3, marks(3))
    # it was only frozen, and wakes up in a write
    first.write(4, marks(4))
    first.close()
    second.write(5, marks(5))
    kept = range(1, 1 + (resume_after or 0))
    assert [line["step"] for line in read_jsonl(tmp_path / METRICS)] == [*kept, 3, 5]
    # one that is deleted by hand is created again
    (tmp_path / METRICS).unlink()
    second.write(6, marks(6))
    second.close()
    assert [line["step"] for line in read_jsonl(tmp_path / METRICS)] == [6]
    assert len(said) == 1
