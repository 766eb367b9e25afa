"""Text becomes the same shards whatever does it, and however often it was stopped."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_formats import DOCUMENTS, write_files

from shardtrain.data import Corpus, huggingface_tokenizer, write_tokens
from shardtrain.data import tokenize as module
from shardtrain.data.corpus import corpus_files
from shardtrain.data.huggingface_tokenizer import HuggingFaceTokenizer, train_tokenizer
from shardtrain.data.sources.find import find_files
from shardtrain.data.sources.format import BadData
from shardtrain.data.sources.numpy_tokens import find_tokens
from shardtrain.data.token_manifest import read_manifest
from shardtrain.data.tokenize import TokenizeOptions, plan_digest, tokenize
from shardtrain.data.tokenizer import Bytes, open_tokenizer
from shardtrain.data.tokens import TokenShards


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tokenizer that was trained on the documents."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(DOCUMENTS, 300, path)
    return path


def test_the_tokens_are_those_of_the_library_with_a_separator_after_each(tmp_path, trained):
    from tokenizers import Tokenizer

    folder = write_files("parquet", tmp_path / "data", DOCUMENTS)
    options = TokenizeOptions(tokenizer=str(trained), shard_bytes=400)
    reports = []
    manifest = tokenize(
        find_files([folder]), tmp_path / "out", options, report=lambda *counts: reports.append(counts)
    )
    assert reports == [(i, len(manifest.shards)) for i in range(len(manifest.shards) + 1)]
    assert len(manifest.shards) > 3
    plain = Tokenizer.from_file(str(trained))
    separator = plain.token_to_id("<|endoftext|>")
    encoded = [[*plain.encode(text, add_special_tokens=False).ids, separator] for text in DOCUMENTS if text]
    shards = TokenShards([find_tokens(path) for path in manifest.files()])
    assert shards.read(0, shards.num_tokens).tolist() == [*chain.from_iterable(encoded)]
    ends = shards.ends_in(0, shards.num_tokens + 1)
    assert np.diff(ends, prepend=0).tolist() == list(map(len, encoded))
    assert [shards.ends_in(i, i + 5).tolist() for i in range(99)] == [
        [end for end in ends if i <= end < i + 5] for i in range(99)
    ]
    assert (manifest.num_tokens, manifest.num_documents) == (shards.num_tokens, len(encoded))
    tokenizer = open_tokenizer(manifest.tokenizer)
    assert tokenizer.decode(shards.read(0, len(encoded[0]) - 1).tolist()) == DOCUMENTS[0]
    # a run takes vocabulary and tokens from the folder
    corpus = Corpus(paths=(tmp_path / "out",), seq=8, heldout_fraction=0)
    assert corpus.vocab == manifest.vocab == 300
    windows = corpus.train(tmp_path / "run")
    assert (
        windows.fingerprint
        == Corpus(paths=(folder,), tokenizer=str(trained), seq=8, heldout_fraction=0)
        .train(tmp_path / "run")
        .fingerprint
    )


@pytest.mark.parametrize("name", ["parquet", "jsonl.gz"])
def test_any_number_of_processes_writes_the_same_shards(name, tmp_path):
    files = find_files([write_files(name, tmp_path / "data", DOCUMENTS)])
    options = TokenizeOptions(shard_bytes=120)
    tokenize(files, tmp_path / "one", options)
    if name == "parquet":  # new processes take a second
        tokenize(files, tmp_path / "three", options, workers=3)
        assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert len(contents(tmp_path / "one")) >= 9
    assert not list((tmp_path / "one").rglob("rows-*"))
    assert read_manifest(tmp_path / "one").num_documents == len(DOCUMENTS) - 1


class Killed(BaseException):
    """Ends the work at once, as a signal does."""


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 12), max_size=4))
def test_a_restart_gives_the_same_shards(tmp_path_factory, stops):
    tmp_path = tmp_path_factory.mktemp("restart")
    files = find_files([write_files("jsonl", tmp_path / "data", DOCUMENTS)])
    options = TokenizeOptions(shard_bytes=150)
    tokenize(files, tmp_path / "whole", options)
    with pytest.MonkeyPatch.context() as patch:
        for stop in stops:
            count = iter(range(100))

            def replace(path, content, mode=0o666, count=count, stop=stop):
                if next(count) >= stop:
                    raise Killed
                path.write_bytes(content)

            patch.setattr(module, "replace_file", replace)
            try:
                tokenize(files, tmp_path / "out", options)
            except Killed:
                assert not (tmp_path / "out/manifest.json").exists()
                with pytest.raises(
                    ValueError, match="out is not finished; give the same shardtrain data tok"
                ):
                    Corpus(paths=(tmp_path / "out",), seq=4).train(tmp_path / "run")
    again = tokenize(files, tmp_path / "out", options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert again.num_documents == len(DOCUMENTS) - 1


def test_a_folder_of_something_else_is_refused(tmp_path):
    folder = write_files("jsonl", tmp_path / "data", DOCUMENTS)
    files = find_files([folder])
    tokenize(files, tmp_path / "out", TokenizeOptions())
    with pytest.raises(ValueError, match="out was begun from other files or with other options"):
        tokenize(files, tmp_path / "out", TokenizeOptions(on_error="skip"))
    (folder / "part-0/a.jsonl").write_text('{"text": "new"}\n')
    with pytest.raises(ValueError, match="out was begun from other files or with other options"):
        tokenize(files, tmp_path / "out", TokenizeOptions())
    with pytest.raises(
        ValueError, match=r"data has something else in it \(part-0\); give a folder that is empty"
    ):
        tokenize(files, folder, TokenizeOptions())
    (folder / "part-0/a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(
        ValueError, match=r"there is no text in 1 files, such as .*a\.jsonl; give files with text"
    ):
        tokenize(files[:1], tmp_path / "empty", TokenizeOptions())


def test_bad_rows_are_named_in_any_process_or_counted(tmp_path):
    folder = write_files("jsonl", tmp_path / "data", DOCUMENTS)
    lines = (folder / "part-1/a.jsonl").read_bytes().splitlines()
    lines[2] = b'{"text": "a\xffb"}'
    (folder / "part-1/a.jsonl").write_bytes(b"\n".join(lines))
    files = find_files([folder])
    for workers in (1, 2):
        with pytest.raises(
            BadData, match=r"part-1/a\.jsonl, row 2: the line is not UTF-8 at its byte 11; repair"
        ):
            tokenize(files, tmp_path / f"out{workers}", TokenizeOptions(shard_bytes=100), workers=workers)
    manifest = tokenize(files, tmp_path / "out", TokenizeOptions(on_error="skip", shard_bytes=100))
    assert manifest.num_skipped == 1
    assert manifest.skipped == (f"{folder}/part-1/a.jsonl, row 2: the line is not UTF-8 at its byte 11",)
    assert manifest.num_documents == len(DOCUMENTS) - 2


def test_a_damaged_folder_of_tokens_is_refused(tmp_path):
    files = find_files([write_files("jsonl", tmp_path / "data", DOCUMENTS)])
    tokenize(files, tmp_path / "out", TokenizeOptions(shard_bytes=400))
    corpus = Corpus(paths=(tmp_path / "out",), seq=8)
    (tmp_path / "out/shard-00001.npy").rename(tmp_path / "out/away")
    with pytest.raises(ValueError) as error:
        corpus.train(tmp_path / "run")
    assert str(error.value).splitlines() == [
        f"{tmp_path}/out is damaged; bring its files back, or give the command that made it again:",
        f"  - there is no token file {tmp_path}/out/shard-00001.npy; make it with write_tokens",
    ]
    (tmp_path / "out/shard-00001.npy").write_bytes((tmp_path / "out/shard-00000.npy").read_bytes())
    with pytest.raises(ValueError, match=r"shard-00001\.(npy|ends)"):
        corpus.train(tmp_path / "run")
    for bad in ("[]", "{", json.dumps({"version": 9}), json.dumps({"version": 1, "num_tokens": -1})):
        (tmp_path / "out/manifest.json").write_text(bad)
        with pytest.raises(ValueError, match=r"manifest\.json is no manifest of tokens: .*; tokenize again"):
            corpus.train(tmp_path / "run")
    shards = [{"file": "../data/x.npy", "num_tokens": 1}]
    manifest = {"version": 1, "num_tokens": 1, "num_documents": 1, "num_skipped": 0, "shards": shards}
    (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ValueError, match=r"file is '\.\./data/x\.npy'; it is the name of a \.npy file in this folder"
    ):
        corpus.train(tmp_path / "run")


def test_tokenizers_of_one_size_and_separator_are_told_apart(tmp_path):
    folder = write_files("jsonl", tmp_path / "data", DOCUMENTS)
    for name, texts in (("a", DOCUMENTS), ("b", ["zebra quartz " * 9])):
        train_tokenizer(texts, 262, tmp_path / f"{name}.json")
        options = TokenizeOptions(tokenizer=str(tmp_path / f"{name}.json"))
        tokenize(find_files([folder]), tmp_path / name, options)
    first, second = (read_manifest(tmp_path / name) for name in "ab")
    assert (first.vocab, first.separator) == (second.vocab, second.separator)
    for paths in ((tmp_path / "a", tmp_path / "b"), (tmp_path / "[ab]/*.npy",)):
        with pytest.raises(ValueError, match=r"a and .*b have tokens of different tokenizers"):
            Corpus(paths=paths, seq=8).train(tmp_path / "run")
    assert Corpus(paths=(tmp_path / "b/*.npy",)).vocab == 262


def test_a_byte_order_mark_of_a_tokenizer_is_no_content(tmp_path, trained):
    (tmp_path / "tokenizer_config.json").write_bytes(b'\xef\xbb\xbf{"eos_token": "<|endoftext|>"}')
    (tmp_path / "tokenizer.json").write_bytes(b"\xef\xbb\xbf" + trained.read_bytes())
    marked, plain = (open_tokenizer(path) for path in (tmp_path, trained))
    assert [each.tolist() for each in marked.encode(DOCUMENTS)] == [
        e.tolist() for e in plain.encode(DOCUMENTS)
    ]
    assert (marked.vocab, marked.separator) == (plain.vocab, plain.separator)


def test_another_separator_in_the_configuration_is_another_plan(tmp_path, trained):
    files = find_files([write_files("jsonl", tmp_path / "data", DOCUMENTS)])
    (tmp_path / "tokenizer.json").write_bytes(trained.read_bytes())
    options = TokenizeOptions(tokenizer=str(tmp_path))
    before = plan_digest(files, options)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    assert plan_digest(files, options) != before


PUBLISHED = {
    # vocabulary; files with eos_token; eos_token_id of config.json, and of generation_config.json
    "Llama 3.1 Instruct": (
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        {"special_tokens_map.json": {"eos_token": "<|eot_id|>"}},
        [0, 1, 2],
        [0, 1, 2],
    ),
    "Qwen 2.5 Instruct": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {"tokenizer_config.json": {"eos_token": "<|im_end|>", "model_max_length": 131072}},
        2,
        [2, 0],
    ),
    "Phi 3 mini": (
        ["<|endoftext|>", "<|assistant|>", "<|end|>"],
        {"tokenizer_config.json": {"eos_token": "<|endoftext|>", "model_max_length": int(1e30)}},
        0,
        [0, 1, 2],
    ),
    "Gemma 2 it, without its generation_config.json": (
        ["<pad>", "<eos>", "<end_of_turn>"],
        {"tokenizer_config.json": {"eos_token": {"content": "<eos>"}}},
        [1, 2],
        None,
    ),
    "one token that differs from the tokenizer's and the model's": (
        ["<s>", "</s>", "<end>"],
        {"tokenizer_config.json": {"eos_token": "</s>"}},
        [0, 1],
        2,
    ),
}


def ends_of_transformers(folder: Path) -> set[int]:
    """By its documentation: of generation_config.json, or where there is none of config.json."""
    file = folder / "generation_config.json"
    file = file if file.is_file() else folder / "config.json"
    found = json.loads(file.read_text())["eos_token_id"]
    return set(found if isinstance(found, list) else [found])


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_ends_a_text_is_that_of_transformers(name, tmp_path):
    from tokenizers import Tokenizer, models

    words, files, of_config, of_generation = PUBLISHED[name]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    made.save(str(tmp_path / "tokenizer.json"))
    numbers = {"config.json": of_config, "generation_config.json": of_generation}
    configs = {name: {"eos_token_id": x, "pad_token_id": -1} for name, x in numbers.items() if x is not None}
    for file, content in (files | configs).items():
        (tmp_path / file).write_text(json.dumps(content))
    tokenizer = open_tokenizer(tmp_path)
    token = next(iter(files.values()))["eos_token"]
    assert words[tokenizer.separator] == (token["content"] if isinstance(token, dict) else token)
    assert set(tokenizer.ends) == ends_of_transformers(tmp_path)
    assert open_tokenizer(tmp_path, words[1]).ends == (1,)
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, "2"]}')
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id is '2'; it is a whole number from 0"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("late", [False, True])
def test_files_that_change_while_they_are_tokenized_are_refused(late, tmp_path, monkeypatch):
    folder = write_files("jsonl", tmp_path / "data", DOCUMENTS)
    files, victim = find_files([folder]), folder / "part-0/a.jsonl"

    # while it is read, or after its shard was written
    name = "replace_file" if late else "write_tokens"
    original = getattr(module, name)

    def write(*given, **options):
        original(*given, **options)
        with victim.open("a") as file:
            file.write('{"text": "more"}\n')

    monkeypatch.setattr(module, name, write)
    with pytest.raises(ValueError, match=r"changed while .* tokenized; wait until .*, delete .*out, and"):
        tokenize(files, tmp_path / "out", TokenizeOptions(on_error="skip"))
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_shard_that_is_lost_or_cut_off_is_made_again(tmp_path):
    files = find_files([write_files("jsonl", tmp_path / "data", DOCUMENTS)])
    options = TokenizeOptions(shard_bytes=150)
    tokenize(files, tmp_path / "out", options)
    whole = contents(tmp_path / "out")
    corpus = Corpus(paths=tuple(file.path for file in files), seq=8)
    expected = corpus.train(tmp_path / "run").fingerprint
    (made,) = (tmp_path / "run").glob("tokens-*")
    for damage in (
        lambda folder: (folder / "shard-00000.npy").unlink(),
        lambda folder: (folder / "shard-00000.ends").unlink(),
        lambda folder: write_tokens(folder / "shard-00000.npy", [[1, 2]], dtype="uint8"),
        lambda folder: (folder / "manifest.json").write_text("{"),
    ):
        damage(tmp_path / "out")
        damage(made)
        with pytest.raises(ValueError, match=r"shard-00000|no manifest"):
            Corpus(paths=(tmp_path / "out",), seq=8).train(tmp_path / "run")
        tokenize(files, tmp_path / "out", options)
        assert contents(tmp_path / "out") == whole
        assert corpus.train(tmp_path / "run").fingerprint == expected


def test_indices_are_hidden_and_patterns_read_finished_folders_alone(tmp_path, monkeypatch):
    files = find_files([write_files("jsonl", tmp_path / "data", DOCUMENTS)])
    options = TokenizeOptions(shard_bytes=150)
    with monkeypatch.context() as patch:

        def kill(*_):
            raise Killed

        patch.setattr(module, "_write_manifest", kill)
        with pytest.raises(Killed):
            tokenize(files, tmp_path / "out", options)
    assert list((tmp_path / "out/.index").glob("rows-*.npy"))
    for pattern in (tmp_path / "out/*.npy", tmp_path / "out/shard-00001.npy"):
        with pytest.raises(ValueError, match="out is not finished; give the same shardtrain data tokenize"):
            corpus_files([pattern])
    tokenize(files, tmp_path / "out", options)
    assert not (tmp_path / "out/.index").exists()
    assert corpus_files([tmp_path / "out/*.npy"]) == corpus_files([tmp_path / "out"])
    assert len(corpus_files([tmp_path / "out/shard-00001.npy"])) == 1
    (tmp_path / "out/other.npy").write_bytes((tmp_path / "out/shard-00001.npy").read_bytes())
    with pytest.raises(ValueError, match=r"other\.npy is not in its manifest"):
        corpus_files([tmp_path / "out/*.npy"])


def test_tokenizers_are_refused_with_what_to_give(tmp_path, trained, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match=r"there is no tokenizer 'byte' \(did you mean 'bytes'\?\); give"
    ):
        open_tokenizer("byte")
    with pytest.raises(
        FileNotFoundError, match=r"there is no tokenizer /.*no/tok\.json; give bytes, or the path of"
    ):
        open_tokenizer("no/tok.json")
    with pytest.raises(ValueError, match="separator is 'x', and bytes are separated by byte 0; leave it out"):
        open_tokenizer("bytes", "x")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is no tokenizer of Hugging Face: "):
        open_tokenizer(tmp_path / "bad.json")
    with pytest.raises(
        ValueError, match=r"has no token '</end>'; name the token that ends a document, such as"
    ):
        open_tokenizer(trained, "</end>")
    assert open_tokenizer(trained, "one" if "one" in trained.read_text() else "a").separator
    # the configuration beside it names the token
    (tmp_path / "tokenizer.json").write_bytes(trained.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "b"}}')
    assert open_tokenizer(tmp_path).separator == HuggingFaceTokenizer(trained, "b").separator
    with pytest.raises(ValueError, match="vocab is 256; use 257 or more: the 256 bytes and the token after"):
        train_tokenizer([], 256, tmp_path / "x.json")
    monkeypatch.setattr(huggingface_tokenizer, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="tokenizers are read by the library tokenizers: install it with uv sync"
    ):
        open_tokenizer(trained)


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=5))
def test_text_comes_back(trained, documents):
    for tokenizer in (Bytes(), open_tokenizer(trained)):
        assert [tokenizer.decode(each.tolist()) for each in tokenizer.encode(documents)] == documents


def test_options_are_checked():
    with pytest.raises(ValueError) as error:
        TokenizeOptions(on_error="ignore", shard_bytes=0)  # type: ignore[arg-type]
    assert str(error.value).splitlines() == [
        "this text cannot be tokenized:",
        "  - on_error is 'ignore'; allowed: stop, skip",
        f"  - shard_bytes is 0; use 1 or more, such as {module.UNIT_BYTES}",
    ]
    with pytest.raises(ValueError) as error:
        Corpus(paths="a", seq=0, on_error="no", vocab_size=0)  # type: ignore[arg-type]
    assert str(error.value).splitlines()[1:] == [
        "  - paths is 'a'; give a list, each item a path: paths=('a',)",
        "  - on_error is 'no'; allowed: stop, skip",
        "  - seq is 0; use 1 or more",
        "  - vocab_size is 0; use 1 to 2**31",
    ]
