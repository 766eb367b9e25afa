"""Write and read the options of an imported model as JSON, never as code; read its special tokens.

Options are checked when they are written, and again when they are read. No jax.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from shardtrain.errors.field_types import convert_kind, fits
from shardtrain.errors.options import list_plain_options
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import check_whole_number, read_json

MODEL_FILE = "model.json"

EOS = "eos_token_id"
TOKEN_IDS = ("bos_token_id", EOS, "pad_token_id")
"""Entries of Hugging Face's files with the tokens that start, end and pad a text."""

TOKEN_FILES = ("generation_config.json", "config.json")
"""Files with these entries; as in `transformers`, the first file with an entry counts."""

TOKENS = "tokens"
"""Entry of a checkpoint's extra data with the special tokens of the imported model."""

MOST_TOKEN = 2**31 - 1

Config = TypeVar("Config")

MOST_INT = 1 << 53
MOST_TEXT = 10_000
"""Largest number of characters of an option; a Phi-3 with 128k positions has one of 2,000."""
MOST_BYTES = 1 << 20


def write_about(path: Path, config: Any, mask_token: int | None = None) -> None:
    """Write a model's options.

    Args:
      path: the file.
      config: a dataclass.
      mask_token: the mask token of its tokenizer; None if the model has none or it is unknown.

    Raises:
      ValueError: lists options that JSON cannot represent.
    """
    kind, options = type(config), list_plain_options(config)
    if problems := option_problems(kind, options):
        raise ValueError("\n  - ".join(["these options of a model cannot be written:", *problems]))
    about = {"model": f"{kind.__module__}:{kind.__qualname__}", "options": options, "mask_token": mask_token}
    replace_file(path, (json.dumps(about, indent=2, allow_nan=False) + "\n").encode())


def read_model(path: Path, kind: type[Config]) -> Config:
    """Read the model's configuration.

    Args:
      path: the file that `write_about` wrote.
      kind: its class.

    Raises:
      FileNotFoundError: the file is not there.
      ValueError: it has another form; lists all wrong options.
    """
    options = _about(path).get("options")
    if type(options) is not dict:
        raise ValueError(f"{path}: options is {short(options)}; it is an object of names and values")
    if problems := option_problems(kind, options):
        raise ValueError("\n  - ".join([f"{path} does not describe a {kind.__name__}:", *problems]))
    hints = get_type_hints(kind)
    return kind(**{name: convert_kind(value, hints[name], name) for name, value in options.items()})


def read_mask_token(path: Path, vocab: int) -> int:
    """Read the number of the mask token.

    Args:
      path: the file that `write_about` wrote.
      vocab: the size of the vocabulary; the token must be below it.

    Raises:
      FileNotFoundError: the file is not there.
      ValueError: it is unknown, or out of range.
    """
    token = _about(path).get("mask_token")
    if token is None:
        raise ValueError(
            f"{path}: the number of [MASK] was not found in the tokenizer; look it up, and write"
            ' "mask_token": NUMBER there'
        )
    return check_whole_number(token, f"{path}: mask_token", vocab - 1)


def option_problems(kind: type, options: dict[str, Any]) -> list[str]:
    """List the problems of options for a dataclass: unknown or missing names, values of another type.

    >>> from shardtrain.models.mlp import MlpConfig
    >>> option_problems(MlpConfig, {"features": True, "mlp": 8, "num_layers": float("inf"), "eps": 1})
    ["'eps' is no option of MlpConfig", 'features is True, and not of kind int', \
'num_layers is inf, and not of kind int', 'classes is missing']
    """
    hints, known = get_type_hints(kind), {f.name for f in fields(kind)}  # type: ignore[arg-type]
    problems = [f"{short(name)} is no option of {kind.__name__}" for name in options if name not in known]
    problems += [
        f"{name} is {short(value)}, and not of kind {_text(hints[name])}"
        for name, value in options.items()
        if name in known and not (_is_bounded(value) and fits(value, hints[name]))
    ]
    needed = [f.name for f in fields(kind) if f.name not in options]  # type: ignore[arg-type]
    return problems + [f"{name} is missing" for name in needed if not hasattr(kind, name)]


def _is_bounded(value: Any) -> bool:
    """Return whether a value is a number or text of bounded size, None, or a list of such values."""
    if type(value) in (list, tuple):
        return all(map(_is_bounded, value))
    if type(value) is int:
        return abs(value) <= MOST_INT
    if type(value) is str:
        return len(value) <= MOST_TEXT and value.isprintable()
    return type(value) in (float, bool, type(None))


def _text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _about(path: Path) -> dict[str, Any]:
    about = read_json(path, MOST_BYTES)
    if type(about) is not dict:
        raise ValueError(f"{path} is {short(about)}; it is an object with model and options")
    return about


def read_token_ids(paths: Iterable[Path]) -> dict[str, Any]:
    """Read the numbers of special tokens from configuration files of Hugging Face.

    Args:
      paths: files such as `TOKEN_FILES`, in this order; those that do not exist are skipped.

    Returns:
      Each of `TOKEN_IDS` with its number or None, of the first file that has it; of tokens that end a text
      all of this file, in a list if they are several.

    Raises:
      ValueError: a file is not JSON, or an entry is not a token's number or a list of such numbers.

    >>> read_token_ids([])
    {'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None}
    """
    found: dict[str, tuple[int, ...]] = dict.fromkeys(TOKEN_IDS, ())
    for path in paths:
        try:
            content = read_json(path)
        except FileNotFoundError:
            continue
        if type(content) is not dict:
            raise ValueError(f"{path} is {short(content)}; it is an object of names and values")
        for name in TOKEN_IDS:
            numbers = token_numbers(content, name, str(path))
            found[name] = found[name] or numbers
    return {
        name: list(numbers) if name == EOS and len(numbers) > 1 else next(iter(numbers), None)
        for name, numbers in found.items()
    }


def select_kept_tokens(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint's extra data that a run started from it keeps: its special tokens."""
    return {TOKENS: extra[TOKENS]} if extra.get(TOKENS) is not None else {}


def token_numbers(content: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    """Return the numbers of an entry that holds a token's number, a list of them, or null.

    Raises:
      ValueError: it holds something else.

    >>> token_numbers({"eos_token_id": [2, 7]}, "eos_token_id", "config.json")
    (2, 7)
    """
    value = content.get(name)
    values = value if type(value) is list else [value]
    # files of the first Llama have -1 for a token that there is not
    numbers = [each for each in values if each is not None and not (type(each) is int and each == -1)]
    return tuple(check_whole_number(each, f"{where}: {name}", MOST_TOKEN) for each in numbers)
