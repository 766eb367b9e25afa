"""Runs on real islands: the same losses as alone, and resumed they are as if never interrupted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from tiny_language_model import TinyConfig

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.islands.options import Across
from shardtrain.plan.island_exchange import island_merges
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.placement import state_specs

PROGRAM = Path(__file__).parents[1] / "programs" / "train_islands.py"


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
    mpiexec(1, PROGRAM, text, folder, "1")
    return read_jsonl(folder / "mean" / "metrics.jsonl")


SUMS_BYTES = 8
"""Of the loss and the examples of a step, which are added up beside the gradients."""


def merges(synchronisation, reduce_dtype="float32"):
    """What two islands send, see `programs/train_islands.py`."""
    model = from_nnx(TinyConfig(num_layers=2))
    layout = Layout(mesh={"data": 1})
    specs = state_specs(model, optax.sgd(1.0), layout, axis_sizes(layout.mesh, 1))
    across: Any = {"bucket_bytes": 3000, "reduce_dtype": reduce_dtype}
    return island_merges(synchronisation, specs, 2, Across(**across))


def same_losses(got, expected):
    assert [line["step"] for line in got] == [line["step"] for line in expected]
    for a, b in zip(got, expected, strict=True):
        names = {name for name in b if "loss" in name or name == "grad_norm"}
        assert names <= a.keys()
        for name in names:
            np.testing.assert_allclose(a[name], b[name], rtol=2e-5, err_msg=f"step {b['step']} {name}")


@pytest.mark.parametrize(
    ("processes", "devices"),
    [
        # an island of several processes trains and resumes as one of several devices does
        pytest.param("1,2", 1, id="1 and 2 processes"),
        pytest.param("1", 2, id="2 islands of 2 devices", marks=pytest.mark.full),
    ],
)
def test_islands_train_as_one_device_does_and_resume(processes, devices, text, alone, mpiexec, tmp_path):
    num_ranks = 2 if processes == "1" else 3
    found = mpiexec(num_ranks, PROGRAM, text, tmp_path, processes, devices=devices)
    same_losses(read_jsonl(tmp_path / "mean" / "metrics.jsonl"), alone)
    assert json.loads(found[0]) == ["part-0-of-2", "part-1-of-2"]
    start = json.loads((tmp_path / "mean" / "environment.jsonl").read_text().splitlines()[0])
    assert [rank["rank"] for rank in start["ranks"]] == list(range(num_ranks))
    assert start["mpi"]["threads"] == "multiple"
    lines = read_jsonl(tmp_path / "mean" / "metrics.jsonl")
    per_device = lines[-1]["tokens_per_second"] / (num_ranks * devices)
    assert lines[-1]["tokens_per_second_per_device"] == pytest.approx(per_device)
    num_parameters = 256 * 8 + 2 * 2 * 8 * 16
    # in each of six steps the gradients, as inspect prints them, and sums of the loss: in float32, and half
    # of that in the four steps in bfloat16, with losses that are near
    narrow = read_jsonl(tmp_path / "narrow" / "metrics.jsonl")
    for found, dtype, num_bytes in ((lines, "float32", 4), (narrow, "bfloat16", 2)):
        printed = merges(Synchronisation(), dtype).most
        assert printed == num_bytes * num_parameters
        assert sum(line["bytes/islands"] for line in found) == len(found) * (printed + SUMS_BYTES)
    assert (len(lines), len(narrow)) == (6, 4)
    for a, b in zip(narrow, lines, strict=False):
        np.testing.assert_allclose(a["train/loss"], b["train/loss"], rtol=1e-3)
    assert narrow[3]["train/loss"] != lines[3]["train/loss"]
    # those of the layers are sent while that of the table is computed
    programs = "gradients: 2 programs, the last layers first; after each is sent: 1.0 KiB, 4.0 KiB"
    assert programs in (tmp_path / "narrow.txt").read_text()
    assert sum(line["seconds/step"] for line in lines) > 0
    assert sum(line["seconds/islands"] for line in lines) > 0
    # the table is larger than a bucket of 3000 bytes, and its gradient is sent first
    printed = (tmp_path / "mean.txt").read_text()
    assert "bridge: 2 buckets of 8.0 KiB at most, in the order of sending: 8.0 KiB, 2.0 KiB" in printed
    seconds = [item for line in lines for item in line.items() if item[0].startswith("bucket_seconds/")]
    assert {name for name, _ in seconds} == {"bucket_seconds/0", "bucket_seconds/1"}
    assert all(x > 0 for _, x in seconds)
    mean, lines = lines, read_jsonl(tmp_path / "own-whole" / "metrics.jsonl")
    # one synchronous step, whose gradients are averaged in float32, as those of the run above
    first = lines[0]
    for name in ("train/loss", "grad_norm"):
        np.testing.assert_allclose(first[name], mean[0][name], rtol=1e-5)
    # two merges in int8, a byte a parameter: halves and their scales, and the norms of every layer
    own = Synchronisation(by="int8+adasum", on="deltas", every=3, overlap=2, synchronous_steps=1)
    printed = merges(own)
    assert printed.synchronous < first["bytes/islands"] < printed.synchronous + 100
    assert num_parameters < printed.most < 1.1 * num_parameters
    sent = sum(line["bytes/islands"] for line in lines[1:])
    assert 2 * printed.most < sent < 2 * printed.most + 100
    metrics = lines[-1]
    assert 0 < metrics["orthogonality"] < 1.5
    assert "orthogonality/blocks/up/1" in metrics
