"""Data, tokenizers, caches and cluster files of strangers, crafted or mutated; see `test_fuzz.py`."""

import io
import json
import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guarded_readers import EVIL, garbled, spoilt
from PIL import Image
from written_formats import DOCUMENTS, WRITERS, picture

from shardtrain.cli.generate import GenerateOptions, read_prompts
from shardtrain.data.chat_template import open_template
from shardtrain.data.conversations import read_conversations
from shardtrain.data.documents import Piece
from shardtrain.data.huggingface_tokenizer import HuggingFaceTokenizer, train_tokenizer
from shardtrain.data.image_decoding import decode_image, decode_part
from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import SourceFile, find_files
from shardtrain.data.sources.format import BadData
from shardtrain.data.token_manifest import read_manifest
from shardtrain.data.tokens import TokenShards
from shardtrain.islands.cluster import read_cluster
from shardtrain.launch.hosts import read_hostfile
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.system.program_cache import drop_broken, is_whole
from shardtrain.trainer.evaluation import read_questions
from shardtrain.trainer.strategy import read_strategy

NUMBERS = (-1, 0, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63)
MOST_ROWS = 60


@pytest.fixture
def number(pytestconfig) -> int:
    """How many files of each format are tried."""
    return 300 if pytestconfig.getoption("--full") else 24


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return a file with something garbled, or with an extreme whole number in it."""
    if rng.random() < 0.5 or len(data) < 8:
        return garbled(data or b"a", rng)
    changed, at = bytearray(data), rng.randrange(len(data) - 7)
    number = struct.pack(rng.choice("<>") + "Q", rng.choice(NUMBERS) % 2**64)
    # the last four of big endian, the first of little endian, or all
    part = number[-4:] if number[:4] == bytes(4) else number[: rng.choice((4, 8))]
    changed[at : at + len(part)] = part
    return bytes(changed)


def read_rows(path: Path, name: str, folder: Path | None) -> int:
    """Read rows with all of their fields; return how many are whole."""
    found = FORMATS[name]
    if found.tokens is not None:
        shards = TokenShards([found.tokens(path)])
        shards.read(0, min(shards.num_tokens, MOST_ROWS))
        return len(shards.ends_in(0, shards.num_tokens))
    assert found.rows is not None
    rows, whole = found.rows(path, folder), 0
    for _, record in rows.iterate(0, None if found.whole else min(len(rows), MOST_ROWS)):
        if isinstance(record, BadData):
            continue
        try:
            whole += bool([record[field] for field in record])
        except BadData:
            continue
    return whole


@pytest.mark.parametrize("name", [*WRITERS, "images"])
def test_formats_of_data(name, guarded, tmp_path, number):
    folder, rng, found = tmp_path / "data", random.Random(name), []
    folder.mkdir()
    if name == "images":
        (folder / "cat").mkdir()
        (folder / "cat" / "0.png").write_bytes(picture(0))
    else:
        WRITERS[name](folder, DOCUMENTS[:9])
    files = [path for path in folder.rglob("*.*") if path.suffix != ".json"]
    (opened,) = {file.path: file for file in find_files([folder], None if name == "images" else name)[:1]}
    contents = {path: path.read_bytes() for path in files}
    assert read_rows(opened, name, tmp_path / "index") > 0 or name == "npy"
    for i in range(number):
        path = rng.choice(files)
        path.write_bytes(mutated(contents[path], rng))
        index = tmp_path / "index" if i % 2 else None
        found.append(guarded(lambda index=index: read_rows(opened, name, index)))
        path.write_bytes(contents[path])
    assert any(isinstance(each, int) for each in found)


@pytest.mark.parametrize("name", ["jsonl", "tfrecord", "tar"])
def test_indices_of_rows(name, guarded, tmp_path, number):
    """Of a run folder, which may come from elsewhere."""
    folder, index, rng = tmp_path / "data", tmp_path / "index", random.Random(name)
    folder.mkdir()
    WRITERS[name](folder, DOCUMENTS)
    (opened,) = [file.path for file in find_files([folder], name)]
    read_rows(opened, name, index)
    (written,) = index.iterdir()
    content = written.read_bytes()
    for _ in range(number):
        written.write_bytes(mutated(content, rng))
        guarded(lambda: read_rows(opened, name, index))
    np.save(written, np.array([[0, 2**62], [-1, 5]], np.int64))
    guarded(lambda: read_rows(opened, name, index))


def test_images(guarded, number):
    rng = random.Random("image")
    contents = [picture(i, (20, 30), kind) for i, kind in enumerate(("PNG", "JPEG", "GIF", "BMP", "TIFF"))]
    strip = io.BytesIO()
    Image.new("RGB", (1, 60_000)).save(strip, "PNG")
    assert isinstance(guarded(lambda: decode_image(strip.getvalue(), 224)), ValueError)

    def decode(content: bytes) -> Any:
        try:
            decode_image(content, 16)
            return decode_part(content, 16, lambda width, height: (0, 0, width, height))
        except Exception as error:  # as the source of images does
            return error

    given = [mutated(rng.choice(contents), rng) for _ in range(number)]
    found = [guarded(lambda content=content: decode(content)) for content in given]
    assert any(isinstance(each, Exception) for each in found)


def test_tokenizer_folders(guarded, tmp_path, number):
    rng = random.Random("tokenizer folder")
    path, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    train_tokenizer(["a b c"], 260, path)
    content, found = path.read_bytes(), json.loads(path.read_bytes())
    named = [{"name": "default", "template": "{{ messages }}"}]
    values = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": None, "chat_template": named}

    def opened() -> Any:
        tokenizer = HuggingFaceTokenizer(path)
        tokenizer.decode(tokenizer.encode(["a b"])[0].tolist())
        return open_template("tokenizer", str(tmp_path), tokenizer, "all")

    for i in range(number):
        text = json.dumps(spoilt(values, rng)).encode()
        config.write_bytes(text if i % 3 else garbled(text, rng))
        path.write_bytes(json.dumps(spoilt(found, rng)).encode() if i % 4 == 3 else content)
        guarded(opened)
    path.write_bytes(content)
    config.write_text(json.dumps({"chat_template": [{"name": ["a"], "template": "x"}]}))
    assert "has no chat template" in str(guarded(opened))
    for each in (config, path):
        each.unlink()
        os.mkfifo(each)
        guarded(opened)


def test_program_caches(guarded, tmp_path, number):
    rng, program = random.Random("programs"), tmp_path / "a-cache"
    for i in range(number):
        program.write_bytes(garbled(zlib.compress(b"program"), rng))
        # later than the last check, and no longer being written
        os.utime(program, (i + 1, i + 1))
        (tmp_path / "checked").unlink(missing_ok=True)
        assert guarded(lambda: drop_broken(tmp_path)) is None
        assert not program.exists() or is_whole(program.read_bytes())


CLUSTER = """link_gb_per_second = 12.5
[[islands]]
kind = 'a'
count = 2
nodes = 2
processes = 4
devices = 8
device = { name = 'x', teraflops = 1.0 }
launch.slurm.constraint = 'a100'
strategy.accumulate = 2
"""
LINES: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "metrics": (read_jsonl, {"step": 1, "loss": 0.5}),
    "questions": (read_questions, {"context": "a", "choices": ["b", "c"], "answer": 0}),
    "prompts": (lambda path: read_prompts(GenerateOptions(run="", prompts=str(path))), {"prompt": "Once"}),
    "chats": (
        lambda path: list(read_conversations(Piece(SourceFile(path, "jsonl")), "messages", None)),
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{"b": []}]}], "tools": "[]"},
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_json_lines(name, guarded, tmp_path, number):
    read, value = LINES[name]
    path, rng = tmp_path / "a.jsonl", random.Random(name)
    for i in range(number):
        line = json.dumps(spoilt(value, rng)).encode()
        lines = [json.dumps(value).encode(), garbled(line, rng) if i % 2 else line, b"", line]
        path.write_bytes(b"\n".join(lines))
        guarded(lambda: read(path))
    for deep in (b"[" * 100_000, b'{"messages":' * 900 + b"1" + b"}" * 900):
        path.write_bytes(deep + b"\n" + deep)
        guarded(lambda: read(path))


@pytest.mark.parametrize("read", [read_cluster, read_strategy, read_hostfile, read_manifest])
def test_files_of_clusters_and_runs(read, guarded, tmp_path, number):
    path, rng = tmp_path / "manifest.json", random.Random(read.__name__)
    values = [json.dumps(each).encode() for each in EVIL] + [b"9" * 4000, b"1" + b"0" * 30, b"-1", b"inf"]
    for i in range(number):
        lines = CLUSTER.encode().split(b"\n")
        at = rng.choice([n for n, line in enumerate(lines) if b"=" in line])
        lines[at] = lines[at].partition(b"=")[0] + b"= " + rng.choice(values)
        path.write_bytes(b"\n".join(lines) if i % 3 else garbled(b"\n".join(lines), rng))
        found = guarded(lambda: read(tmp_path if read is read_manifest else path))
        assert not isinstance(found, OSError), found
