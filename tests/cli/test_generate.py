"""`shardtrain generate`: texts of a run folder on any mesh, prompts from anywhere, and what is refused."""

import io
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from saved_decoder import save

from shardtrain import cli
from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.cli.generate import _find_ends
from shardtrain.data.huggingface_tokenizer import train_tokenizer
from shardtrain.data.tokenizer import open_tokenizer
from shardtrain.functional.nnx_model import convert_model
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder import EncoderConfig
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.generate import generate
from shardtrain.models.gpt import GptConfig
from shardtrain.models.sampling import Sampling
from shardtrain.trainer.config import describe

CONFIG = DecoderConfig(
    vocab=256, seq=24, embed=16, num_layers=3, num_heads=4, num_kv_heads=2, positions="rotary"
)
PROMPTS = ["abc", "d", "é√ x y"]
WORDS = ["--prompt", "abc", "--prompt", "d", "--prompt", "é√ x y", "--tokens", "6", "--json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def params(folder):
    """Those that are trained, and their average, which the run evaluates."""
    return save(folder / "run", CONFIG, (1, 2), evaluate_with="ema")


def expected(params, **options):
    """The tokens that one device adds, without what the command line does."""
    found = added(params, [list(prompt.encode()) for prompt in PROMPTS], **options)
    return [(bytes(tokens.tolist()).decode(errors="replace").rstrip("\0"), 0 in tokens) for tokens in found]


def added(params, prompts, **options):
    return generate(
        jax.tree_util.Partial(apply_model, params), prompts, 6, KEY, seq=24, end=[0], cached=True, **options
    )


KEY = jax.random.key(0)


def apply_model(params, *x):
    return convert_model(CONFIG).apply(params, {}, KEY, False, *x)[0]


@pytest.fixture
def command(capsys, folder, params, monkeypatch):
    """Words -> exit code, standard output, standard error."""
    monkeypatch.chdir(folder)

    def run(*words):
        code = cli.main(["generate", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def test_texts_are_those_of_one_device_on_any_mesh(command, params):
    """The run's mesh has two devices, and here are eight: they are placed along data."""
    code, out, err = command("run", *WORDS, "--temperature", "0")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    mesh, programs = err.splitlines()
    assert mesh == "step 2 of run on mesh data=-1"
    assert programs.startswith("programs: ")
    assert [each["prompt"] for each in found] == PROMPTS
    greedy = Sampling(temperature=0.0)
    assert [(each["text"], each["ended"]) for each in found] == expected(params[1], sampling=greedy)
    assert {each["num_tokens"] for each in found} == {6}
    on_mesh = command("run", *WORDS, "--temperature", "0", "--mesh", "data=2,fsdp=2,tensor=2", "--batch", "2")
    assert on_mesh[:2] == (0, out)
    assert on_mesh[2].startswith("step 2 of run on mesh data=2,fsdp=2,tensor=2\n")


@pytest.mark.full
def test_trained_parameters_and_draws(command, params):
    words = [*WORDS, "--no-evaluated", "--temperature", "0.9", "--top-k", "20", "--top-p", "0.8"]
    _, out, _ = command("run", *words, "--mesh", "data=4,fsdp=2")
    sampling = Sampling(temperature=0.9, top_k=20, top_p=0.8)
    found = [(each["text"], each["ended"]) for each in map(json.loads, out.splitlines())]
    assert found == expected(params[0], sampling=sampling)
    assert {ended for _, ended in found} == {True, False}
    _, other, _ = command("run", *words, "--mesh", "data=4,fsdp=2", "--seed", "1")
    assert other != out


@pytest.mark.full
def test_prompts_from_files_and_standard_input(command, folder, monkeypatch):
    (folder / "prompts.txt").write_text("abc\nd\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "abc"}\n\n{"prompt": "d"}\n')
    words = ["--tokens", "6", "--temperature", "0"]
    _, out, _ = command("run", "--prompt", "abc", "--prompt", "d", *words)
    first, line, _, second = out.partition("-" * 20 + "\n")[0], *out.partition("-" * 20 + "\n")
    assert first.startswith("abc")
    assert second.startswith("d")
    assert line
    for name in ("prompts.txt", "prompts.jsonl"):
        assert command("run", "--prompts", name, *words)[:2] == (0, out)
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\nd\n"))
    assert command("run", "--prompts", "-", *words)[:2] == (0, out)
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert command("run", *words)[:2] == (0, first)


def test_without_a_number_the_text_fills_the_positions(command):
    _, out, _ = command("run@1", "--prompt", "abc", "--json", "--temperature", "0", "--end", "none")
    found = json.loads(out)
    assert (found["num_tokens"], found["ended"]) == (21, False)


def test_each_of_several_tokens_ends_a_text(command, tmp_path):
    """In text, in JSON lines, and in batches; config.json does not matter beside the other file.

    Which tokens end a text: below, and data/test_tokenize.py.
    """
    train_tokenizer([], 257, tmp_path / "tokenizer.json")
    known = open_tokenizer(tmp_path)
    words = ["--tokenizer", tmp_path, "--temperature", "0", *WORDS]
    params = save(tmp_path / "free", CONFIG)[0]
    rows = [row.tolist() for row in added(params, known.encode(PROMPTS), sampling=Sampling(temperature=0.0))]
    ends = [row[i] for i, row in enumerate(rows)]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": rows[2][0]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    save(tmp_path / "ended", CONFIG)
    lines = command(tmp_path / "ended", *words)[1].splitlines()
    whole = command(tmp_path / "ended", *words, "--end", "<|endoftext|>")[1].splitlines()
    for line, free, row in zip(map(json.loads, lines), map(json.loads, whole), rows, strict=True):
        at = min(i for i, token in enumerate(row) if token in ends)
        assert (line["ended"], line["num_tokens"], line["text"]) == (True, at + 1, known.decode(row[:at]))
        assert (free["ended"], free["num_tokens"]) == (False, 6)
    texts = [prompt + line["text"] for prompt, line in zip(PROMPTS, map(json.loads, lines), strict=True)]
    assert command(tmp_path / "ended", *words[:-1])[1] == ("\n" + "-" * 20 + "\n").join(texts) + "\n"


def test_an_import_ends_as_its_files_say_and_a_run_by_the_separator_too():
    tokenizer: Any = SimpleNamespace(separator=1, ends=(4,))

    def ends(**extra):
        saved: Any = SimpleNamespace(reader=SimpleNamespace(extra=extra, step=3), folder="run")
        return _find_ends(saved, tokenizer, None)

    tokens = {"eos_token_id": [5, 7]}
    assert (ends(imported={}, tokens=tokens), ends(imported={})) == ((5, 7), (4,))
    assert (ends(tokens=tokens), ends()) == ((1, 5, 7), (1, 4))


def test_a_model_of_ones_own_by_its_run_file(command, folder):
    """It takes no cache, and the run was given other options on the command line."""
    text = """
import jax
from dataclasses import dataclass
from flax import nnx
from shardtrain import Run, Text

@dataclass(frozen=True)
class Follow:
    vocab: int = 256
    by: int = 1
    def __call__(self, rngs):
        return Model(self)

class Model(nnx.Module):
    def __init__(self, config):
        self.by, self.scale = config.by, nnx.Param(jax.numpy.ones(()))
    def __call__(self, tokens):
        return self.scale[...] * jax.nn.one_hot((tokens + self.by) % 256, 256)

def run():
    return Run(model=Follow(), data=Text(seq=8))
"""
    (folder / "own.py").write_text(text)
    with Checkpoints(folder / "own" / "checkpoints", CheckpointPolicy()) as checkpoints:
        extra = {"run": {"model.vocab": 256, "model.by": 2, "data.seq": 4}}
        checkpoints.save(3, {"params": {"scale": jnp.ones(())}}, extra)
    words = ["--prompt", "a", "--tokens", "9", "--temperature", "0", "--mesh", "data=8"]
    code, out, _ = command("own", "--run-file", "own.py", *words)
    assert (code, out) == (0, "acegikmoqs\n")
    code, _, err = command("own", *words)
    assert code == 2
    assert "the model of own is no text model of this library; give the run file" in err
    # a copy of a model of this library has its options, and may compute something else
    with Checkpoints(folder / "copy" / "checkpoints", CheckpointPolicy()) as checkpoints:
        extra = {"run": describe(TINY_GPT, "model"), "model": "my_gpt:GptConfig"}
        checkpoints.save(3, {"params": {"scale": jnp.ones(())}}, extra)
    code, _, err = command("copy", *words)
    assert code == 2
    assert "its class is 'my_gpt:GptConfig'" in err


TINY_GPT = GptConfig(vocab=256, seq=8, embed=16, num_layers=1, num_heads=2)

PAIRS = EncoderDecoderConfig(
    vocab=256, seq=24, embed=16, num_encoder_layers=1, num_decoder_layers=2, num_heads=4, tied=False
)


@pytest.mark.full
def test_an_encoder_decoder_writes_targets_of_prompts(command, folder):
    """On a mesh; they begin with the padding of the data, or as an option says."""
    params, _ = save(folder / "pairs", PAIRS, **{"data.padding": 7})
    apply = jax.tree_util.Partial(
        lambda params, *x: convert_model(PAIRS).apply(params, {}, KEY, False, *x)[0], params
    )
    sources = [list(prompt.encode()) for prompt in PROMPTS]
    words = [*WORDS, "--temperature", "0"]
    seen = set()
    for begin, more in ((7, []), (3, ["--begin", "3"])):
        found = generate(
            apply, sources, 6, KEY, seq=24, end=[0], begin=begin, sampling=Sampling(temperature=0.0)
        )
        seen |= {tuple(tokens.tolist()) for tokens in found}
        expected = [bytes(tokens.tolist()).decode(errors="replace").rstrip("\0") for tokens in found]
        code, out, _ = command("pairs", *words, *more, "--mesh", "data=2,tensor=4")
        assert (code, [json.loads(line)["text"] for line in out.splitlines()]) == (0, expected)
    assert len(seen) > 2
    # the targets alone are printed, and all positions are for them
    text = command("pairs", "--prompt", "abc", "--temperature", "0", "--end", "none", "--mesh", "data=8")[1]
    assert not text.startswith("abc")
    wrong = ["--prompt", "a" * 25, "--tokens", "25", "--begin", "256"]
    code, out, err = command("pairs", *wrong)
    assert (code, out) == (2, "")
    assert "--begin is 256; use a token from 0 to 255" in err
    assert "--tokens is 25, but targets have 24 positions; use --tokens 24 or fewer" in err
    assert "the prompt has 25 tokens, but the model has 24 positions; use a shorter prompt" in err


def test_refuses_another_model_and_unknown_tokenizers(command, folder):
    save(folder / "bert", EncoderConfig(vocab=256, seq=8, embed=16, num_layers=1, num_heads=2))
    code, _, err = command("bert", "--prompt", "a")
    assert code == 2
    assert "the model of bert is no text model of this library" in err
    assert "is no option of DecoderConfig" in err
    save(folder / "words", DecoderConfig(vocab=50, seq=8, embed=16, num_layers=1, num_heads=2))
    code, _, err = command("words", "--prompt", "a")
    assert code == 2
    assert "words has no tokenizer; name one: --tokenizer bytes, or --tokenizer path/tokenizer.json" in err
    code, _, err = command("words", "--prompt", "a", "--tokenizer", "bytes")
    assert code == 2
    assert "the prompt has token 97, and the model's vocabulary is 50; give the tokenizer of the run" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--prompt", "a"], "there is no folder nowhere"),
        (["run@7", "--prompt", "a"], "run/checkpoints has no step 7: there are 1, 2"),
        (["run", "--prompt", ""], "the prompt is empty; give a text, such as the token that begins one"),
        (
            ["run", "--prompt", "a", "--prompt", "b" * 23, "--tokens", "2"],
            "prompt 2 has 23 tokens, and 2 are added, but the model has 24 positions; use --tokens 1",
        ),
        (
            ["run", "--prompt", "b" * 24],
            "the prompt has 24 tokens, and 1 are added, but the model has 24 positions; use a shorter prompt",
        ),
        (["run", "--tokens", "0", "--batch", "0"], "--tokens is 0; use 1 or more\n  - --batch is 0; use 1"),
        (["run", "--prompt", "a", "--prompts", "b"], "--prompt and --prompts are given; give one of the two"),
        (["run", "--prompt", "a", "--top-k", "0"], "top_k is 0; it must be at least 1"),
        (["run", "--prompt", "a", "--mesh", "tensor=3"], "mesh 'tensor=3' needs 3 devices, and there are 8"),
        (["run", "--prompt", "a", "--mesh", "tensor=8"], "dim 'kv_heads' of size 2 cannot be split"),
        (
            ["run", "--prompt", "a", "--mesh", "pipeline=2,data=4"],
            "this command has neither stages nor parts",
        ),
        (["run", "--prompt", "a", "--tokenizer", "byte"], "there is no tokenizer 'byte'"),
        (
            ["run", "--prompt", "a", "--begin", "1"],
            "--begin is 1, and the model is a decoder, which has no targets; leave it out",
        ),
        (["run", "--prompts", "bad.jsonl"], 'bad.jsonl:1 is no object with a text "prompt"'),
        (["run", "--prompts", "none.txt"], "none.txt"),
        (["run", "--prompts", "empty.txt"], "empty.txt has no prompts; write one in each line"),
    ],
)
def test_what_is_refused(command, folder, words, message):
    (folder / "bad.jsonl").write_text("[1]\n")
    (folder / "empty.txt").write_text("")
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert message in err
