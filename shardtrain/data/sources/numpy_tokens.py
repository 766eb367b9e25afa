"""Read tokens from .npy files, which `write_tokens` and `shardtrain data tokenize` write."""

from functools import partial
from pathlib import Path

import numpy as np

from shardtrain.data.sources.format import BadData, Format
from shardtrain.data.tokens import TokenArray, open_tokens
from shardtrain.system.untrusted_files import open_regular

ENDS = ".ends"
"""Suffix of the file with the ends of documents next to a token file, unsigned integers of 8 bytes."""


def find_tokens(path: Path) -> TokenArray:
    """Find the tokens of a .npy file, and the ends of its documents if there is a file with them."""
    try:
        tokens = open_tokens(path)
    except FileNotFoundError:
        raise
    except ValueError as error:
        raise BadData(path, str(error).removeprefix(f"{path} ")) from None
    beside = path.with_suffix(ENDS)
    ends = partial(read_ends, beside, len(tokens)) if beside.is_file() else None
    return TokenArray(path, tokens.dtype, tokens.offset, len(tokens), ends)


def read_ends(path: Path, num_tokens: int) -> np.ndarray:
    """Read the ends of documents, uint64 (num_documents,).

    Raises:
      BadData: the ends do not rise, or the last document does not end with the tokens.
    """
    with open_regular(path) as file:
        ends = np.fromfile(file, "<u8")
    last = int(ends[-1]) if len(ends) else 0
    if (ends[1:] < ends[:-1]).any():
        raise BadData(path, "the ends of its documents do not rise")
    if last != num_tokens:
        raise BadData(path, f"its documents end at token {last:,} of {num_tokens:,}")
    return ends


FORMAT = Format(summary="tokens in .npy files", suffixes=(".npy",), magic=b"\x93NUMPY", tokens=find_tokens)
