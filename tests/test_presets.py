"""The presets: examples with the strategies of HetSeq and HetPipe, as launched, of smaller models."""

import subprocess
from pathlib import Path

import pytest

from shardtrain.report.sinks.json_lines import read_jsonl

ROOT = Path(__file__).parents[1]
SMALL = ["--model.embed", "16", "--model.num-heads", "2", "--model.mlp", "32"]
HETSEQ = {
    # the first steps of Adam divide rounding by gradients that are almost 0
    "digits_resnet": [
        *("--model.depth", "11", "--model.filters", "4", "--batch", "16"),
        *("--optimizer.name", "sgd", "--optimizer.learning-rate.peak", "0.1"),
    ],
    "bert_text": [*SMALL, "--model.num-layers", "1", "--data.data.seq", "32", "--batch", "8"],
    "translation_text": [
        *(*SMALL, "--model.num-encoder-layers", "1", "--model.num-decoder-layers", "1"),
        *("--batch", "256", "--optimizer.learning-rate.peak", "0.02"),
    ],
}


@pytest.fixture
def trained(warm_shardtrain, tmp_path, monkeypatch):
    """Train an example with a few options; returns its lines of metrics and what was printed."""
    monkeypatch.chdir(tmp_path)

    def train(example, islands, *options):
        launch = ["launch", "--islands", str(islands), "--logs", "logs", "--"] if islands > 1 else []
        words = ["train", str(ROOT / "examples" / f"{example}.py"), "--cpu-devices", "1", *options]
        words += [
            "--run-dir",
            f"run{islands}",
            "--log-every",
            "1",
            "--evaluate-batches",
            "2",
            "--sinks",
            "jsonl",
        ]
        done = subprocess.run(
            [*warm_shardtrain, *launch, *words], capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return read_jsonl(tmp_path / f"run{islands}" / "metrics.jsonl"), done.stdout

    return train


@pytest.mark.full
@pytest.mark.parametrize("example", ["digits_resnet", "bert_text", "translation_text"])
def test_hetseq_is_one_device_on_islands_and_learns(example, trained):
    options = [*HETSEQ[example], "--steps", "4", "--evaluate-every", "4"]
    one, _ = trained(example, 1, *options)
    islands, printed = trained(example, 2, *options, "--strategy", str(ROOT / "meshes/hetseq.toml"))
    for line, expected in zip(islands, one, strict=True):
        assert line["train/loss"] == pytest.approx(expected["train/loss"], rel=2e-5)
    assert islands[-1]["heldout/loss"] == pytest.approx(one[-1]["heldout/loss"], rel=2e-5)
    assert islands[-1]["train/loss"] < islands[0]["train/loss"]
    assert "rank   island" in printed


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [1, 2])
def test_hetpipe_trains_virtual_workers_in_waves(num_workers, trained):
    """Each of two islands; `trainer/test_waves_of_stages.py` has two workers."""
    small = ["--model.filters", "4", "--model.hidden", "8", "--batch", "16", "--accumulate", "2"]
    lines, printed = trained(
        "digits_vgg", 2 * num_workers, *small, "--steps", "8", "--strategy", str(ROOT / "meshes/hetpipe.toml")
    )
    # islands 0 and 1 are a worker: blocks are cut in two, by their work
    assert "blocks " in printed
    # 4 steps a wave, one wave ahead
    assert max(line["staleness"] for line in lines) <= 1 * 4 + 4 - 1
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 2
    assert losses[1] < losses[0]
