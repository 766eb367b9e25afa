"""Runs whose islands hold stages: the losses of one device, and resumed they are as if never interrupted."""

from pathlib import Path

import numpy as np
import pytest

from shardtrain.report.sinks.json_lines import read_jsonl

PROGRAM = Path(__file__).parents[1] / "programs" / "train_stages.py"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """37 windows of training text: an epoch of 5 batches of 8, the last one short."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 123, 37 * 8 + 20, np.uint8).tobytes())
    return path


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory, mpiexec):
    """The metrics of the run on one device."""
    folder = tmp_path_factory.mktemp("alone")
    mpiexec(1, PROGRAM, text, folder, 1)
    return read_jsonl(folder / "whole" / "metrics.jsonl")


# the step of two pipelines of two stages is tested in train_step/test_stage_step.py
@pytest.mark.parametrize(
    ("num_ranks", "devices"),
    [pytest.param(2, 2, id="2 stages"), pytest.param(4, 1, id="2 pipelines of 2", marks=pytest.mark.full)],
)
def test_stages_train_as_one_device_does_and_resume(num_ranks, devices, text, alone, mpiexec, tmp_path):
    found = mpiexec(num_ranks, PROGRAM, text, tmp_path, 2, devices=devices)
    assert found == ["step_00000006.part-0-of-2 step_00000006.part-1-of-2"] * num_ranks
    same_metrics(tmp_path / "whole", alone)
    # stages of other blocks, or islands that are replicas, go on with what two stages saved
    same_metrics(tmp_path / "otherwise", alone)


def same_metrics(run, expected):
    got = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in got] == [line["step"] for line in expected]
    for a, b in zip(got, expected, strict=True):
        for name in {name for name in b if "loss" in name or name in ("grad_norm", "learning_rate")}:
            np.testing.assert_allclose(a[name], b[name], rtol=2e-5, err_msg=f"step {b['step']} {name}")
