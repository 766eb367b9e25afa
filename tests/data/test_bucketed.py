"""Documents of similar lengths in a batch: each once, in few shapes, and the same batches after a resume."""

import io
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.data import Corpus, Mixture, bucketed
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.config import Run
from shardtrain.trainer.hooks import Hook
from shardtrain.trainer.resume import find_checkpoint
from shardtrain.trainer.train import train

SEQ = 16
TEXTS = [f"{i}" * (1 + i * i % 37) for i in range(60)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Documents in two files, the first one of one byte."""
    folder = tmp_path_factory.mktemp("files")
    for number, part in enumerate((TEXTS[:25], TEXTS[25:])):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in part))
    return folder


def corpus(files, **options) -> Any:
    return Corpus(paths=(files,), seq=SEQ, packing="bucketed", **options)


def pieces(text):
    """The inputs and targets of a document, cut by hand."""
    tokens = [*text.encode(), 0]
    return [tokens[i : i + SEQ + 1] for i in range(0, len(tokens) - 1, SEQ)]


@pytest.mark.parametrize("block", [1, 50, 1 << 28])
def test_every_document_is_there_and_whole_ones_are_held_out(block, files, tmp_path, monkeypatch):
    monkeypatch.setattr(bucketed, "BLOCK_TOKENS", block)
    source = corpus(files, heldout_fraction=0).train(tmp_path)
    found = [source[i]["tokens"].tolist() for i in range(len(source))]
    assert found == [piece for text in TEXTS for piece in pieces(text)]
    assert [len(each) - 1 for each in found] == list(source.lengths)
    assert corpus(files, heldout_fraction=0).heldout(tmp_path) is None
    data = corpus(files, heldout_fraction=0.25)
    train_part, heldout = data.train(tmp_path), data.heldout(tmp_path)
    assert heldout is not None
    parts = [[part[i]["tokens"].tolist() for i in range(len(part))] for part in (train_part, heldout)]
    assert parts[0] + parts[1] == found
    assert parts[1][0][0] in {ord(text[0]) for text in TEXTS}
    assert sum(map(len, parts[1])) / sum(map(len, found)) == pytest.approx(0.25, abs=0.04)
    # a border inside of a document would be a piece whose first token is the last one before
    assert parts[0][-1][-1] == 0
    assert len({part.fingerprint for part in (source, train_part, heldout)}) == 3


@pytest.mark.full
def test_losses_after_a_kill_are_those_without_it_bitwise(files, tmp_path, one_device):
    """With the default schedule, whose rates follow from the number of steps, which stays."""

    def run(folder, stop_after=None):
        def stop(step):
            if step == stop_after:
                raise KeyboardInterrupt

        return Run(
            model=TinyConfig(vocab=256, seq=SEQ),
            data=corpus(files),
            batch=128,
            batch_unit="tokens",
            steps=9,
            log_every=1,
            evaluate_every=None,
            checkpoints=CheckpointPolicy(every_steps=2),
            hooks=(Hook(on_step=stop),) if stop_after else (),
            run_dir=tmp_path / folder,
        )

    def losses(folder):
        return [line["train/loss"] for line in read_jsonl(tmp_path / folder / "metrics.jsonl")]

    train(run("whole"), Console(file=io.StringIO()))
    with pytest.raises(KeyboardInterrupt):
        train(run("parts", 5), Console(file=io.StringIO()))
    saved = find_checkpoint(tmp_path / "parts")
    assert saved is not None
    assert 2 <= saved.step <= 5
    train(run("parts"), Console(file=io.StringIO()))
    assert len(losses("whole")) == 9
    assert losses("parts") == losses("whole")


def test_what_does_not_fit_is_refused_with_what_to_give(files, tmp_path):
    data = corpus(files)
    run = Run(model=TinyConfig(vocab=256, seq=SEQ), data=data, batch=8, run_dir=tmp_path)
    with pytest.raises(ValueError, match=r"batch is 8 examples; count tokens, .*: --batch-unit tokens"):
        train(run, Console(file=io.StringIO()))
    mixture = Mixture(parts={"a": data}, weights="a 1")
    with pytest.raises(ValueError, match=r"parts a of the mixture .* by packing 'joined' or 'separate'"):
        mixture.train(tmp_path)
    np.save(tmp_path / "plain.npy", np.zeros(99, np.uint8))
    plain = Corpus(paths=(tmp_path / "plain.npy",), seq=8, vocab_size=9, packing="bucketed")
    with pytest.raises(ValueError, match=r"packing is 'bucketed', and .*plain.npy does not say where"):
        plain.train(tmp_path)
    (tmp_path / "one.txt").write_text("a single document")
    with pytest.raises(ValueError, match="has one document, and whole documents are held out"):
        Corpus(paths=(tmp_path / "one.txt",), seq=8, packing="bucketed").train(tmp_path)
