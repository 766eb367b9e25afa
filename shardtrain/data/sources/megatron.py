"""Read tokens of Megatron-LM: a .bin file of tokens, and a .idx file with the lengths of its sequences.

The layout: https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
"""

import struct
from functools import partial
from pathlib import Path

import numpy as np

from shardtrain.data.sources.format import BadData, Format
from shardtrain.data.tokens import TokenArray
from shardtrain.system.untrusted_files import open_regular

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Code in the file -> dtype; the codes 6 and 7 are floats."""

HEAD = struct.Struct("<QBQQ")
"""Version, code of the dtype, number of sequences, number of documents + 1."""


def find_tokens(path: Path) -> TokenArray:
    """Find the tokens of a .bin file; each sequence counts as a document, in the order of the file."""
    index, tokens = path.with_suffix(".idx"), path.with_suffix(".bin")
    for file in (index, tokens):
        if not file.is_file():
            raise BadData(file, f"it is missing beside {path.name}")
    with open_regular(index) as file:
        content = file.read(len(MAGIC) + HEAD.size)
    if not content.startswith(MAGIC) or len(content) < len(MAGIC) + HEAD.size:
        raise BadData(index, "it is no index of Megatron-LM")
    version, code, num_sequences, _ = HEAD.unpack(content[len(MAGIC) :])
    if version != 1 or code not in DTYPES:
        raise BadData(index, f"it has version {version} and dtype {code}; version 1 and integers are read")
    start = len(MAGIC) + HEAD.size
    # lengths (int32), then the byte offsets of the sequences (int64)
    if index.stat().st_size < start + 12 * num_sequences:
        raise BadData(index, f"it is cut off: {num_sequences:,} sequences need more bytes")
    dtype, ends = np.dtype(DTYPES[code]), partial(read_ends, index, num_sequences)
    num_tokens = int(ends()[-1]) if num_sequences else 0
    if tokens.stat().st_size != num_tokens * dtype.itemsize:
        raise BadData(
            tokens, f"it has {tokens.stat().st_size:,} bytes; its index says {num_tokens:,} tokens of {dtype}"
        )
    return TokenArray(tokens, dtype, 0, num_tokens, ends)


def read_ends(index: Path, num_sequences: int) -> np.ndarray:
    """Return the number of tokens up to the end of each sequence, int64 (num_sequences,)."""
    with open_regular(index) as file:
        file.seek(len(MAGIC) + HEAD.size)
        lengths = np.fromfile(file, "<i4", num_sequences)
    if len(lengths) < num_sequences or (lengths < 0).any():
        raise BadData(index, "it is cut off, or has a sequence of a negative length")
    return np.cumsum(lengths, dtype=np.int64)


FORMAT = Format(
    summary="tokens of Megatron-LM (.bin and .idx)",
    suffixes=(".bin", ".idx"),
    magic=MAGIC,
    tokens=find_tokens,
)
