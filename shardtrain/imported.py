"""Write and read the options of an imported model as JSON, never as code.

They are checked when they are written, and again when they are read. No jax.
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from shardtrain.errors.field_types import fits
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import read_json, whole_number

MODEL_FILE = "model.json"

Config = TypeVar("Config")

MOST_INT = 1 << 53
MOST_TEXT = 10_000
"""Characters of an option: the factors of wavelengths of a Phi-3 with 128k positions are 2,000."""
MOST_BYTES = 1 << 20


def write_about(path: Path, config: Any, mask_token: int | None = None) -> None:
    """Write a model's options.

    Args:
      path: the file.
      config: a dataclass.
      mask_token: the mask token of its tokenizer; None if the model has none or it is not known.

    Raises:
      ValueError: an option that JSON cannot hold, or a number that is none.
    """
    kind, options = type(config), asdict(config)
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
      ValueError: it is not of the form that was written; all options that are wrong are listed.
    """
    options = _about(path).get("options")
    if type(options) is not dict:
        raise ValueError(f"{path}: options is {short(options)}; it is an object of names and values")
    if problems := option_problems(kind, options):
        raise ValueError("\n  - ".join([f"{path} does not describe a {kind.__name__}:", *problems]))
    hints = get_type_hints(kind)
    return kind(**{name: _as_kind(value, hints[name]) for name, value in options.items()})


def read_mask_token(path: Path, vocab: int) -> int:
    """Read the number of the mask token.

    Args:
      path: the file that `write_about` wrote.
      vocab: the size of the vocabulary; the token must be below it.

    Raises:
      FileNotFoundError: the file is not there.
      ValueError: it is not known, or out of range.
    """
    token = _about(path).get("mask_token")
    if token is None:
        raise ValueError(
            f"{path}: the number of [MASK] was not found in the tokenizer; look it up, and write"
            ' "mask_token": NUMBER there'
        )
    return whole_number(token, f"{path}: mask_token", vocab - 1)


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


def _as_kind(value: Any, hint: Any) -> Any:
    return tuple(value) if get_origin(hint) is tuple else value


def _text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _about(path: Path) -> dict[str, Any]:
    about = read_json(path, MOST_BYTES)
    if type(about) is not dict:
        raise ValueError(f"{path} is {short(about)}; it is an object with model and options")
    return about
