"""The environment of every start of a run: a line each, what ranks have in common once, and no secret."""

import json
import os

import jax
import pytest
from quiet_training import train_quietly
from tiny_language_model import TinyConfig

from shardtrain.data import Text
from shardtrain.trainer.config import Run
from shardtrain.trainer.run_folder import ENVIRONMENT, append_line, describe_rank, make_start_record


def lines(folder):
    return [json.loads(line) for line in (folder / ENVIRONMENT).read_text().splitlines()]


def test_every_start_of_a_run_appends_its_environment(tmp_path, monkeypatch, one_device):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "hidden-word")
    monkeypatch.setenv("SHARDTRAIN_API_KEY", "hidden-word")
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(97, 122)) * 20)
    run = Run(model=TinyConfig(), data=Text(paths=(text,), seq=8), batch=8, steps=1, run_dir=tmp_path / "run")
    for _ in range(2):
        train_quietly(run)
    first, second = lines(tmp_path / "run")
    assert first["packages"]["jax"] == jax.__version__
    assert first["mpi"] is None
    assert first["variables"]["NCCL_DEBUG"] == "WARN"
    assert first["variables"]["XLA_FLAGS"] == os.environ["XLA_FLAGS"]
    assert "hidden-word" not in (tmp_path / "run" / ENVIRONMENT).read_text()
    (rank,) = first["ranks"]
    assert (rank["pid"], rank["devices"]) == (
        os.getpid(), [{"platform": "cpu", "kind": "cpu", "memory_bytes": None, "number": 8}],
    )  # fmt: skip
    assert list(first["hosts"]) == [rank["host"]]
    assert first["hosts"][rank["host"]]["cores"] == os.cpu_count()
    assert {**first, "time": ""} == {**second, "time": ""}
    assert first["time"] <= second["time"]


def test_what_ranks_have_in_common_is_there_once(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    one = describe_rank(None)
    other = {**one, "rank": 1, "variables": {**one["variables"], "CUDA_VISIBLE_DEVICES": "1"}}
    third = {**other, "rank": 2, "host": "b", "of_host": {"system": "another"}}
    record = make_start_record([one, other, third], None)
    assert [rank["variables"] for rank in record["ranks"]] == [{}, *[{"CUDA_VISIBLE_DEVICES": "1"}] * 2]
    assert record["variables"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert list(record["hosts"]) == [one["host"], "b"]
    assert record["hosts"]["b"] == {"system": "another"}
    assert all("of_host" not in rank for rank in record["ranks"])


def test_a_line_that_a_crash_cut_short_spoils_no_other(tmp_path):
    path = tmp_path / ENVIRONMENT
    path.write_text('{"a": 1}\n{"b"')
    append_line(path, '{"c": 3}')
    append_line(path, '{"d": 4}')
    assert path.read_text() == '{"a": 1}\n{"b"\n{"c": 3}\n{"d": 4}\n'


def test_a_file_that_cannot_be_written_is_only_reported(tmp_path, one_device):
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_bytes(bytes(range(97, 122)) * 20)
    folder.mkdir()
    (folder / ENVIRONMENT).symlink_to(tmp_path / "elsewhere")
    run = Run(model=TinyConfig(), data=Text(paths=(text,), seq=8), batch=8, steps=1, run_dir=folder)
    trained, printed, _ = train_quietly(run)
    assert trained.step == 1
    assert "environment.jsonl cannot be written: " in printed
    assert "is a link, which is not followed; remove it; the run continues" in " ".join(printed.split())
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "name", ["HOME", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "JAX_TOKEN", "UCX_PASSWORD"]
)
def test_variables_that_are_not_on_the_list_are_not_written(name, monkeypatch):
    monkeypatch.setenv(name, "hidden-word")
    assert name not in describe_rank(None)["variables"]
