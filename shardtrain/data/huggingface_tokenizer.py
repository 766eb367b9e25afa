"""Read or train a Hugging Face `tokenizer.json`; only this module imports tokenizers."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.errors.messages import needs_library
from shardtrain.imported import EOS, TOKEN_FILES, read_token_ids, token_numbers
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.json_size import check_values
from shardtrain.system.untrusted_files import read_json, read_text

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""Usual tokens that end a document; the first one that a vocabulary has is used."""

INSTALL = needs_library("tokenizers are", "tokenizers", "hf")


def library() -> Any:
    """Return the module tokenizers.

    Raises:
      ValueError: it is not installed.
    """
    if find_spec("tokenizers") is None:
        raise ValueError(INSTALL)
    return import_module("tokenizers")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, without the special tokens that it would add around each text.

    Args:
      path: the file.
      separator: the token after each document, as text or by its number. None means `eos_token` of a
        `tokenizer_config.json` or `special_tokens_map.json` in the same folder, or else the first of
        `SEPARATORS` in the vocabulary.

    Attributes:
      ends: the tokens that end a generated text, from `TOKEN_FILES` in the same folder; if these name none,
        or a separator was given, the separator.

    Raises:
      ValueError: it is no tokenizer, has no such token, or another file of the folder cannot be read.
    """

    def __init__(self, path: Path, separator: str | int | None = None) -> None:
        try:
            text = read_text(path)
            check_values(text)
            self._tokenizer = library().Tokenizer.from_str(text)
        except Exception as error:
            if isinstance(error, ValueError) and str(error) == INSTALL:
                raise
            raise ValueError(f"{path} is no tokenizer of Hugging Face: {error}") from None
        # a file may ask for truncation or padding, which is for models and not for documents
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        tokens = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab = max(tokens.values(), default=-1) + 1
        if isinstance(separator, int):
            self.separator, self.ends = separator, (separator,)
            return
        names = [separator] if separator is not None else [*_read_configured(path), *SEPARATORS]
        found = next((name for name in names if name in tokens), None)
        if found is None:
            asked = f"no token {separator!r}" if separator is not None else f"none of {', '.join(SEPARATORS)}"
            raise ValueError(
                f"{path} has {asked}; name the token that ends a document, such as --data.separator '</s>'"
            )
        self.separator = tokens[found]
        beside = read_token_ids(map(path.with_name, TOKEN_FILES)) if separator is None else {}
        self.ends = token_numbers(beside, EOS, str(path)) or (self.separator,)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(each.ids, np.uint32) for each in self._encode("encode_batch_fast", texts)]

    def encode_with_ends(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (np.array(each.ids, np.uint32), np.array([end for _, end in each.offsets], np.int64))
            for each in self._encode("encode_batch", texts)
        ]

    def _encode(self, method: str, texts: Sequence[str]) -> Any:
        try:
            return getattr(self._tokenizer, method)(list(texts), add_special_tokens=False)
        except Exception as error:  # the library has no kind of its own
            raise ValueError(f"the tokenizer cannot encode the text ({error})") from None

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(map(int, tokens)), skip_special_tokens=False)


def _read_configured(path: Path) -> list[str]:
    """Return the text of the token that ends a text, from files next to a tokenizer."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            content = read_json(path.with_name(name))
        except FileNotFoundError:
            continue
        token = content.get("eos_token") if isinstance(content, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return [token]
    return []


def train_tokenizer(texts: Iterable[str], vocab: int, path: Path) -> None:
    """Train byte-level BPE, as GPT-2 has, and write it as a `tokenizer.json`.

    Args:
      texts: a sample of the documents, read once.
      vocab: largest number of tokens, 257 or more: the 256 bytes and the token after documents.
      path: the file to write.

    Raises:
      ValueError: the vocabulary is too small.

    References:
      Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; Radford et al. 2019 (GPT-2), section 2.2.
    """
    if vocab < 257:
        raise ValueError(f"vocab is {vocab}; use 257 or more: the 256 bytes and the token after documents")
    module = library()
    tokenizer = module.Tokenizer(module.models.BPE())
    tokenizer.pre_tokenizer = module.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = module.decoders.ByteLevel()
    trainer = module.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=module.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, tokenizer.to_str(pretty=True).encode())
