"""The presets: examples with the strategies of published systems, as launched, of smaller models."""

import subprocess
from pathlib import Path

import pytest

from shardtrain.report.sinks.json_lines import read_jsonl

ROOT = Path(__file__).parents[1]
SMALL = ["--model.embed", "16", "--model.num-heads", "2", "--model.mlp", "32"]
EXAMPLES = {
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
@pytest.mark.parametrize(
    ("example", "num_islands", "preset"),
    [
        ("digits_resnet", 2, "hetseq"),
        ("bert_text", 2, "hetseq"),
        ("translation_text", 2, "hetseq"),
        ("digits_resnet", 4, "hypar_flow"),
        ("bert_text", 2, "ddp"),
    ],
)
def test_it_is_one_device_on_islands_and_learns(example, num_islands, preset, trained):
    options = [*EXAMPLES[example], "--steps", "4", "--evaluate-every", "4"]
    one, _ = trained(example, 1, *options)
    strategy = ["--strategy", str(ROOT / f"meshes/{preset}.toml")]
    islands, printed = trained(example, num_islands, *options, *strategy)
    for line, expected in zip(islands, one, strict=True):
        assert line["train/loss"] == pytest.approx(expected["train/loss"], rel=2e-5)
    assert islands[-1]["heldout/loss"] == pytest.approx(one[-1]["heldout/loss"], rel=2e-5)
    assert min(line["train/loss"] for line in islands[1:]) < islands[0]["train/loss"]
    assert "rank   island" in printed


@pytest.mark.full
def test_adasum_combines_the_gradients_of_islands(trained):
    options = [*EXAMPLES["bert_text"], "--steps", "4", "--optimizer.name", "lamb"]
    lines, _ = trained("bert_text", 2, *options, "--strategy", str(ROOT / "meshes/adasum.toml"))
    assert all(0.5 <= value <= 1.5 for name, value in lines[0].items() if name.startswith("orthogonality"))
    assert any(name.startswith("orthogonality") for name in lines[0])
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]


@pytest.mark.full
def test_a_large_batch_and_its_rate_follow_the_replicas(trained):
    options = [*EXAMPLES["digits_resnet"], "--steps", "16", "--optimizer.learning-rate.warmup", "4"]
    options += ["--scaling.rate", "linear", "--scaling.batch", "--scaling.steps"]
    options += ["--optimizer.learning-rate.peak", "0.02"]
    lines, printed = trained(
        "digits_resnet", 2, *options, "--strategy", str(ROOT / "meshes/large_batch.toml")
    )
    assert "scaled to 2 replicas: batch 16 -> 32, steps 16 -> 8, peak rate 0.02 -> 0.04 (linear)" in printed
    assert lines[-1]["step"] == 8
    assert min(line["train/loss"] for line in lines[1:]) < lines[0]["train/loss"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("example", "preset", "options"),
    [
        # of groups of one channel the gradient of a bias is only rounding
        ("digits_vgg", "accpar", ("--model.filters", "4", "--model.hidden", "8", "--model.num-groups", "2")),
        ("digits_resnet", "flexflow", ("--model.filters", "8")),
    ],
)
def test_operators_with_shardings_of_their_own_are_one_device(example, preset, options, trained):
    rate = ["--optimizer.name", "sgd", "--optimizer.learning-rate.peak", "0.01"]
    options = [*options, *rate, "--batch", "16", "--steps", "3"]
    one, _ = trained(example, 1, *options)
    Path("run1").rename("one")
    layout = ["--cpu-devices", "4", "--strategy", str(ROOT / f"meshes/{preset}.toml")]
    four, printed = trained(example, 1, *options, *layout)
    assert "layout checked" in printed
    for line, expected in zip(four, one, strict=True):
        assert line["train/loss"] == pytest.approx(expected["train/loss"], rel=2e-5)


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
