"""Metrics beside a loss: from a function in a run file to the lines of a run."""

import io
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from shardtrain import Run, add_metrics, cross_entropy, next_token_loss, train
from shardtrain.cli.run_options import parse_run
from shardtrain.functional.metrics import TopAccuracy, next_token_accuracy
from shardtrain.report.sinks.json_lines import read_jsonl

RUN_FILE = """
from pathlib import Path
from shardtrain import Layout, Regularized, Run, Strategy, Text, next_token_loss, add_metrics
from shardtrain.functional.metrics import next_token_accuracy
from tiny_language_model import TinyConfig

def run():
    return Run(
        model=TinyConfig(seq=4, num_layers=2),
        data=Text(paths=(Path({text!r}),), seq=4, heldout_fraction=0.2),
        loss=add_metrics(Regularized(next_token_loss, z_loss=0.1), accuracy=next_token_accuracy),
        strategy=Strategy(layout=Layout(mesh={{"pipeline": 2, "data": 4}}), accumulate=2),
        batch=8, steps=2, log_every=1, evaluate_every=1,
    )
"""


@pytest.mark.full
def test_a_metric_of_a_run_file_is_logged_for_training_and_heldout_data(tmp_path, monkeypatch):
    """By a pipeline too, whose last stage alone has the outputs."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"ab" * 100)
    (tmp_path / "metric_run.py").write_text(RUN_FILE.format(text=Path(text).as_posix()))
    run, _ = parse_run("train", [f"{tmp_path / 'metric_run.py'}", "--run-dir", f"{tmp_path / 'run'}"])
    assert isinstance(run, Run)
    train(run, Console(file=io.StringIO()))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert 0 <= line["train/accuracy"] <= 1
        assert 0 <= line["heldout/accuracy"] <= 1
        # 0.1 times the square of log(256) at least, before anything is learned
        assert line["train/loss"] > line["train/cross_entropy"] + 2
        assert line["heldout/loss"] == line["heldout/cross_entropy"] < line["train/loss"] - 2
    text = (tmp_path / "run" / "run.txt").read_text()
    assert "loss.metrics.accuracy" in text
    assert "loss.loss.z_loss" in text


def test_the_loss_stays_the_same_and_padding_counts_nothing():
    logits = jnp.log(jnp.array([[[0.1, 0.9], [0.8, 0.2]], [[0.1, 0.9], [0.1, 0.9]]]))
    batch = {"tokens": jnp.array([[0, 1, 1], [0, 1, 1]]), "weights": jnp.array([1.0, 0.0])}
    total, count, metrics = add_metrics(next_token_loss, accuracy=next_token_accuracy)(
        lambda tokens: logits, batch
    )
    np.testing.assert_array_equal((total, count), next_token_loss(lambda tokens: logits, batch))
    assert tuple(map(float, metrics["accuracy"])) == (1, 2)


def test_metrics_need_one_call_of_the_model_and_names_of_their_own():
    def twice(apply, batch):
        return cross_entropy(apply(batch["x"]) + apply(batch["x"]), batch["label"])

    def named(apply, batch):
        total, count = cross_entropy(apply(batch["x"]), batch["label"])
        return total, count, {"mine": (total, count)}

    batch = {"x": jnp.ones((2, 3)), "label": jnp.array([0, 1])}
    metric = lambda outputs, batch: (outputs.sum(), 1.0)  # noqa: E731
    with pytest.raises(ValueError, match="but the loss calls it 2 times; return them by the loss"):
        add_metrics(twice, mine=metric)(lambda x: x, batch)
    with pytest.raises(ValueError, match="the loss returns metrics mine itself; use other names"):
        add_metrics(named, mine=metric)(lambda x: x, batch)


def test_the_likeliest_classes_are_counted_once_each():
    logits = jnp.array([[5.0, 4, 3, 2], [1, 1, 1, 1], [0, 9, 8, 7], [jnp.nan] * 4])
    label, weights = jnp.array([2, 1, 0, 0]), jnp.array([1.0, 1, 1, 0])
    found = [TopAccuracy(k)(logits, {"label": label, "weights": weights}) for k in (1, 2, 3, 4)]
    assert [(float(right), float(count)) for right, count in found] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    shares = 0.6 * jnp.eye(4)[label] + 0.1
    assert [float(x) for x in TopAccuracy(3)(logits, {"label": shares, "weights": weights})] == [2, 3]
    with pytest.raises(ValueError, match="k is 0; use 1 or more"):
        TopAccuracy(0)


@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_top_accuracy_counts_no_label_of_few_bits_and_no_broken_row_as_right(dtype):
    logits = np.zeros((4, 300), np.float32)
    logits[:, 266] = 1  # 266 is 10 in 8 bits
    logits[1] = np.nan
    label = np.array([10, 10, 0, 255]).astype(dtype)
    right, count = TopAccuracy(2)(jnp.asarray(logits), {"label": jnp.asarray(label), "weights": jnp.ones(4)})
    # label 0 is the second, by its number; 10 and 255 stand behind it
    assert (float(right), float(count)) == (1.0, 4.0)
    with pytest.raises(ValueError, match=r"k is 1\.5"):
        TopAccuracy(1.5)  # type: ignore[arg-type]
