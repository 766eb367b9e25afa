"""What the batches of an Arrow file decode to, from the sizes before their compressed buffers."""

import struct
from collections.abc import Iterator

RECORD_BATCH, DICTIONARY_BATCH = 3, 2
LEGACY_COMPRESSION = b"ARROW:experimental_compression"


def decoded_message(metadata: memoryview, body: memoryview) -> tuple[int, int]:
    """Return (bytes of the buffers of an Arrow message once they are decompressed, most values of an array).

    Args:
      metadata: of a message, which pyarrow has verified.
      body: its buffers; a compressed one begins with its size.

    Raises:
      ValueError: it is damaged.
    """
    try:
        message = _reference(metadata, 0)
        kind, header = _field(metadata, message, 1), _field(metadata, message, 2)
        if not kind or not header or metadata[kind] not in (RECORD_BATCH, DICTIONARY_BATCH):
            return 0, 0
        batch = _reference(metadata, header)
        if metadata[kind] == DICTIONARY_BATCH:
            batch = _reference(metadata, _field(metadata, batch, 1))
        is_compressed = _field(metadata, batch, 3) or LEGACY_COMPRESSION in bytes(metadata)
        num_values = max((count for count, _ in _pairs(metadata, _field(metadata, batch, 1))), default=0)
        num_bytes = 0
        for offset, size in _pairs(metadata, _field(metadata, batch, 2)):
            (declared,) = struct.unpack_from("<q", body, offset) if is_compressed and size else (-1,)
            num_bytes += size if declared == -1 else declared
            if size < 0 or offset < 0 or declared < -1:
                raise ValueError("a buffer has a negative size")
    except (IndexError, struct.error):
        raise ValueError("the header of a batch is damaged") from None
    return num_bytes, num_values


def arrow_blocks(footer: memoryview) -> list[int]:
    """Return where the messages of an Arrow file begin, by its footer.

    Raises:
      ValueError: it is damaged.
    """
    try:
        root = _reference(footer, 0)
        return [
            struct.unpack_from("<q", footer, place)[0]
            for number in (2, 3)
            for place in _items(footer, _field(footer, root, number), 24)
        ]
    except (IndexError, struct.error):
        raise ValueError("the footer is damaged") from None


def _reference(data: memoryview, place: int) -> int:
    """Follow an offset of a FlatBuffer."""
    return place + struct.unpack_from("<I", data, place)[0]


def _field(data: memoryview, table: int, number: int) -> int:
    """Return where a field of a table is; 0 for none."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", data, fields)[0]:
        return 0
    offset = struct.unpack_from("<H", data, fields + 4 + 2 * number)[0]
    return table + offset if offset else 0


def _items(data: memoryview, place: int, num_bytes: int) -> range:
    """Return where the items of a vector begin; none where there is no vector."""
    if not place:
        return range(0)
    vector = _reference(data, place)
    count = struct.unpack_from("<I", data, vector)[0]
    return range(vector + 4, vector + 4 + count * num_bytes, num_bytes)


def _pairs(data: memoryview, place: int) -> Iterator[tuple[int, int]]:
    return (struct.unpack_from("<qq", data, item) for item in _items(data, place, 16))
