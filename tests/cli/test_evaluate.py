"""`shardtrain evaluate`: values of a plain loop on other data, on any mesh; the run stays as it is."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from saved_decoder import save

from shardtrain import cli
from shardtrain.cli.evaluate import count_tokens
from shardtrain.data import Chat, Text
from shardtrain.data.tokenizer import Bytes
from shardtrain.functional.nnx_model import convert_model
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.trainer.evaluation import compute_accuracy, log_likelihoods, make_requests, read_questions

CONFIG = DecoderConfig(vocab=256, seq=16, embed=16, num_layers=2, num_heads=4)
TEXTS = {"prose.txt": "The sky is blue; naïve √2.\n" * 12, "code.txt": "def f(x):\n    return x + 1\n" * 9}
QUESTION = {"context": "The sky is", "choices": ["blue", "made of stones", "é"], "answer": 1}
RUN_FILE = """
from pathlib import Path
from typing import Any
from shardtrain import Regularized, Run, Text, next_token_loss
from shardtrain.models.decoder import DecoderConfig

def run():
    model = DecoderConfig(vocab=256, seq=16, embed=8, num_layers=2, num_heads=4)
    data = Text(paths=(Path("prose.txt"),), seq=8, heldout_fraction=0.3)
    return Run(model=model, data=data, loss=Regularized(next_token_loss, z_loss=0.1))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    (folder / "sky.jsonl").write_text((json.dumps(QUESTION) + "\n") * 3)
    (folder / "own.py").write_text(RUN_FILE)
    return folder


@pytest.fixture(scope="module")
def params(folder):
    return save(folder / "run", CONFIG, (1, 2), **{"data.seq": 12})[0]


@pytest.fixture
def command(capsys, folder, params, monkeypatch):
    """Words -> exit code, standard output, standard error."""
    monkeypatch.chdir(folder)

    def run(*words):
        code = cli.main(["evaluate", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def apply(params, tokens):
    return convert_model(CONFIG).apply(params, {}, jax.random.key(0), False, tokens)[0]


def by_hand(params, windows):
    """The values of tokens (rows, seq + 1) by numpy."""
    logits = np.asarray(jax.jit(apply)(params, windows[:, :-1]), np.float64)
    targets = windows[:, 1:]
    likelihoods = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(likelihoods, targets[..., None], -1)
    return {
        "loss": nats.mean(),
        "accuracy": (logits.argmax(-1) == targets).mean(),
        "perplexity": math.exp(nats.mean()),
        # byte 0 separates documents, and is no byte of text
        "bits_per_byte": nats.sum() / math.log(2) / np.count_nonzero(targets),
        "tokens": targets.size,
    }


def windows_of(name, seq):
    tokens = np.frombuffer(TEXTS[name].encode() + b"\0", np.uint8).astype(np.int32)
    starts = range(0, len(tokens) - seq, seq)
    return np.stack([tokens[i : i + seq + 1] for i in starts])


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "mesh", [[], ["--mesh", "data=2,fsdp=2,tensor=2", "--batch", "7"]], ids=["data", "all"]
)
def test_values_are_those_of_a_plain_loop_on_every_data(command, folder, params, mesh):
    before = sorted(folder.rglob("*"))
    words = ["run", "--data", "prose.txt", "--data", "code=code.txt", "--json", *mesh]
    code, out, _ = command(*words)
    assert code == 0
    found = json.loads(out)
    assert (found["run"], found["step"], [*found["results"]]) == ("run", 2, ["heldout", "code"])
    for name, file in (("heldout", "prose.txt"), ("code", "code.txt")):
        assert_close(found["results"][name], by_hand(params, windows_of(file, 12)))
    # nothing was written beside the run
    assert sorted(folder.rglob("*")) == before


def test_some_batches_of_other_windows_as_text(command, params):
    code, out, _ = command(
        "run", "--data", "prose.txt", "--name", "prose", "--seq", "16", "--batch", "8", "--batches", "1"
    )
    expected = by_hand(params, windows_of("prose.txt", 16)[:8])
    assert code == 0
    assert out == (
        f"prose: loss {expected['loss']:.6g}, accuracy {expected['accuracy']:.6g}, perplexity"
        f" {expected['perplexity']:.6g}, bits per byte {expected['bits_per_byte']:.6g}, tokens 128\n"
    )


def test_the_held_out_data_of_a_run_file(command, params, tmp_path):
    """The options of the model are those of the checkpoint; the loss is without its z-loss."""
    code, out, _ = command("run", "--run-file", "own.py", "--json")
    assert code == 0
    source = Text(paths=(Path("prose.txt"),), seq=8, heldout_fraction=0.3).heldout(tmp_path)
    assert source is not None
    expected = by_hand(params, np.stack([source[i]["tokens"] for i in range(len(source))]))
    del expected["accuracy"]  # the run's loss has none
    expected["cross_entropy"] = expected["loss"]
    assert_close(json.loads(out)["results"]["heldout"], expected)


def test_questions_are_answered_as_without_a_mesh(command, folder, params):
    questions = read_questions(folder / "sky.jsonl")
    requests = make_requests(questions, Bytes(), " ", CONFIG.seq)
    scores = log_likelihoods(jax.tree_util.Partial(apply, params), requests, 4, CONFIG.seq)
    expected = compute_accuracy(questions, scores)._asdict()
    words = "run --choices sky.jsonl --choices again=sky.jsonl --json --mesh fsdp=4,tensor=2"
    code, out, _ = command(*words.split())
    assert code == 0
    assert json.loads(out)["results"] == {"sky": expected, "again": expected}


@pytest.mark.parametrize("packing", ["alone", pytest.param("separate", marks=pytest.mark.full)])
def test_conversations_are_evaluated_as_a_run_of_them_learned_them(command, folder, packing, tmp_path):
    options = {"template": "plain", "answers": "all", "messages": "talk", "packing": packing, "seq": 12}
    of_run = {f"data.{name}": value for name, value in options.items()}
    params = save(folder / packing, CONFIG, **{"data.tokenizer": "bytes", **of_run})[0]
    talks = [[{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}] for n in (1, 4, 2)]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"talk": each}) + "\n" for each in talks))
    code, out, _ = command(packing, "--data", "talks.jsonl", "--data", "text=prose.txt", "--json")
    assert code == 0
    found = json.loads(out)["results"]
    assert (found["heldout"]["tokens"], found["text"]["tokens"]) == (3 * len("b\0"), 360)
    if packing == "alone":
        data = Chat(paths=(folder / "talks.jsonl",), heldout_fraction=0, **cast("Any", options))
        rows = [data.train(tmp_path)[i] for i in range(3)]
        tokens, weights = (np.stack([row[name] for row in rows]) for name in ("tokens", "weights"))
        logits = np.asarray(apply(params, tokens[:, :-1]), np.float64)
        nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        np.testing.assert_allclose(found["heldout"]["loss"], (nats * weights).sum() / 6, rtol=1e-5)


@pytest.mark.full
def test_a_run_of_documents_by_themselves_is_evaluated_on_windows(command, folder):
    save(folder / "bucketed", CONFIG, **{"data.packing": "bucketed", "data.seq": 12})
    code, out, _ = command("bucketed", "--data", "prose.txt", "--json")
    assert code == 0
    assert json.loads(out)["results"]["heldout"]["tokens"] == 360


def test_tokens_that_the_model_does_not_have_are_refused(command, folder):
    save(folder / "small", dataclasses.replace(CONFIG, vocab=100), **{"data.tokenizer": "bytes"})
    code, _, err = command("small", "--data", "prose.txt")
    assert code == 2
    assert "is 104, and the model has tokens 0 to 99; the tokenizer of this data has 256 tokens: use" in err
    code, _, err = command("small", "--choices", "sky.jsonl")
    assert code == 2
    assert (
        "sky has token 195, and the model has tokens 0 to 99; the tokenizer has 256 tokens: give the" in err
    )


def test_an_encoder_decoder_needs_the_pairs_of_its_run(command, folder):
    sizes: Any = {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
    save(folder / "pairs", EncoderDecoderConfig(vocab=256, seq=16, embed=16, **sizes))
    code, _, err = command("pairs", "--data", "prose.txt")
    assert code == 2
    assert (
        "the model of pairs is an encoder-decoder, which is evaluated on the held-out pairs of its run" in err
    )
    assert "give only its run file: --run-file my_run.py" in err


def test_only_tokens_with_weight_are_counted():
    """A character of two bytes is cut by a window, and a document by its separator."""
    tokens = np.frombuffer("aé\0bc\0d".encode(), np.uint8).astype(np.int32)
    windows: list[dict[str, np.ndarray]] = [{"tokens": tokens[:3]}, {"tokens": tokens[2:9]}]
    assert count_tokens(windows, 2, Bytes()) == (7, 5)
    windows[1]["weights"] = np.array([1, 1, 0, 1, 0], np.float32)
    assert count_tokens(windows, 2, Bytes()) == (5, 3)
    assert count_tokens(windows, 1, None) == (2, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "nothing to evaluate on; give --data PATH, --choices FILE, or both"),
        (
            ["run", "--data", "prose.txt", "--batch", "0", "--batches", "0"],
            "--batch is 0; use 1 or more\n  - --ba",
        ),
        (["run", "--data", "none.txt"], "none.txt"),
        (["run", "--data", "code.txt", "--seq", "999"], "use seq"),
        (["run", "--choices", "prose.txt"], "prose.txt has lines that are no questions"),
        (
            ["run", "--choices", "sky.jsonl", "--choices", "./sky.jsonl"],
            "two files of questions are named 'sky'",
        ),
        (["run", "--choices", "nothing.jsonl"], "nothing.jsonl"),
        (["run", "--data", "prose.txt", "--mesh", "context=8"], "neither stages nor parts of sequences"),
    ],
)
def test_what_is_refused(command, words, message):
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert message in err
