"""Read TFRecord files that are not compressed: length, checksum, record and checksum, repeated.

Checksums of lengths are checked. Checksums of records are not, as in Python that takes longer than reading.
The format: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from functools import cache
from pathlib import Path

import numpy as np

from shardtrain.data.sources.format import BadData, Format
from shardtrain.data.sources.payload import PayloadRows
from shardtrain.data.sources.row_offsets import CUT_OFF, IndexedRows, read_part, row_extent
from shardtrain.data.sources.unread_files import explain_content
from shardtrain.system.untrusted_files import open_regular

HEAD_BYTES, TAIL_BYTES = 12, 4


def find_record_offsets(path: Path) -> np.ndarray:
    """Return the (start, size) of each record, int (n, 2); for a cut-off record `CUT_OFF` and its position.

    Raises:
      BadData: the first record is not complete.
    """
    found: list[tuple[int, int]] = []
    end = path.stat().st_size
    position = 0
    with open_regular(path) as file:
        while position < end:
            file.seek(position)
            head = file.read(HEAD_BYTES)
            size = int.from_bytes(head[:8], "little")
            next_position = position + HEAD_BYTES + size + TAIL_BYTES
            damaged = compute_masked_crc32c(head[:8]) != int.from_bytes(head[8:], "little")
            if next_position > end or damaged:
                if not found:
                    why = explain_content(head) or "it is no TFRecord file, or damaged"
                    raise BadData(path, why)
                found.append((CUT_OFF, position))
                break
            found.append((position + HEAD_BYTES, size))
            position = next_position
    return np.array(found, np.int64).reshape(-1, 2)


def compute_masked_crc32c(data: bytes) -> int:
    """Return the masked CRC-32C (polynomial 0x1EDC6F41, RFC 3720, section 12.1) of a few bytes.

    >>> hex(compute_masked_crc32c(b"123456789"))  # of 0xe3069283
    '0xc78ab0e5'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc_table()[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def crc_table() -> list[int]:
    """Return the table of CRC-32C for a byte at a time."""
    table = list(range(256))
    for _ in range(8):
        table = [(value >> 1) ^ (0x82F63B78 if value & 1 else 0) for value in table]
    return table


class TfRecords(IndexedRows, PayloadRows):
    """The records of a file, located by an index of their offsets."""

    find = staticmethod(find_record_offsets)

    def payload(self, row: int) -> bytes:
        start, size = row_extent(self._offsets, row, self.path)
        return read_part(self.path, start, size, row)


FORMAT = Format(
    summary="TFRecord, not compressed", suffixes=(".tfrecord", ".tfrecords", ".tfrec"), rows=TfRecords
)
