"""The contract of formats: the same documents give the same windows, whatever they are written in."""

import datetime
import gzip
import json
import lzma
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from written_formats import DOCUMENTS, WRITERS, example, picture, write_files

from shardtrain import cli
from shardtrain.data import Batches, Corpus
from shardtrain.data.corpus import corpus_files
from shardtrain.data.inspection import file_facts
from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import SourceFile, find_files, recognise
from shardtrain.data.sources.format import BadData
from shardtrain.data.sources.images import ImageFolder
from shardtrain.data.sources.payload import parse_example

EXPECTED = b"".join(each.encode() + b"\0" for each in DOCUMENTS if each)


def read_all(windows):
    return [windows[index] for index in range(len(windows))]


def test_every_format_is_written_here():
    assert {*WRITERS, "images"} == set(FORMATS)


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_documents_give_the_same_windows(name, tmp_path):
    folder = write_files(name, tmp_path / "data", DOCUMENTS)
    for paths in ((folder,), (tmp_path / "data/part-*",), tuple(sorted(folder.iterdir()))):
        corpus = Corpus(paths=paths, seq=16, heldout_fraction=0.1)
        train, heldout = corpus.train(tmp_path / "run"), corpus.heldout(tmp_path / "run")
        num_windows = (len(EXPECTED) - 1) // 16
        num_heldout = max(1, round(0.1 * num_windows))
        border = len(EXPECTED) - (num_heldout * 16 + 1)
        assert heldout is not None
        assert len(heldout) == num_heldout
        found = [bytes(window["tokens"].astype(np.uint8)) for window in read_all(train)]
        assert found == [EXPECTED[i : i + 17] for i in range(0, border - 16, 16)]
        assert bytes(heldout[0]["tokens"].astype(np.uint8)) == EXPECTED[border : border + 17]
        # a position saved with one format is right in another
        assert train.fingerprint == "0d6f7ad160b83ea8"
    assert name in corpus.summary(tmp_path / "run")


@pytest.mark.parametrize("name", [name for name in WRITERS if FORMATS[name].rows is not None])
def test_rows_are_read_in_any_order_by_threads(name, tmp_path):
    write_files(name, tmp_path / "data", DOCUMENTS)
    files = find_files([tmp_path / "data"])
    assert {file.format for file in files} == {name}
    opened = [FORMATS[name].rows(file.path, tmp_path / "index") for file in files]  # type: ignore[misc]
    places = [(rows, row) for rows in opened for row in range(len(rows))]
    order = np.random.default_rng(0).permutation(len(places)).tolist()
    with ThreadPoolExecutor(4) as pool:
        texts = dict(
            zip(order, pool.map(lambda i: places[i][0].read(places[i][1])["text"], order), strict=True)
        )
    found = [text.decode() if isinstance(text, bytes) else text for _, text in sorted(texts.items())]
    assert found == DOCUMENTS
    some = [row for row, _ in opened[0].iterate(1, len(opened[0]))]
    assert some == list(range(1, len(opened[0])))
    with pytest.raises(IndexError):
        opened[0].read(len(opened[0]))


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "text"])
def test_a_file_that_is_cut_off_is_named_and_skipped_if_asked(name, tmp_path):
    folder = write_files(name, tmp_path / "data", DOCUMENTS)
    victim = next(file for file in sorted((folder / "part-1").iterdir()) if recognise(file) == name)
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size * 2 // 3 + 3])
    tokens = FORMATS[name].tokens is not None
    with pytest.raises(BadData, match="part-1/") as error:
        len(Corpus(paths=(folder,), seq=16).train(tmp_path / "run"))
    assert "--data.on-error skip" in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    if not tokens:
        corpus = Corpus(paths=(folder,), seq=16, on_error="skip")
        windows = corpus.train(tmp_path / "run")
        assert "; skipped 1 that cannot be read: " in corpus.summary(tmp_path / "run")
        assert windows.num_skipped == 1
        assert 5 < len(windows) < len(EXPECTED) // 16


@pytest.mark.parametrize("name", ["tar", "tfrecord"])
def test_rows_before_a_cut_are_kept(name, tmp_path):
    WRITERS[name](tmp_path, DOCUMENTS)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    whole = [rows_text(row) for _, row in FORMATS[name].rows(path, None).iterate(0, None)]  # type: ignore[misc]
    assert whole == DOCUMENTS
    for stop in range(len(content) // 4, len(content), 1531):
        path.write_bytes(content[:stop])
        found = list(FORMATS[name].rows(path, tmp_path / "index").iterate(0, None))  # type: ignore[misc]
        bad = [row for row, record in found if isinstance(record, BadData)]
        if name == "tar" and stop >= content.rindex(b"number 29") + 1024:
            assert not bad  # there is more than one block of zeros at the end
            continue
        assert "all that follows is lost" in file_facts(SourceFile(path, name)).problem
        texts = [rows_text(record) for _, record in found[:-1]]
        assert bad == [len(texts)]
        assert len(texts) > 5
        # a tar file may be cut off between the files of a row
        assert texts[:-1] == DOCUMENTS[: len(texts) - 1]
        assert texts[-1] in (DOCUMENTS[len(texts) - 1], None)
        assert "all that follows is lost" in str(found[-1][1])


def rows_text(record):
    text = record.get("text")
    return text.decode() if isinstance(text, bytes) else text


def test_a_damaged_row_group_counts_all_its_rows_and_other_columns_do_not_matter(tmp_path):
    path = tmp_path / "a.parquet"
    far = [datetime.datetime(2020, 1, 1)] * 12
    table = pyarrow.table({"text": [f"row {i} says" for i in range(12)], "when": far})
    # a date that Python does not have
    table = table.set_column(1, "when", pyarrow.array([2**62] * 12, pyarrow.timestamp("us")))
    pyarrow.parquet.write_table(table, path, row_group_size=4, compression="none", use_dictionary=False)
    corpus = Corpus(paths=(path,), seq=8)
    corpus.train(tmp_path / "run")
    assert "12 documents" in corpus.summary(tmp_path / "run")
    with pytest.raises(BadData, match=r"a\.parquet, row 0: field when cannot be read \("):
        dict(FORMATS["parquet"].rows(path, None).read(0))  # type: ignore[misc]
    content = path.read_bytes()
    place = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    path.write_bytes(content[:place] + b"\xff" * 20 + content[place + 20 :])
    corpus = Corpus(paths=(path,), seq=8, on_error="skip")
    corpus.train(tmp_path / "run")
    assert "8 documents" in (summary := corpus.summary(tmp_path / "run"))
    assert "skipped 4 that cannot be read: " in summary
    assert summary.count("row group 1 (rows 4 to 7) cannot be read") == 1


def test_names_decide_before_contents(tmp_path):
    folder = write_files("parquet", tmp_path / "data", DOCUMENTS)
    (folder / "part-0/a.parquet").rename(folder / "part-0/shard")
    assert recognise(folder / "part-0/shard") == "parquet"
    assert recognise(folder / "part-1/A.PARQUET") == "parquet"
    (tmp_path / "odd").write_text("plain words")
    assert recognise(tmp_path / "odd") is None
    assert find_files([tmp_path / "odd"], "text") == [SourceFile(tmp_path / "odd", "text")]


def test_what_cannot_be_found_is_listed(tmp_path, monkeypatch):
    (tmp_path / "odd").write_text("plain words")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError) as error:
        find_files([tmp_path / "no*.jsonl", tmp_path / "odd", tmp_path / "empty"])
    lines = str(error.value).splitlines()
    assert lines[0] == "this data cannot be read:"
    assert lines[1] == f"  - {tmp_path}/no*.jsonl matches no file; give a file, a folder or a pattern"
    assert lines[2].startswith(f"  - {tmp_path}/odd is of no known format (text, jsonl, ")
    assert lines[3].startswith(f"  - {tmp_path}/empty has no file of a known format (text, ")
    with pytest.raises(ValueError, match=r"there is no format 'parqet' \(did you mean 'parquet'\?\)"):
        find_files([tmp_path], "parqet")
    write_files("parquet", tmp_path / "data", DOCUMENTS)
    monkeypatch.setattr("shardtrain.data.sources.find.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="parquet files are read by the library pyarrow: install it with uv sync --extra"
    ):
        find_files([tmp_path / "data"])


def test_splits_of_a_dataset_are_not_mixed(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        WRITERS["arrow"](tmp_path / split, DOCUMENTS)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match="has the splits test, train; name one of these folders"):
        find_files([tmp_path])
    assert len(find_files([tmp_path / "train"])) == 1

    # also in a folder that is searched, or found by a pattern
    (tmp_path / "all").mkdir()
    (tmp_path / "train").rename(tmp_path / "all/train")
    (tmp_path / "test").rename(tmp_path / "all/test")
    (tmp_path / "dataset_dict.json").rename(tmp_path / "all/dataset_dict.json")
    for pattern in (tmp_path, tmp_path / "*"):
        with pytest.raises(ValueError, match="all has the splits test, train; name one of these folders"):
            find_files([pattern])


def test_a_file_is_read_once_by_whatever_patterns_and_links(tmp_path):
    web = write_files("jsonl", tmp_path / "web", DOCUMENTS)
    (web / "part-0/README.md").write_text("about the data")
    (web / "again.jsonl").symlink_to(web / "part-0/a.jsonl")
    expected = [web / f"part-{i}/a.jsonl" for i in range(3)]
    for patterns in (
        [web / "**/*.jsonl"],
        [web / "part-*", web / "part-1/*.jsonl", f"{web}/../web/part-2"],
        [web / "part-*/*.jsonl", web],
    ):
        found = [os.path.realpath(file.path) for file in corpus_files(patterns)]
        assert sorted(found) == [*map(str, expected)]
    names = [(file.path.name, file.format) for file in find_files([web / "**"])]
    assert sorted(names) == [
        ("README.md", "text"),
        ("a.jsonl", "jsonl"),
        ("a.jsonl", "jsonl"),
        ("again.jsonl", "jsonl"),
    ]
    assert [file.format for file in find_files([web / "part-0/README.md"])] == ["text"]
    write_files("npy", tmp_path / "tokens", DOCUMENTS)
    assert len(corpus_files([tmp_path / "tokens", tmp_path / "tokens/*/*.npy"])) == 3


def test_folders_that_are_not_entered_and_what_is_no_file_are_named(tmp_path):
    web = write_files("jsonl", tmp_path / "web", DOCUMENTS)
    (web / "part-2").rename(tmp_path / "away")
    (web / "part-2").symlink_to(tmp_path / "away")
    with pytest.raises(
        ValueError, match=r"web has folders that are not entered: .*part-2 \(a link; name .*away"
    ):
        find_files([web])
    assert len(find_files([web / "part-*"])) == 3
    (web / "part-2").unlink()
    os.mkfifo(web / "pipe")
    os.mkfifo(web / "pipe.jsonl")
    assert len(find_files([web])) == 2
    for name in ("pipe", "pipe.jsonl"):
        with pytest.raises(ValueError, match=rf"{name} is a FIFO; give a regular file"):
            find_files([web / name])


@pytest.mark.parametrize("name", ["jsonl.gz", "jsonl.zst"])
def test_a_compressed_file_of_0_bytes_is_damaged(name, tmp_path):
    folder = write_files(name, tmp_path / "data", DOCUMENTS)
    next((folder / "part-1").iterdir()).write_bytes(b"")
    with pytest.raises(BadData, match=rf"part-1/a\.{name}: it has 0 bytes: it was cut off"):
        Corpus(paths=(folder,), seq=8).train(tmp_path / "run")


TAR = b"\0" * 257 + b"ustar" + b"\0" * 250


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "a.tar.gz",
            gzip.compress(TAR, mtime=0),
            "it is a tar file compressed by gzip, and read uncompressed alone;",
        ),
        ("shard", gzip.compress(TAR, mtime=0), "it is a tar file compressed by gzip"),
        ("a.tar.xz", lzma.compress(TAR), r"it is a tar file compressed by xz, .* unxz -k .*a\.tar\.xz"),
        (
            "a.txt.gz",
            gzip.compress(b"text", mtime=0),
            r"it is compressed by gzip; decompress it: gunzip -k .*\.txt\.gz",
        ),
        ("a.zip", b"PK\x03\x04", "it is a zip archive; unpack it: unzip "),
        ("a.csv", b"a,b\n", "it is a table as text; write its rows as JSON lines or Parquet"),
        ("a.pkl", b"\x80\x04", "it is a pickle of Python, which may run code; write its rows"),
        (
            "a.jsonl.gz",
            gzip.compress(TAR, mtime=0),
            r"a\.jsonl\.gz: what it compresses cannot be read: it is a tar file",
        ),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), r"a\.jsonl: it is compressed by gzip; decompress it"),
        ("a.txt", b"PAR1\xff", r"a\.txt, row 0: it is a Parquet file; give it the ending \.parquet"),
        ("a.tar", gzip.compress(TAR, mtime=0), r"a\.tar: it is compressed by gzip; decompress it"),
    ],
)
def test_a_file_of_another_kind_is_named_with_what_to_do(name, content, problem, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    code = cli.main(["data", "check", str(tmp_path / name)])
    out, err = capsys.readouterr()
    assert code in (1, 2)
    assert re.search(problem, out + err)
    # nor is it left out of a folder without a word
    (tmp_path / "a good one.jsonl").write_text("{}")
    if "compressed by" in problem:
        assert cli.main(["data", "check", str(tmp_path)]) in (1, 2)
        assert re.search(problem, "".join(capsys.readouterr()))


def test_tokens_and_text_are_not_mixed(tmp_path):
    write_files("npy", tmp_path / "a", DOCUMENTS)
    write_files("jsonl", tmp_path / "b", DOCUMENTS)
    with pytest.raises(ValueError, match="tokens and text cannot be mixed; make tokens of the text first"):
        Corpus(paths=(tmp_path / "a", tmp_path / "b")).train(tmp_path / "run")
    with pytest.raises(ValueError, match=r"tokenizer is some\.json, and .*a\.npy has tokens already"):
        Corpus(paths=(tmp_path / "a",), tokenizer="some.json", vocab_size=300).train(tmp_path / "run")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "\xff"}', "the line is not UTF-8 at its byte 10"),
        (b"{no json}", r"the line is no JSON \(Expecting property name[^)]*\(char 1\)\)"),
        (b"[1]", "the line is a JSON list, not an object"),
        (
            b'{"txt": "a"}',
            r"it has no field 'text' \(did you mean 'txt'\?\); name that of the text: --data.text",
        ),
        (b'{"text": 5}', "field text is int, not text"),
        (b'{"text": "\\ud800"}', "field text is no valid Unicode at character 0"),
        (b'{"text": "a\\u0000b"}', "the text has byte 0, which separates documents"),
    ],
)
def test_a_bad_line_is_named_with_its_row(line, why, tmp_path):
    lines = [json.dumps({"text": f"good line {i}"}).encode() for i in range(9)]
    lines[4] = line
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(BadData, match=rf"a\.jsonl, row 4: {why}; repair it, or leave out"):
        Corpus(paths=(tmp_path / "a.jsonl",), seq=8).train(tmp_path / "run")
    corpus = Corpus(paths=(tmp_path / "a.jsonl",), seq=8, on_error="skip")
    corpus.train(tmp_path / "run")
    assert "8 documents, 96 tokens; skipped 1 that cannot be read: " in corpus.summary(tmp_path / "run")


def test_a_shard_that_vanishes_while_it_is_read_is_named(tmp_path):
    write_files("npy", tmp_path / "data", DOCUMENTS)
    windows = Corpus(paths=(tmp_path / "data",), seq=16).train(tmp_path / "run")
    (tmp_path / "data/part-2/a.npy").unlink()
    assert len(windows[0]["tokens"]) == 17
    with pytest.raises(
        OSError, match=r"part-2/a\.npy cannot be read: No such file or directory; bring it back"
    ):
        windows[len(windows) - 1]
    (tmp_path / "data/part-1/a.npy").write_bytes((tmp_path / "data/part-1/a.npy").read_bytes()[:140])
    with pytest.raises(OSError, match=r"part-1/a\.npy was cut off .*: it ends after \d+ of 118 tokens"):
        read_all(windows)


def test_a_token_outside_of_the_vocabulary_is_named(tmp_path):
    write_files("npy", tmp_path / "data", DOCUMENTS)
    windows = Corpus(paths=(tmp_path / "data",), seq=16, vocab_size=120).train(tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"a\.npy, token \d+, is 195, which is not below vocab 120; set vocab"
    ):
        read_all(windows)


def test_ten_million_windows_of_a_thousand_shards_hold_few_files(tmp_path):
    """Opened by headers alone: files with holes stand for 100 GB."""
    for i in range(1000):
        header = {"descr": "<u2", "fortran_order": False, "shape": (10_000 * 512,)}
        with (tmp_path / f"{i:04}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 10_000 * 512 * 2)
    windows = Corpus(paths=(tmp_path / "*.npy",), seq=512, vocab_size=2, heldout_fraction=0).train(tmp_path)
    assert len(windows) == 9_999_999
    batches = Batches(source=windows, batch=200, seed=3)
    batch = batches.load({"epoch": 2, "index": 9_999_000})
    assert batch["tokens"].shape == (200, 513)
    assert len(os.listdir("/proc/self/fd")) < 200


def test_images_are_samples_with_classes(tmp_path):
    for i in range(6):
        path = tmp_path / "birds" / ("wren", "gull", "auk")[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(i))
    (tmp_path / "birds/.hidden.png").write_bytes(b"")
    (found,) = find_files([tmp_path / "birds"])
    assert found == SourceFile(tmp_path / "birds", "images")
    rows = ImageFolder(found.path, tmp_path / "index")
    listed = [(rows.read(i)["name"], rows.read(i)["label"], rows.read(i)["class"]) for i in range(len(rows))]
    assert listed[:3] == [("auk/2.png", 0, "auk"), ("auk/5.png", 0, "auk"), ("gull/1.png", 1, "gull")]
    assert rows.read(5)["image"] == picture(3)
    # the list is used again until a folder changes
    (tmp_path / "birds/auk/9.png").write_bytes(picture(9))
    assert len(ImageFolder(found.path, tmp_path / "index")) == 7


def test_a_message_of_tensorflow_is_parsed():
    message = example(a=[b"x", b"y"], n=np.array([3, -1]), f=np.array([0.5, 2.0]))
    found = parse_example(message)
    assert found["a"] == [b"x", b"y"]
    assert found["n"].tolist() == [3, -1]
    assert found["f"].tolist() == [0.5, 2.0]
    for other in (b"\n\x05plain", b"pl"):  # the second is a field of another message
        with pytest.raises(ValueError, match="it is no tf"):
            parse_example(other)
