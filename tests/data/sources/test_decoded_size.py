"""Small files of columns that decode to any size are refused before memory is taken."""

import resource
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from shardtrain.data.sources import columns, decoded_size
from shardtrain.data.sources.columns import open_arrow, open_parquet
from shardtrain.data.sources.format import BadData
from shardtrain.data.sources.parquet_columns import measure_decoded_column

MANY = 300_000


def read_within(bound, read):
    """Call it where the process gets at most so many bytes more."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + bound, limits[1]))
    try:
        return read()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def first_text(open_file, path):
    return read_within(1 << 30, lambda: open_file(path).read(0)["text"])


@pytest.fixture
def small_bound(monkeypatch):
    for module in (decoded_size, columns):
        monkeypatch.setattr(module, "LEAST_BYTES", 1 << 20)


def one_row(values):
    return pyarrow.ListArray.from_arrays(pyarrow.array([0, len(values)], pyarrow.int32()), values)


def repeated(text, count=MANY):
    indices = pyarrow.array(np.zeros(count, np.int32))
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([text]))


def views(text, count=MANY):
    view = np.array([len(text)], "<i4").tobytes() + text[:4].encode() + bytes(8)
    buffers = [None, pyarrow.py_buffer(view * count), pyarrow.py_buffer(text.encode())]
    return pyarrow.Array.from_buffers(pyarrow.string_view(), count, buffers)


def list_view(count):
    places, sizes = [0] * count, [count] * count
    return pyarrow.ListViewArray.from_arrays(places, sizes, pyarrow.array(range(count)))


def parquet(path, column, **options):
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, store_schema=False, **options)


PARQUET = {
    "a compressed text": (
        lambda: ["a" * 2_000_000], {"use_dictionary": False}, r"the column would take 2,0\d\d,",
    ),
    "equal numbers": (
        lambda: one_row(pyarrow.array(np.zeros(1 << 18, np.int32))), {},
        r"the column would take 3,1\d\d,\d{3} bytes; at most 1,\d{3},\d{3} are read; write smaller",
    ),
    "equal texts of a row": (
        lambda: one_row(repeated("a" * 100_000, 20_000)), {}, "the row would take 2,000,",
    ),
    "texts that begin as the one before": (
        lambda: ["a" * 100_000] * 100,
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
        "the column would take .* without DELTA_BYTE_ARRAY",
    ),
    "the same in a row": (
        lambda: one_row(pyarrow.array(["a" * 100_000] * 100)),
        {"use_dictionary": False, "column_encoding": {"text.list.element": "DELTA_BYTE_ARRAY"}},
        "the column would take .* without DELTA_BYTE_ARRAY",
    ),
}  # fmt: skip


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("case", PARQUET)
def test_a_small_parquet_file_that_decodes_to_much_is_refused(case, version, tmp_path, small_bound):
    make, options, words = PARQUET[case]
    path = tmp_path / "a.parquet"
    parquet(path, make(), compression="zstd", data_page_version=version, **options)
    assert path.stat().st_size < 1 << 16
    with pytest.raises(BadData, match=words):
        first_text(open_parquet, path)


def test_texts_are_read_where_copies_would_be_large(tmp_path):
    path = tmp_path / "a.parquet"
    parquet(path, repeated("a" * 100_000))
    assert first_text(open_parquet, path) == "a" * 100_000
    delta = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    parquet(path, ["a" * 200 + str(i) for i in range(2000)], **delta)
    assert open_parquet(path).read(1999)["text"] == "a" * 200 + "1999"


def test_a_column_whose_bound_is_large_and_values_are_small_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    chats = [[{"role": "user", "text": f"{i}" * 20}, {"role": "bot", "text": None}] for i in range(9000)]
    chats[7][1]["text"] = "a" * 500_000  # times 18,000
    parquet(path, chats)
    rows = open_parquet(path)
    assert [rows.read(row)["text"] for row in range(9000)] == chats


ARROW = {
    "equal texts of a row": (lambda: one_row(repeated("a" * 100_000)), "the row would take 30,000,"),
    "views of a text": (lambda: one_row(views("a" * 100_000)), "text would take 30,000,"),
    "nothing": (lambda: one_row(pyarrow.nulls(1 << 30)), "a batch would take 12,884,901,888 bytes"),
    "lists that share their values": (lambda: list_view(1000), "write plain lists"),
}


@pytest.mark.parametrize("case", ARROW)
def test_an_arrow_row_that_shares_its_values_is_bounded(case, tmp_path):
    make, words = ARROW[case]
    table = pyarrow.table({"text": make()})
    path = tmp_path / "a.arrow"
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(BadData, match=words):
        first_text(open_arrow, path)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("new", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
def test_a_compressed_arrow_file_is_bounded_by_the_sizes_before_its_buffers(codec, new, tmp_path):
    path, options = tmp_path / "a.arrow", pyarrow.ipc.IpcWriteOptions(compression=codec)
    table = pyarrow.table({"text": ["a" * 400_000]})
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table)
    assert open_arrow(path).read(0)["text"] == "a" * 400_000
    # the last such number is before the texts, others are offsets
    before, size, after = path.read_bytes().rpartition((400_000).to_bytes(8, "little"))
    assert size
    path.write_bytes(before + (1 << 40).to_bytes(8, "little") + after)
    with pytest.raises(BadData, match=r"would take 1,099,511,6\d\d,\d{3} bytes; at most 53\d,"):
        first_text(open_arrow, path)


def test_rows_of_shared_values_are_read_where_they_are_small(tmp_path):
    chats = pyarrow.array([["a", "b"], ["b"]], pyarrow.list_(pyarrow.dictionary(pyarrow.int8(), "string")))
    tags = pyarrow.array([[("k", "v")], []], pyarrow.map_("string", pyarrow.string_view()))
    table = pyarrow.table({"chats": chats, "tags": tags})
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    rows = open_arrow(tmp_path / "a.arrow")
    assert [rows.read(row)["chats"] for row in (0, 1)] == [["a", "b"], ["b"]]
    assert rows.read(0)["tags"] == [("k", "v")]


@pytest.mark.parametrize("kind", [7, 8])
def test_a_list_in_a_header_has_no_values_behind_the_end(kind):
    """Of 2**49 doubles, or of texts of so many bytes."""
    many = bytes([0xFF] * 6 + [0x7F])
    with pytest.raises(ValueError, match="the file ends in a header of a page"):
        measure_decoded_column(bytes([0x19, 0xF0 | kind, *many, *many]) + bytes(200), 0)
