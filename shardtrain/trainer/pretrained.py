"""Read the model and parameters of a Hugging Face folder, its adapters, and adapter-only checkpoints.

A module of `shardtrain.models` that is imported by its name reads the files. Next: `resume.py`, which starts
from these parameters.
"""

import hashlib
import importlib
import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.checkpoints.array_files import PendingRead, StoredArray
from shardtrain.checkpoints.differences import matches
from shardtrain.checkpoints.manifest_entries import Leaf, Manifest
from shardtrain.checkpoints.paths import CHECKPOINTS
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.checkpoints.slices import Index
from shardtrain.functional.frozen import ADAPTERS
from shardtrain.imported import TOKENS, select_kept_tokens
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import open_regular

CONVERTER = "shardtrain.models.huggingface.files"
UPCYCLING = "shardtrain.models.upcycling"
CONFIG = "config.json"
PARAMS, STATE = "params/", "model_state/"
DTYPE = "float32"
MOST_KEPT_BYTES = 1 << 30
"""Largest parameter that is read once for all slices of it."""

OF_TRAINING = ("dropout", "remat", "scan", "dtype", "attention", "products", "loss_chunk", "lora")
"""Options of a model about its training, which a run file keeps when a folder replaces its model."""


def is_pretrained(path: Path) -> bool:
    """Return whether a path is a folder of Hugging Face, and no checkpoint."""
    return (path / CONFIG).is_file() and not (path / CHECKPOINTS).is_dir()


def read_pretrained(folder: str | Path, adapter: str | Path | None = None, **options: Any) -> Any:
    """Return the configuration of the model in a folder of Hugging Face.

    A run with this model starts from the folder's parameters by `start_from=folder`.

    Args:
      folder: a folder with config.json and safetensors.
      adapter: a folder of low-rank adapters of the PEFT library, which set the option `lora`; such a run
        starts from them by `start_from=StartFrom(checkpoint=folder, adapter=adapter)`.
      options: options of the configuration to change, such as `lora=Lora(rank=16)` or `dtype="bfloat16"`.

    Returns:
      A config of `shardtrain.models`.

    Raises:
      FileNotFoundError: the folder has no config.json.
      ValueError: the family of the model is unknown, or an option is.
    """
    config = replace(_converter().read_model_config(Path(folder)), **options)
    return config if adapter is None else replace(config, lora=read_lora(adapter, config))


def read_lora(adapter: str | Path, config: Any) -> Any:
    """Return the option `lora` of a model with the adapters in a folder of PEFT.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the adapters do not fit this model.
    """
    return _converter().open_adapters(Path(adapter), config)[0]


def keep_training_options(config: Any, model: Any) -> Any:
    """Return a configuration with the training options of another one, see `OF_TRAINING`."""
    names = [name for name in OF_TRAINING if hasattr(config, name) and hasattr(model, name)]
    # remat is a flag in models of images, and a policy in others
    kept = {
        name: getattr(model, name)
        for name in names
        if isinstance(getattr(model, name), bool) == isinstance(getattr(config, name), bool)
    }
    return replace(config, **kept)


def array_path(path: str) -> str:
    """Return the path in a checkpoint of a folder's array.

    >>> array_path("head/bias"), array_path("model_state/norm/mean")
    ('params/head/bias', 'model_state/norm/mean')
    """
    return path if path.startswith(STATE) else PARAMS + path


@dataclass(frozen=True, kw_only=True, eq=False)
class PretrainedReader(CheckpointReader):
    """A reader of a folder of Hugging Face with the paths of a checkpoint.

    One parameter with all its layers is in memory at a time; for parameters above `MOST_KEPT_BYTES`, one
    array of the files.

    Args:
      parameters: path -> parameter, with a shape and functions that read it.
      tokens: the numbers of its special tokens, as in the extra data of a checkpoint.
    """

    parameters: Mapping[str, Any]
    tokens: Mapping[str, Any]

    @property
    def extra(self) -> dict[str, Any]:
        return dict(self.tokens)

    @property
    def manifests(self) -> dict[int, Manifest]:
        return {}

    @property
    def num_bytes(self) -> int:
        return sum(array.leaf.num_bytes for (array,) in self.stored_arrays.values())

    @cached_property
    def stored_arrays(self) -> dict[str, list[StoredArray]]:
        return {
            array_path(path): [StoredArray(self.folders[0], Leaf(shape=each.shape, dtype=DTYPE))]
            for path, each in self.parameters.items()
        }

    @cached_property
    def _files(self) -> Any:
        return _ParameterFiles(self.parameters)


class _ParameterFiles:
    """Reads slices of parameters like `ArrayFiles`; keeps the last parameter for its next slice, if small."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters, self._path, self._values = parameters, "", np.empty(0)

    def dtype(self, stored: StoredArray, path: str) -> np.dtype:
        return np.dtype(DTYPE)

    def start(self, stored: StoredArray, path: str, source: Any, array: np.ndarray, target: Any) -> Any:
        parameter = self._parameters[path.removeprefix(PARAMS)]
        if stored.leaf.num_bytes > MOST_KEPT_BYTES and parameter.stack:
            # one of its arrays in memory at a time
            stack, filled = parameter.stack, array[target]
            numbers = np.arange(math.prod(stack)).reshape(stack)[source[: len(stack)]]
            for place in np.ndindex(*numbers.shape):
                filled[place] = parameter.read_one(int(numbers[place]))[source[len(stack) :]]
        else:
            if path != self._path:
                self._path, self._values = path, parameter.read()
            array[target] = self._values[source]
        done: Future[None] = Future()
        done.set_result(None)
        return done


def open_pretrained(folder: Path, step: int | str | None = None) -> PretrainedReader:
    """Open the parameters of a folder of Hugging Face.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the folder cannot be read, or a step was given.
    """
    if step is not None:
        raise ValueError(f"{folder} is a folder of Hugging Face, which has no steps; leave step {step} out")
    converter = _converter()
    return PretrainedReader(
        step=0,
        folders={0: folder},
        num_parts=1,
        parameters=converter.open_parameters(folder),
        tokens={TOKENS: converter.token_ids(folder)},
    )


def add_adapters(reader: CheckpointReader, adapter: Path, model: Any) -> PretrainedReader:
    """Return a reader of the parameters of a folder of Hugging Face and of adapters.

    Args:
      reader: the reader of the folder.
      adapter: a folder of PEFT.
      model: the configuration of the run's model, whose option `lora` must match the adapters.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the adapters do not fit this model, or `reader` reads a checkpoint.
    """
    if not isinstance(reader, PretrainedReader):
        raise ValueError(
            f"adapter is {adapter}, and adapters are added only to the parameters of a folder of Hugging"
            " Face; a checkpoint has its own: leave it out"
        )
    if not hasattr(model, "lora"):
        raise ValueError(f"adapter is {adapter}, and {type(model).__name__} has no option lora; leave it out")
    lora, found = _converter().open_adapters(adapter, model)
    if model.lora != lora:
        raise ValueError(
            f"the model has lora {model.lora}, and the adapters in {adapter} are {lora}; use that, or leave"
            " the model's out"
        )
    return replace(reader, parameters={**reader.parameters, **found})


def upcycle(reader: CheckpointReader, model: Any) -> PretrainedReader:
    """Return a reader of a dense model whose feed-forward layers are copied to experts.

    Args:
      reader: the reader of a checkpoint, or of a folder of Hugging Face.
      model: the configuration of the run's model, with experts.

    Raises:
      ValueError: a parameter cannot be copied.
    """
    if isinstance(reader, PretrainedReader):
        parameters = reader.parameters
    else:
        make = _converter().ParameterReader
        parameters = {
            path.removeprefix(PARAMS): make(leaf.shape, partial(reader.read, path))
            for path, leaf in reader.leaves.items()
            if path.startswith(PARAMS)
        }
    found = importlib.import_module(UPCYCLING).upcycle(model, parameters)
    return PretrainedReader(
        step=reader.step,
        folders=reader.folders,
        num_parts=1,
        parameters=found,
        tokens=select_kept_tokens(reader.extra),
    )


def _converter() -> Any:
    return importlib.import_module(CONVERTER)


BASE = "base"
"""Entry of a checkpoint's extra data: the arrays that it leaves out, and the digest of their checkpoint."""
BLOCKS, BLOCK_BYTES = 1024, 1 << 12
"""Number and size of the blocks of each file of a folder of Hugging Face in its digest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReaderWithBase(CheckpointReader):
    """A reader of a checkpoint of trained parameters that reads frozen ones from the base checkpoint.

    Args:
      own: the reader of the checkpoint.
      base: the reader of the base checkpoint, from which the run started.
      arrays: paths of the arrays to read from the base checkpoint.
    """

    own: CheckpointReader
    base: CheckpointReader
    arrays: frozenset[str]

    @property
    def manifests(self) -> dict[int, Manifest]:
        return self.own.manifests

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes + self.base.num_bytes

    @cached_property
    def stored_arrays(self) -> dict[str, list[StoredArray]]:
        elsewhere = {path: self.base.stored_arrays[path] for path in sorted(self.arrays)}
        return elsewhere | self.own.stored_arrays

    def start(self, path: str, wanted: Leaf, index: Index | None = None) -> PendingRead:
        reader = self.own if path in self.own.stored_arrays else self.base
        return reader.start(path, wanted, index)


def find_base_arrays(
    frozen: frozenset[str], shapes: Mapping[str, tuple[int, ...]], base: CheckpointReader
) -> list[str]:
    """Return the paths of the frozen parameters that a checkpoint need not hold.

    Args:
      frozen: paths of the frozen parameters.
      shapes: path -> shape of every parameter of the whole model.
      base: the reader of the base checkpoint.

    Raises:
      ValueError: there are none.
    """
    leaves = base.leaves
    found = [
        path
        for path in sorted(frozen)
        if not matches(path, ADAPTERS)
        and f"{PARAMS}{path}" in leaves
        and tuple(leaves[f"{PARAMS}{path}"].shape) == tuple(shapes[path])
    ]
    if not found:
        raise ValueError(
            "checkpoints.trained_only is True, and no frozen parameter of this run comes from the checkpoint"
            " that it started from; freeze some (--freeze, or --model.lora), or leave it out:"
            " --checkpoints.no-trained-only"
        )
    return found


def make_entry(base: CheckpointReader, arrays: list[str], name: Path) -> dict[str, Any]:
    """Return the entry `BASE` of a checkpoint's extra data."""
    return {"arrays": [PARAMS + path for path in arrays], "digest": compute_digest(base), "folder": str(name)}


def add_base(reader: CheckpointReader, base: CheckpointReader | None, change: str) -> CheckpointReader:
    """Return a reader of all parameters of a checkpoint.

    Args:
      reader: the reader of the checkpoint.
      base: the reader of the base checkpoint of its run; None if it was not given.
      change: how to give it, for the error.

    Raises:
      ValueError: the checkpoint has only trained parameters, and the base checkpoint is missing or another.
    """
    entry = reader.extra.get(BASE)
    if entry is None:
        return reader
    wanted, arrays, known = (entry.get(name) for name in ("digest", "arrays", "folder"))
    if not (isinstance(arrays, list) and all(isinstance(path, str) for path in arrays)):
        raise ValueError(f"step {reader.step} has no list of the arrays that it leaves out; it is broken")
    if base is None:
        raise ValueError(
            f"step {reader.step} has only trained parameters; its other {len(arrays)} parameters are in"
            f" {short(known)}, where the run started: {change}"
        )
    if (found := compute_digest(base)) != wanted:
        raise ValueError(
            f"step {reader.step} has only trained parameters, and needs frozen ones of digest"
            f" {short(wanted)}; the given ones have {found!r}. Give the checkpoint that the run started from,"
            f" then {short(known)}: {change}"
        )
    if missing := [path for path in arrays if path not in base.stored_arrays]:
        raise ValueError(f"{missing[0]} of step {reader.step} is not in the given checkpoint: {change}")
    return ReaderWithBase(
        step=reader.step, folders=reader.folders, num_parts=reader.num_parts, save_id=reader.save_id,
        own=reader, base=base, arrays=frozenset(arrays),
    )  # fmt: skip


def compute_digest(reader: CheckpointReader) -> str:
    """Return a digest of the files of a reader.

    For a checkpoint it covers the checksums of all files. For a folder of Hugging Face it covers the size of
    each file and blocks at equal distances: it distinguishes models in milliseconds, but misses single bits.
    """
    found = hashlib.sha256()
    if reader.manifests:
        for part, manifest in sorted(reader.manifests.items()):
            for name, file in sorted(manifest.files.items()):
                found.update(f"{part} {name} {file.num_bytes} {file.crc32}\n".encode())
        return found.hexdigest()[:32]
    for folder in reader.folders.values():
        for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
            size = path.stat().st_size
            found.update(f"{path.name} {size}\n".encode())
            with open_regular(path) as file:
                for number in range(BLOCKS):
                    file.seek(number * max(BLOCK_BYTES, size // BLOCKS))
                    found.update(file.read(BLOCK_BYTES))
    return found.hexdigest()[:32]
