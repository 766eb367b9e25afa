"""Byte order marks and lines of white space change nothing, in any reader; another encoding is named."""

import codecs
import gzip
from pathlib import Path

import pyarrow
import pytest
from written_formats import tfrecord_bytes, write_tar

from shardtrain.cli.generate import GenerateOptions, read_prompts
from shardtrain.data import Chat, Corpus, Text
from shardtrain.data.sources import FORMATS
from shardtrain.islands.cluster import read_cluster
from shardtrain.launch.hosts import read_hostfile
from shardtrain.pipeline.table_file import read_table
from shardtrain.plan.advice.fit import read_rows
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.sharding.layout_file import read_layout
from shardtrain.system.untrusted_files import read_json
from shardtrain.trainer.evaluation import read_questions
from shardtrain.trainer.strategy import read_strategy

QUESTION = '{"context": "a\u2028b", "choices": ["c", "d"], "answer": 0}\n'
DOCUMENTS = '{"text": "first ß"}\n{"text": "second"}\n'
TALK = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def prompts(path):
    return read_prompts(GenerateOptions(run=path, prompts=str(path)))


def rows(path):
    (name,) = [name for name, each in FORMATS.items() if path.name.endswith(each.suffixes[0])]
    opened = FORMATS[name].rows(path, None)  # type: ignore[misc]
    # as one after the other, and each by its number
    listed = [record for _, record in opened.iterate(0, None)]
    assert [opened.read(row) for row in range(len(opened))] == listed
    return listed


def packed(path):
    found = Text(paths=(path,), seq=2).pack(path.parent / f"run-{path.name}")
    return found.path.read_bytes(), found.num_documents


def corpus(path):
    return Corpus(paths=(path,), seq=2).train(path.parent / f"run-{path.name}").fingerprint


def chat(path):
    data = Chat(paths=(path,), template="plain", seq=8, heldout_fraction=0)
    return data.train(path.parent / f"run-{path.name}").fingerprint


def write(path, content):
    """Write a text as the file of its ending, compressed or inside of a record."""
    if path.name.endswith(".zst"):
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(content)
    elif path.suffix == ".tar":
        write_tar(path, [{"txt": content}, {"json": content}])
    elif path.suffix == ".tfrecord":
        path.write_bytes(tfrecord_bytes([content, content]))
    else:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


WHOLE = [
    (rows, "a.txt", "first ß\n"),
    (rows, "a.tar", '{"a": 1}'),
    (rows, "a.tfrecord", '{"a": 1}'),
    (rows, "a.tfrecord", "a text"),
    (packed, "a.txt", "first ß\n"),
    (corpus, "a.txt", "first ß\n"),
    (read_json, "a.json", '{"a": "ß"}'),
    (read_cluster, "cluster.toml", '[[islands]]\nkind = "h100"\ncount = 2\n'),
    (read_layout, "mesh.toml", "[mesh]\ndata = 2\n"),
    (read_strategy, "strategy.toml", "accumulate = 2\n"),
]
METRICS = (read_jsonl, "metrics.jsonl", '{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n')
LINES = [
    (rows, "a.jsonl", DOCUMENTS),
    (rows, "a.jsonl.gz", DOCUMENTS),
    (rows, "a.jsonl.zst", DOCUMENTS),
    (corpus, "a.jsonl", DOCUMENTS),
    (chat, "a.jsonl", TALK * 2),
    (chat, "a.jsonl.gz", TALK * 2),
    (read_questions, "a.jsonl", QUESTION * 2),
    (prompts, "a.jsonl", '{"prompt": "a\u2028b"}\n{"prompt": "c"}\n'),
    (prompts, "a.txt", "first ß\nsecond\n"),
    (read_hostfile, "hosts", "a:2\nb slots=3\n"),
    (read_table, "table.csv", "tick,stage,microbatch,kind\n0,0,0,forward\n1,0,0,backward\n"),
    (read_rows, "rows.csv", "model,device,step_seconds\na,b,1\nc,d,2\n"),
]


def ids(case):
    return case.__name__ if callable(case) else case if "." in case and len(case) < 20 else ""


@pytest.mark.parametrize(("read", "name", "text"), [*WHOLE, *LINES], ids=ids)
def test_a_byte_order_mark_is_no_content_and_another_encoding_is_named(read, name, text, tmp_path):
    found = []
    for folder, mark in (("plain", b""), ("marked", codecs.BOM_UTF8)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / name, mark + text.encode())
        found.append(read(tmp_path / folder / name))
    assert found[0] == found[1]
    write(tmp_path / name, codecs.BOM_UTF16_LE + text.encode("utf-16-le"))
    with pytest.raises(ValueError, match=r"it is in UTF-16, .* convert it: iconv -f UTF-16 -t UTF-8"):
        read(tmp_path / name)


@pytest.mark.parametrize(("read", "name", "text"), [*LINES, METRICS], ids=ids)
def test_lines_of_white_space_are_blank(read, name, text, tmp_path):
    first, *others = text.split("\n")
    lines = [" \t", first, "", "\u00a0 ", *others, "\ufeff", "  "]
    found = []
    for folder, content in (("plain", text), ("dos", "\r\n".join(lines)), ("blank", "\n".join(lines))):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / name, content.encode())
        found.append(read(tmp_path / folder / name))
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_a_text_of_a_mark_alone_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8)
    with pytest.raises(ValueError, match=r"a\.txt has a byte order mark, and no text; give text files"):
        packed(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "c.txt").write_bytes("text".encode("utf-16"))
    found = Text(paths=(tmp_path,), seq=2).pack(Path(tmp_path, "run"))
    assert (found.num_documents, found.path.read_bytes()[-5:]) == (1, b"text\0")
    assert len(found.skipped) == 1
    assert "c.txt (it is in UTF-16" in found.skipped[0]
