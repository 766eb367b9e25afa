"""Open tokenizers: bytes, or a Hugging Face `tokenizer.json` (`huggingface_tokenizer.py`).

Next: `tokenize.py`, which converts files to shards of tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from shardtrain.errors.messages import near

BYTES = "bytes"
TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """Converts text to tokens and back.

    Attributes:
      vocab: number of tokens; every token is below it.
      separator: the token after each document.
      ends: the tokens that end a generated text.
    """

    vocab: int
    separator: int
    ends: tuple[int, ...]

    def encode(self, texts: Sequence[str], /) -> list[np.ndarray]:
        """Return the tokens of each text, without a separator, int (num_tokens,).

        Raises:
          ValueError: a text cannot be tokens.
        """
        ...

    def encode_with_ends(self, texts: Sequence[str], /) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the tokens of each text, and the end of each token in characters, int (num_tokens,).

        Raises:
          ValueError: as `encode`.
        """
        ...

    def decode(self, tokens: Sequence[int], /) -> str:
        """Return the text of tokens; invalid characters are replaced."""
        ...


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8; byte 0 separates documents.

    >>> [tokens.tolist() for tokens in Bytes().encode(["aß"])], Bytes().decode([97, 195, 159])
    ([[97, 195, 159]], 'aß')
    """

    vocab, separator, ends = 256, 0, (0,)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        if any(b"\0" in each for each in encoded):
            raise ValueError("the text has byte 0, which separates documents")
        return [np.frombuffer(each, np.uint8) for each in encoded]

    def encode_with_ends(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the bytes, which may include the separator, and the end of each byte's character."""
        found = []
        for text in texts:
            sizes = [len(character.encode("utf-8", "surrogatepass")) for character in text]
            ends = np.repeat(np.arange(1, len(text) + 1), sizes)
            found.append((np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8), ends))
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens).decode(errors="replace")


def tokenizer_file(name: Path | str) -> Path:
    """Return the path of a tokenizer's file, which may be given by its folder."""
    path = Path(name)
    return path / TOKENIZER_FILE if path.is_dir() else path


def open_tokenizer(name: Path | str, separator: str | int | None = None) -> Tokenizer:
    """Open a tokenizer.

    Args:
      name: `bytes`, a `tokenizer.json`, or a folder that has one.
      separator: the token after each document, as text or by its number. None means the usual end of a
        document or text.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no tokenizer, has no such token, or its library is missing.
    """
    if str(name) == BYTES:
        if separator not in (None, Bytes.separator):
            raise ValueError(f"separator is {separator!r}, and bytes are separated by byte 0; leave it out")
        return Bytes()
    path = tokenizer_file(name)
    if not path.is_file():
        hint = near(str(name), [BYTES]) if "/" not in str(name) else str(path.absolute())
        raise FileNotFoundError(
            f"there is no tokenizer {hint}; give bytes, or the path of a {TOKENIZER_FILE}"
        )
    from shardtrain.data.huggingface_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path, separator)
