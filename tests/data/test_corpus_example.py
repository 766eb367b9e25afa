"""The example of pretraining end to end: Parquet shards, a tokenizer trained on them, windows, a resume."""

import dataclasses
import io
from pathlib import Path

import pyarrow.parquet
import pytest
from rich.console import Console
from tiny_language_model import TinyConfig

from shardtrain.cli.run_file import load_run
from shardtrain.data.token_manifest import read_manifest
from shardtrain.data.tokenizer import open_tokenizer
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.train import train

EXAMPLE = Path(__file__).parents[2] / "examples" / "corpus_pretraining.py"


@pytest.mark.full
def test_a_corpus_is_tokenized_by_its_own_tokenizer_learned_and_resumed(tmp_path, one_device):
    example = load_run(str(EXAMPLE))
    data = dataclasses.replace(example.data, vocab=300, sample_bytes=100_000, seq=16, packing="joined")
    model = TinyConfig(vocab=300, seq=16, embed=16, mlp=32)
    run = dataclasses.replace(example, model=model, data=data, batch=64, evaluate_every=None, log_every=5)
    rate = Schedule(name="constant", peak=2e-2, warmup=0)
    run = dataclasses.replace(run, optimizer=Optimizer(learning_rate=rate), run_dir=tmp_path / "run")
    for steps in (25, 40):
        train(dataclasses.replace(run, steps=steps), Console(file=io.StringIO()))
    shards = sorted((tmp_path / "run/shards").glob("*.parquet"))
    assert len(shards) > 1
    (tokens,) = (tmp_path / "run").glob("tokens-*")
    manifest = read_manifest(tokens)
    texts = [text for path in shards for text in pyarrow.parquet.read_table(path)["text"].to_pylist()]
    assert manifest.num_documents == sum(map(bool, texts))
    assert manifest.vocab == 300
    # documents come back from their tokens
    tokenizer = open_tokenizer(str(tmp_path / "run/tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode([texts[0]])[0].tolist()) == texts[0]
    losses = {line["step"]: line["train/loss"] for line in read_jsonl(tmp_path / "run/metrics.jsonl")}
    assert max(losses) == 40
    assert losses[40] < losses[5] - 0.5
