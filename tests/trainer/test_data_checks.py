"""Tokens that a model does not have are found before the first step, in whatever data they are."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tiny_language_model import TinyConfig

from shardtrain.data import Chat, Corpus, MaskedTokens, Mixture, TokenPairs, Tokens, token_range, write_tokens
from shardtrain.data.huggingface_tokenizer import train_tokenizer
from shardtrain.trainer.config import Run
from shardtrain.trainer.sources import token_problems
from shardtrain.trainer.train import train

VOCAB = 300


def write(folder, at=None, token=VOCAB, name="tokens"):
    """Write 400 tokens in two documents; one of them may be another."""
    tokens = np.arange(400) % VOCAB
    if at is not None:
        tokens[at] = token
    write_tokens(folder / f"{name}.npy", [tokens], dtype="uint16")
    np.array([300, 400], "<u8").tofile(folder / f"{name}.ends")
    return folder / f"{name}.npy"


def sources(data, folder):
    return {"train": data.train(folder), "heldout": data.heldout(folder)}


def of_tokens(folder):
    return Tokens(path=write(folder, 350), vocab=999, seq=8, heldout_fraction=0.5)


def of_corpus(packing):
    def make(folder):
        return Corpus(
            paths=(write(folder, 350),), vocab_size=999, seq=8, heldout_fraction=0.5, packing=packing
        )

    return make


def of_pairs(folder):
    source, target = write(folder, name="source"), write(folder, 350, name="target")
    return TokenPairs(
        source=source, target=target, vocab=999, source_seq=8, target_seq=8, heldout_fraction=0.5
    )


def of_mixture(folder):
    good = Tokens(path=write(folder, name="good"), vocab=999, seq=8, heldout_fraction=0)
    return Mixture(parts={"good": good, "bad": of_tokens(folder)}, weights="good 1 bad 1")


@pytest.mark.parametrize(
    "make",
    [of_tokens, *map(of_corpus, ("joined", "separate", "bucketed")), of_pairs, of_mixture],
    ids=["tokens", "joined", "separate", "bucketed", "targets", "mixture"],
)
def test_a_token_in_held_out_data_is_found_in_its_file(make, tmp_path):
    data = make(tmp_path)
    found = sources(data, tmp_path)
    if isinstance(found["heldout"], dict):
        found |= found.pop("heldout")
    assert token_problems(found, VOCAB + 1) == []
    path = tmp_path / ("target.npy" if make is of_pairs else "tokens.npy")
    assert token_problems(found, VOCAB)[-1].partition(": ")[2] == (
        f"{path}, token 350, is 300, and the model has tokens 0 to 299; the tokenizer of this data has 999"
        " tokens: use the tokenizer of the model, or give the model a vocabulary of 999"
    )


def test_what_the_data_itself_says_is_a_limit_too(tmp_path):
    found = sources(Tokens(path=write(tmp_path, 350, 310), vocab=305, seq=8), tmp_path)
    for vocab in (None, 500):
        (problem,) = token_problems(found, vocab)
        assert problem.endswith(
            "token 350, is 310, and the vocabulary that the data gives is 305; set it to 311 or more"
        )
    (problem,) = token_problems(found, 305)
    assert problem.endswith(
        "the model has tokens 0 to 304; give it a vocabulary of 311 or more, or write the file again"
    )
    np.save(tmp_path / "signed.npy", np.array([5] * 40 + [-1] * 40))
    (_, problem) = token_problems(
        sources(Tokens(path=tmp_path / "signed.npy", vocab=305, seq=8, heldout_fraction=0.2), tmp_path), 305
    )
    assert problem.endswith("is -1, and tokens are numbers from 0; write the file again")


def test_tokens_that_masking_draws_are_below_the_vocabulary(tmp_path):
    data = MaskedTokens(data=Tokens(path=write(tmp_path), vocab=999, seq=8), mask_token=4)
    (problem, _) = token_problems(sources(data, tmp_path), VOCAB)
    assert (
        "replaces some masked tokens by random ones below 999, its vocabulary, and the model has" in problem
    )


def test_of_many_tokens_chunks_at_equal_distances_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(token_range, "CHUNK_TOKENS", 10)
    monkeypatch.setattr(token_range, "MOST_TOKENS", 100)
    found = {
        at: sources(
            Tokens(path=write(tmp_path, at, name=f"{at}"), vocab=999, seq=8, heldout_fraction=0), tmp_path
        )["train"]
        for at in (85, 95)
    }
    assert [len(token_problems({"data": each}, VOCAB)) for each in found.values()] == [1, 0]


def test_the_tokenizer_of_conversations_is_the_reason(tmp_path):
    train_tokenizer(["abc abc abc abc"], 262, tmp_path / "tokenizer.json")
    talk = [{"role": "user", "content": "abc abc"}, {"role": "assistant", "content": "abc"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    data = Chat(
        paths=(tmp_path / "a.jsonl",), tokenizer=str(tmp_path), template="plain", seq=16, heldout_fraction=0
    )
    (problem,) = token_problems({"the data": data.train(tmp_path / "run")}, 256, data)
    assert f"and the model has tokens 0 to 255; the tokenizer of this data has {data.vocab} tokens" in problem


@dataclass(frozen=True)
class Data:
    """Samples in memory, of which some held-out ones have a token that the model does not have."""

    bad: int | None = None
    counts: float = 1.0

    def train(self, folder: Path) -> Any:
        return [{"tokens": np.arange(9, dtype=np.int32)}] * 16

    def heldout(self, folder: Path) -> Any:
        weights = np.full(8, self.counts, np.float32)
        return {
            "a": [{"tokens": np.arange(9, dtype=np.int32), "weights": weights}] * 4,
            "b": [
                {"tokens": np.arange(9, dtype=np.int32) + 99 * (i == self.bad), "weights": weights}
                for i in range(32)
            ],
        }


@pytest.mark.parametrize(
    ("data", "steps", "words"),
    [
        (Data(bad=3), 0, "the held-out data 'b': 'tokens' has 99 in row 3 at 0, 100 in row 3 at 1"),
        (Data(counts=0.0), 1, "the held-out data 'a' has no loss: every weight in its first 1 batches is 0;"),
        (
            Data(bad=20),
            1,
            "the held-out data 'b' has a loss that is not a number (NaN), in 1 of 4 batches, the first of"
            " them number 2: 'tokens' has 99 in row 4 at 0",
        ),
    ],
    ids=["before the first step", "nothing counts", "not a number"],
)
def test_a_run_refuses_held_out_data_without_a_loss(data, steps, words, tmp_path):
    run = Run(model=TinyConfig(vocab=32), data=data, batch=8, steps=1, run_dir=tmp_path)
    with pytest.raises(ValueError) as error:
        train(run, Console(quiet=True))
    assert words in str(error.value)
    assert (tmp_path / "checkpoints/step_00000001").exists() == bool(steps)
