"""Read and write Hugging Face model folders: config.json, safetensors files, tokenizer files.

`shardtrain checkpoint export` and `import` load this module by its name; your own module with `export_model`
and `import_model` can replace it (`--using`). `folder.py` reads single files.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shardtrain.errors.messages import refuse
from shardtrain.imported import TOKEN_FILES, TOKEN_IDS, read_token_ids, token_numbers
from shardtrain.models import checks
from shardtrain.models.huggingface.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    iterate_adapters,
    merge_adapters,
    open_adapters,
    write_adapter_config,
)
from shardtrain.models.huggingface.families import (
    FAMILIES,
    ParameterReader,
    drop_unwritten_state,
    iterate_tensors,
    list_left_out,
    list_tensor_shapes,
    open_readers,
    read_config,
    write_config,
)
from shardtrain.models.huggingface.folder import (
    CONFIG,
    INDEX,
    import_safetensors,
    open_weights,
    own_file,
    read_object,
    shard,
    tokenizer_files,
)
from shardtrain.system.atomic_write import new_folder, refuse_filled
from shardtrain.system.untrusted_files import read_bytes

__all__ = (
    "ImportedModel",
    "export_model",
    "import_model",
    "make_config",
    "open_adapters",
    "open_parameters",
    "own_file",
    "read_model_config",
    "shard",
    "token_ids",
    "tokenizer_files",
)

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """A model that is read from a folder.

    Args:
      family: the `model_type` in its config.json.
      config: its configuration, a dataclass of `shardtrain.models`.
      arrays: pairs of path ("blocks/mlp/up/kernel") and float32 array, read one after the other.
      left_out: names of arrays in the folder that our model does not have.
      tokenizer: files of its tokenizer.
      tokens: the numbers of its special tokens, see `token_ids`.
    """

    family: str
    config: Any
    arrays: Iterator[tuple[str, np.ndarray]]
    left_out: list[str]
    tokenizer: list[Path]
    tokens: dict[str, Any]


def import_model(folder: Path, adapter: Path | None = None) -> ImportedModel:
    """Read a folder written by `save_pretrained` or downloaded.

    Args:
      folder: a folder with config.json and safetensors.
      adapter: a folder of low-rank adapters of the PEFT library for this model, which are added to its
        parameters; None adds none.

    Raises:
      FileNotFoundError: there is no config.json, or no safetensors.
      ValueError: safetensors is not installed; or lists why the folder cannot be read as one of the families.
    """
    config = read_object(own_file(folder, CONFIG), "a folder with config.json and model.safetensors")
    state = open_weights(folder)
    family, _ = read_config(config)
    ours, readers = open_readers(config, state, dtype=np.float32)
    if adapter is not None:
        lora, found = open_adapters(adapter, ours)
        ours, readers = replace(ours, lora=lora), {**readers, **found}
    return ImportedModel(
        family=family.model_type,
        config=ours,
        arrays=((path, each.read()) for path, each in readers.items()),
        left_out=list_left_out(config, state),
        tokenizer=tokenizer_files(folder),
        tokens=token_ids(folder),
    )


def read_model_config(folder: Path) -> Any:
    """Return the configuration of the model in a folder, without reading its weights.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: it is of no family that can be read.
    """
    return read_config(read_object(own_file(folder, CONFIG), "a folder with config.json"))[1]


def open_parameters(folder: Path) -> dict[str, ParameterReader]:
    """Return path -> float32 parameter of the model in a folder, each read when it is needed.

    Raises:
      FileNotFoundError, ValueError: see `import_model`.
    """
    config = read_object(own_file(folder, CONFIG), "a folder with config.json and model.safetensors")
    return open_readers(config, open_weights(folder), dtype=np.float32)[1]


def export_model(
    folder: Path,
    options: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Any],
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
    tokenizer: Path | None = None,
    adapters: bool = False,
    family: str | None = None,
    tokens: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write a folder that `transformers` loads; low-rank adapters are merged into their kernels.

    At most the arrays of one file, and one parameter with all its layers, are in memory.

    Args:
      folder: the folder to write, which must be empty or missing. It gets its name when everything is
        written.
      options: options of the model's configuration, name -> value.
      shapes: path -> shape of every parameter, blocks stacked, and, below "model_state/", of running
        statistics, which are left out if files of the family do not have them.
      read: path -> array, or an object as for `families.iterate_tensors`, of which one layer, or one expert
        of a layer, is in memory.
      dtype: the dtype of the files: float32, float16 or bfloat16.
      max_shard_bytes: largest number of bytes of a file.
      tokenizer: a folder whose tokenizer files are copied; its `TOKEN_FILES` name the tokens that begin, end
        and pad a text.
      adapters: whether to write only the low-rank adapters, as the PEFT library loads them.
      family: the `model_type` to write. None means the first family that has all options of the model.
      tokens: the special tokens of the imported model, see `token_ids`, for those that the tokenizer's folder
        does not name.

    Returns:
      The names of the files.

    Raises:
      FileExistsError: the folder is not empty.
      ValueError: safetensors is not installed; or lists why the model is of none of the families.
    """
    refuse("export", checks.choice("dtype", dtype, tuple(DTYPES)))
    refuse("export", checks.positive({"max_shard_bytes": max_shard_bytes}))
    refuse_filled(folder)
    # all checks come before the folder is made
    config = make_config(options)
    shapes = drop_unwritten_state(config, shapes, family)
    if adapters:
        return _write_adapters(folder, config, read, dtype)
    config, shapes, read = merge_adapters(config, shapes, read)
    arrays = iterate_tensors(config, shapes, read, family)
    safetensors = import_safetensors()
    about = {**write_config(config, family), **_list_written_tokens(tokenizer, tokens or {}), "dtype": dtype}
    sizes = list_tensor_shapes(config, family)
    files = shard(sizes, np.dtype(DTYPES[dtype]).itemsize, max_shard_bytes)
    with new_folder(folder) as filled:
        _write_json(filled / CONFIG, about)
        # one file after the other, so that no more than its arrays are in memory
        for name, inside in files.items():
            found = {each: _cast(array, dtype) for each, array in islice(arrays, len(inside))}
            assert list(found) == inside
            safetensors.numpy.save_file(found, filled / name, metadata={"format": "pt"})
        if len(files) > 1:
            _write_index(filled / INDEX, files, sizes, np.dtype(DTYPES[dtype]).itemsize)
        for path in tokenizer_files(tokenizer) if tokenizer else []:
            (filled / path.name).write_bytes(read_bytes(path))
    return sorted(path.name for path in folder.iterdir())


def _write_adapters(folder: Path, config: Any, read: Callable[[str], np.ndarray], dtype: str) -> list[str]:
    about, safetensors = write_adapter_config(config), import_safetensors()
    with new_folder(folder) as filled:
        _write_json(filled / ADAPTER_CONFIG, about)
        found = {name: _cast(array, dtype) for name, array in iterate_adapters(config, read)}
        safetensors.numpy.save_file(found, filled / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    return [ADAPTER_CONFIG, ADAPTER_WEIGHTS]


def make_config(options: Mapping[str, Any]) -> Any:
    """Return the configuration with these options, of the only class that has them.

    Args:
      options: name -> value, such as model.NAME in the description of a run.

    Raises:
      ValueError: no class of a family has these options, or several have.

    >>> options = {"vocab": 32, "seq": 8, "embed": 16, "num_layers": 1, "num_heads": 4, "segments": 2}
    >>> type(make_config(options)).__name__
    'EncoderConfig'
    """
    kinds = {family.kind for family in FAMILIES.values()}
    wrong = {kind: _misfit(kind, options) for kind in kinds}
    fitting = [kind for kind, names in wrong.items() if not names]
    if len(fitting) == 1:
        return fitting[0](**options)
    lines = [f"{kind.__name__}: {', '.join(names) or 'they fit this too'}" for kind, names in wrong.items()]
    raise ValueError(
        "these options are of no one model that a Hugging Face family has"
        f" ({', '.join(sorted(FAMILIES))}):\n  " + "\n  ".join(sorted(lines))
    )


def _misfit(kind: type, options: Mapping[str, Any]) -> list[str]:
    known = {f.name: f for f in fields(kind)}
    needed = [name for name, f in known.items() if f.default is MISSING and name not in options]
    return [f"{name} is missing" for name in needed] + [
        f"{name} is no option" for name in options if name not in known
    ]


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(array.astype(DTYPES[dtype], copy=False))


def token_ids(folder: Path) -> dict[str, Any]:
    """Return the numbers of the tokens that begin, end and pad a text, from both configuration files.

    Raises:
      ValueError: a file leads out of the folder, or an entry is no number of a token.
    """
    return read_token_ids([own_file(folder, name) for name in TOKEN_FILES])


def _list_written_tokens(tokenizer: Path | None, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries for special tokens, null for unknown ones, unlike the defaults of `transformers`."""
    found: dict[str, Any] = dict.fromkeys(TOKEN_IDS) if tokenizer is None else token_ids(tokenizer)
    for name in TOKEN_IDS:
        # several that end a text may be in a file that the folder of the tokenizer does not have
        if set(token_numbers(found, name, str(tokenizer))) <= set(
            token_numbers(kept, name, "the checkpoint")
        ):
            found[name] = kept.get(name)
    return found


def _write_index(
    path: Path, files: Mapping[str, list[str]], shapes: Mapping[str, tuple[int, ...]], item_bytes: int
) -> None:
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    where = {name: file for file, names in files.items() for name in names}
    metadata = {"total_parameters": total, "total_size": total * item_bytes}
    _write_json(path, {"metadata": metadata, "weight_map": where})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
