"""Read and write Hugging Face model folders: config.json, safetensors files, tokenizer files.

`shardtrain checkpoint export` and `import` load this module by its name; a module of your own with
`export_model` and `import_model` can replace it (`--using`). `folder.py` reads single files.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shardtrain.imported import TOKEN_FILES, TOKEN_IDS, read_token_ids, token_numbers
from shardtrain.models import checks
from shardtrain.models.huggingface.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_config,
    adapter_tensors,
    merge_adapters,
    open_adapters,
)
from shardtrain.models.huggingface.families import (
    FAMILIES,
    ParameterReader,
    drop_unwritten_state,
    left_out,
    parameter_readers,
    read_config,
    tensor_shapes,
    tensors,
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
from shardtrain.models.lora import read_lora
from shardtrain.system.atomic_write import new_folder, refuse_filled
from shardtrain.system.untrusted_files import read_bytes

__all__ = (
    "Imported",
    "export_model",
    "import_model",
    "make_config",
    "open_adapters",
    "open_parameters",
    "own_file",
    "read_lora",
    "read_model_config",
    "shard",
    "token_ids",
    "tokenizer_files",
)

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A model read from a folder.

    Args:
      family: the `model_type` in its config.json.
      config: its configuration, a dataclass of `shardtrain.models`.
      arrays: pairs of path ("blocks/mlp/up/kernel") and float32 array, each read when its turn comes.
      left_out: names of arrays in the folder that have no place in our model.
      tokenizer: files that belong to its tokenizer.
      tokens: the numbers of its special tokens, see `token_ids`.
    """

    family: str
    config: Any
    arrays: Iterator[tuple[str, np.ndarray]]
    left_out: list[str]
    tokenizer: list[Path]
    tokens: dict[str, Any]


def import_model(folder: Path, adapter: Path | None = None) -> Imported:
    """Read a folder written by `save_pretrained` or downloaded.

    Args:
      folder: it has config.json and safetensors.
      adapter: a folder of low-rank adapters of the PEFT library for this model, which are put beside its
        parameters; None: none.

    Raises:
      FileNotFoundError: there is no config.json, or no safetensors.
      ValueError: safetensors is not installed; or listing what in the folder cannot be read as one of the
        families.
    """
    config = read_object(own_file(folder, CONFIG), "a folder with config.json and model.safetensors")
    state = open_weights(folder)
    family, _ = read_config(config)
    ours, readers = parameter_readers(config, state, dtype=np.float32)
    if adapter is not None:
        lora, found = open_adapters(adapter, ours)
        ours, readers = replace(ours, lora=lora), {**readers, **found}
    return Imported(
        family=family.model_type,
        config=ours,
        arrays=((path, each.read()) for path, each in readers.items()),
        left_out=left_out(config, state),
        tokenizer=tokenizer_files(folder),
        tokens=token_ids(folder),
    )


def read_model_config(folder: Path) -> Any:
    """Return the configuration of the model in a folder; its weights are not looked at.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: it is of no family that can be read.
    """
    return read_config(read_object(own_file(folder, CONFIG), "a folder with config.json"))[1]


def open_parameters(folder: Path) -> dict[str, ParameterReader]:
    """Return path -> float32 parameter of the model in a folder, each read when it is asked for.

    Raises:
      FileNotFoundError, ValueError: see `import_model`.
    """
    config = read_object(own_file(folder, CONFIG), "a folder with config.json and model.safetensors")
    return parameter_readers(config, open_weights(folder), dtype=np.float32)[1]


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
    """Write a folder that `transformers` loads unchanged; low-rank adapters are merged into their kernels.

    No more is in memory than one file's arrays, and one parameter with all its layers.

    Args:
      folder: where to; it must not hold anything. It gets its name when all is written.
      options: of the model's configuration, name -> value.
      shapes: path -> shape of every parameter, blocks stacked, and, below "model_state/", of what changes
        without being trained, which is left out where files of the family do not have it.
      read: path -> array, or what `families.tensors` takes in its place, of which one layer, or one expert of
        a layer, is in memory.
      dtype: of what is written: float32, float16 or bfloat16.
      max_shard_bytes: a new file begins above that.
      tokenizer: a folder whose tokenizer files are copied, and whose `TOKEN_FILES`, if it has them, tell
        which tokens begin, end and fill up a text.
      adapters: write the low-rank adapters alone, as the PEFT library loads them.
      family: the `model_type` to write it as; None: the first family that has all its options.
      tokens: the special tokens of the model that was imported, see `token_ids`, which hold where the folder
        of the tokenizer has no others.

    Returns:
      The names of the files.

    Raises:
      FileExistsError: the folder holds something.
      ValueError: safetensors is not installed; or listing everything in which the model is none of the
        families.
    """
    checks.refuse("export", checks.choice("dtype", dtype, tuple(DTYPES)))
    checks.refuse("export", checks.positive({"max_shard_bytes": max_shard_bytes}))
    refuse_filled(folder)
    # everything that can be refused is, before the folder is made
    config = make_config(options)
    shapes = drop_unwritten_state(config, shapes, family)
    if adapters:
        return _write_adapters(folder, config, read, dtype)
    config, shapes, read = merge_adapters(config, shapes, read)
    arrays = tensors(config, shapes, read, family)
    safetensors = import_safetensors()
    about = {**write_config(config, family), **_list_written_tokens(tokenizer, tokens or {}), "dtype": dtype}
    sizes = tensor_shapes(config, family)
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
    about, safetensors = adapter_config(config), import_safetensors()
    with new_folder(folder) as filled:
        _write_json(filled / ADAPTER_CONFIG, about)
        found = {name: _cast(array, dtype) for name, array in adapter_tensors(config, read)}
        safetensors.numpy.save_file(found, filled / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    return [ADAPTER_CONFIG, ADAPTER_WEIGHTS]


def make_config(options: Mapping[str, Any]) -> Any:
    """Return the configuration with these options, of the class that has them.

    Args:
      options: name -> value, such as a run's description has them as model.NAME.

    Raises:
      ValueError: they are those of no class that a family has, or of several.

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
    """Return the numbers of the tokens that begin, end and fill up a text, of both configuration files.

    Raises:
      ValueError: a file leads out of the folder, or an entry is no number of a token.
    """
    return read_token_ids([own_file(folder, name) for name in TOKEN_FILES])


def _list_written_tokens(tokenizer: Path | None, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries for special tokens: null where none is known, unlike the defaults of `transformers`."""
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
