"""Files of data that declare what they do not have: a row or file is named, and nothing hangs or ends."""

import gzip
import tarfile
from functools import partial

import numpy as np
import pyarrow
import pytest

from shardtrain.data.sources import json_lines
from shardtrain.data.sources.columns import Columns, open_arrow
from shardtrain.data.sources.format import BadData
from shardtrain.data.sources.megatron import HEAD, MAGIC, find_tokens
from shardtrain.data.sources.row_offsets import row_offsets
from shardtrain.data.sources.tar import TarRows
from shardtrain.system.untrusted_data import read_lines


def arrow_file(path, kind=None):
    table = pyarrow.table({"text": pyarrow.array([f"row {i}" for i in range(20)], kind)})
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    return path


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_binary()])
def test_an_arrow_value_outside_of_its_buffer_is_refused(kind, tmp_path):
    path = arrow_file(tmp_path / "a.arrow", kind)
    dtype = np.int64 if "large" in str(kind) else np.int32
    offsets = np.arange(0, 55, 5, dtype=dtype).tobytes()  # ten values of five bytes
    content = path.read_bytes()
    assert offsets in content
    wrong = np.frombuffer(offsets, dtype).copy()
    wrong[5] = 2**31 - 1
    path.write_bytes(content.replace(offsets, wrong.tobytes(), 1))
    rows = open_arrow(path)
    with pytest.raises(BadData, match=r"row group 0 \(rows 0 to 9\) cannot be read"):
        rows.read(5)["text"]
    assert rows.read(15)["text"] in ("row 15", b"row 15")


def test_a_text_that_is_not_utf8_is_one_row_also_within_lists(tmp_path):
    path = tmp_path / "a.arrow"
    table = pyarrow.table({"chat": [[{"content": f"row {i}"}] for i in range(3)]})
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    path.write_bytes(path.read_bytes().replace(b"row 1", b"row\xff1"))
    rows = open_arrow(path)
    assert rows.read(2)["chat"] == [{"content": "row 2"}]
    with pytest.raises(BadData, match="row 1: a text is not UTF-8"):
        rows.read(1)["chat"]


def test_an_arrow_file_that_is_cut_off_while_it_is_open_is_named(tmp_path):
    path = arrow_file(tmp_path / "a.arrow")
    rows = open_arrow(path)
    before = rows.read(0)
    assert before["text"] == "row 0"
    with path.open("r+b") as file:
        file.truncate(100)
    assert before["text"] == "row 0"
    with pytest.raises(BadData, match="the file was cut off since it was opened"):
        rows.read(10)["text"]


def test_a_group_that_cannot_be_read_is_asked_for_once(tmp_path):
    (tmp_path / "a").write_bytes(b"1234")
    asked = []

    def load(group, name):
        asked.append(group)
        raise MemoryError("2**60 bytes")

    rows = Columns(tmp_path / "a", [100, 100], ["text"], load)
    for row in (0, 100, 1, 101, 2):
        with pytest.raises(BadData, match=r"cannot be read \(2\*\*60 bytes\)"):
            rows.read(row)["text"]
    assert asked == [0, 1]
    with pytest.raises(BadData, match="it declares 4,611,686,018,427,387,904 rows; a file of its size has"):
        Columns(tmp_path / "a", [2**62], ["text"], load)


def _size(value: int) -> bytes:
    return b"\x80" + value.to_bytes(11, "big") if value >= 0 else value.to_bytes(12, "big", signed=True)


@pytest.mark.parametrize(
    ("kind", "size", "count"),
    [
        *((tarfile.REGTYPE, size, 1) for size in (-512, 2**40, 2**80)),
        *((kind, 2**40, 1) for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME)),
        (tarfile.XHDTYPE, 0, 3000),
        (tarfile.GNUTYPE_SPARSE, 512, 1),
    ],
)
def test_a_tar_header_that_declares_too_much_ends_the_rows(kind, size, count, tmp_path):
    def header(name, kind, size):
        member = tarfile.TarInfo(name)
        member.type = kind
        content = bytearray(member.tobuf(tarfile.GNU_FORMAT))
        content[124:136] = _size(size)
        content[148:156] = b" " * 8
        content[148:156] = b"%06o\0 " % sum(content)
        return bytes(content)

    path = tmp_path / "a.tar"
    whole = header("0.txt", tarfile.REGTYPE, 5) + b"hello".ljust(512, b"\0")
    path.write_bytes(whole + header("1.txt", kind, size) * count + bytes(1024))
    rows = TarRows(path)
    assert rows.read(0) == {"__key__": "0", "text": "hello"}
    assert len(rows) == 2
    with pytest.raises(BadData, match=r"row 1: the file is damaged, or ends, after byte 1,024"):
        rows.read(1)
    path.write_bytes(header("1.txt", kind, size) * count + bytes(1024))
    with pytest.raises(BadData):
        TarRows(path)


def test_a_compressed_line_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "read_lines", partial(read_lines, most_bytes=100))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "' + b"b" * 200 + b'"}\n'))
    rows = json_lines.CompressedLines(path, gzip.GzipFile)  # type: ignore[arg-type]
    (_, first), (row, second) = rows.iterate(0, None)
    assert first == {"text": "a"}
    assert "a line has more than 100 bytes; split it into several" in str(second)
    assert row == 1


@pytest.mark.parametrize(
    "index",
    [
        np.zeros(4, np.float32),
        np.zeros((2, 2), np.int64),
        np.zeros((3, 3), np.uint64),
        np.zeros((2, 2), object),
    ],
)
def test_an_index_of_another_kind_is_made_again(index, tmp_path):
    path, folder = tmp_path / "a.jsonl", tmp_path / "index"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    row_offsets(path, folder, json_lines.find_line_offsets)
    (written,) = folder.iterdir()
    np.save(written, index)
    assert json_lines.JsonLines(path, folder).read(1) == {"text": "b"}


@pytest.mark.parametrize("pair", [(0, 2**62), (2**63, 5), (9, 3), (20, 40)])
def test_an_index_that_leads_beyond_the_file_is_not_believed(pair, tmp_path):
    path, folder = tmp_path / "a.jsonl", tmp_path / "index"
    path.write_text('{"text": "a"}\n')
    row_offsets(path, folder, json_lines.find_line_offsets)
    (written,) = folder.iterdir()
    np.save(written, np.array([pair], np.uint64))
    with pytest.raises(BadData, match=r"the row has|its index is wrong"):
        json_lines.JsonLines(path, folder).read(0)


def test_negative_lengths_of_megatron_are_refused(tmp_path):
    lengths = np.array([5, -3, 2], "<i4").tobytes()
    (tmp_path / "a.idx").write_bytes(MAGIC + HEAD.pack(1, 8, 3, 4) + lengths + bytes(24))
    (tmp_path / "a.bin").write_bytes(bytes(8))
    with pytest.raises(BadData, match="has a sequence of a negative length"):
        find_tokens(tmp_path / "a.bin")
