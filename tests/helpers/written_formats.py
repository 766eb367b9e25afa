"""The same documents, or images, written in every format by the libraries that usually write them."""

import gzip
import io
import json
import struct
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from shardtrain.data import write_tokens
from shardtrain.data.sources.tf_record import compute_masked_crc32c

DOCUMENTS = [
    "one document",
    "another, größer 📄\nwith lines",
    "",
    "x" * 70,
    *(f"number {i}" for i in range(30)),
]
NUM_FILES = 3


def _lines(documents: list[str]) -> bytes:
    return b"".join(json.dumps({"id": i, "text": text}).encode() + b"\n" for i, text in enumerate(documents))


def text(folder: Path, documents: list[str]) -> None:
    for i, each in enumerate(documents):
        (folder / f"{i:03}.txt").write_text(each)


def jsonl(folder: Path, documents: list[str]) -> None:
    (folder / "a.jsonl").write_bytes(_lines(documents) + b"\n")


def jsonl_gz(folder: Path, documents: list[str]) -> None:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(_lines(documents)))


def jsonl_zst(folder: Path, documents: list[str]) -> None:
    with pyarrow.CompressedOutputStream(str(folder / "a.jsonl.zst"), "zstd") as file:
        file.write(_lines(documents))


def parquet(folder: Path, documents: list[str]) -> None:
    table = pyarrow.table({"text": documents, "id": list(range(len(documents)))})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=4)


def arrow(folder: Path, documents: list[str]) -> None:
    """A folder as `datasets.Dataset.save_to_disk` writes it: a stream, and files of facts beside it."""
    table = pyarrow.table({"text": documents})
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    (folder / "dataset_info.json").write_text("{}")


def example(**fields: list[bytes] | np.ndarray) -> bytes:
    """A `tf.train.Example`, encoded here as protobuf says."""

    def varint(value: int) -> bytes:
        found = b""
        while value > 127:
            found, value = found + bytes([value & 127 | 128]), value >> 7
        return found + bytes([value])

    def message(number: int, content: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(content)) + content

    entries = b""
    for name, values in fields.items():
        if isinstance(values, list):
            feature = message(1, b"".join(message(1, value) for value in values))
        elif values.dtype.kind == "f":
            feature = message(2, message(1, values.astype("<f4").tobytes()))
        else:
            feature = message(3, message(1, b"".join(varint(int(value) % 2**64) for value in values)))
        entries += message(1, message(1, name.encode()) + message(2, feature))
    return message(1, entries)


def tfrecord_bytes(records: list[bytes]) -> bytes:
    found = b""
    for record in records:
        size = struct.pack("<Q", len(record))
        found += (
            size
            + struct.pack("<I", compute_masked_crc32c(size))
            + record
            + struct.pack("<I", compute_masked_crc32c(record))
        )
    return found


def tfrecord(folder: Path, documents: list[str]) -> None:
    (folder / "a.tfrecord").write_bytes(tfrecord_bytes([example(text=[each.encode()]) for each in documents]))


def array_record(folder: Path, documents: list[str]) -> None:
    module = import_module("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for each in documents:
        writer.write(example(text=[each.encode()]))
    writer.close()


def tar(folder: Path, documents: list[str]) -> None:
    rows = [
        {"json": json.dumps({"id": i}).encode(), "txt": each.encode()} for i, each in enumerate(documents)
    ]
    write_tar(folder / "a.tar", rows)


def write_tar(path: Path, rows: list[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as file:
        for i, row in enumerate(rows):
            for ending, content in row.items():
                # a name that is long needs a header of its own
                member = tarfile.TarInfo(f"{'long/' * 30 * (i == 1)}{i:06}.{ending}")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))


def _tokens(documents: list[str]) -> list[np.ndarray]:
    return [np.frombuffer(each.encode() + b"\0", np.uint8) for each in documents if each]


def npy(folder: Path, documents: list[str]) -> None:
    write_tokens(folder / "a.npy", _tokens(documents), dtype="uint16")


def megatron(folder: Path, documents: list[str]) -> None:
    tokens = _tokens(documents)
    lengths = np.array([len(each) for each in tokens], "<i4")
    (folder / "a.bin").write_bytes(np.concatenate([*tokens, np.empty(0, np.uint8)]).astype("<u2").tobytes())
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(tokens), len(tokens) + 1)
    offsets = np.concatenate([[0], np.cumsum(2 * lengths)[:-1]]).astype("<i8")
    index = head + lengths.tobytes() + offsets.tobytes() + np.arange(len(tokens) + 1, dtype="<i8").tobytes()
    (folder / "a.idx").write_bytes(index)


WRITERS: dict[str, Any] = {
    "text": text,
    "jsonl": jsonl,
    "jsonl.gz": jsonl_gz,
    "jsonl.zst": jsonl_zst,
    "parquet": parquet,
    "arrow": arrow,
    "tfrecord": tfrecord,
    "array_record": array_record,
    "tar": tar,
    "npy": npy,
    "megatron": megatron,
}
"""Format -> function that writes documents into a folder. Every format but images is here."""


def write_files(name: str, folder: Path, documents: list[str]) -> Path:
    """Write documents in several folders of a folder, in order; return the folder."""
    size = -(-len(documents) // NUM_FILES)
    for i in range(NUM_FILES):
        (folder / f"part-{i}").mkdir(parents=True)
        WRITERS[name](folder / f"part-{i}", documents[i * size : (i + 1) * size])
    return folder


def picture(i: int, size: tuple[int, int] = (6, 4), kind: str = "PNG") -> bytes:
    """An image that is another for each number."""
    pixels = np.random.default_rng(i).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()
