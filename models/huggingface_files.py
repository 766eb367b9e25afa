"""Read and write Hugging Face model folders: config.json, safetensors files, tokenizer files.

The only importer of safetensors (extra `hf`). `shardtrain checkpoint export` and `import` load this module by
its name; a module of your own with `export_model` and `import_model` can replace it (`--using`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shardtrain.models import checks
from shardtrain.models.huggingface import (
    FAMILIES,
    left_out,
    parameters,
    read_config,
    tensor_shapes,
    tensors,
    write_config,
)
from shardtrain.models.huggingface_place import MOST_SIZE, problem_of
from shardtrain.system.atomic_write import new_folder, refuse_filled
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import name_problem, read_bytes, read_json, whole_number

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "vocab.*",
)  # fmt: skip
"""Files that are copied as they are."""

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Entries of config.json that belong to the tokenizer."""

FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A model that was found in a folder.

    Args:
      family: gpt2, llama or bert.
      config: its configuration, a dataclass of `shardtrain.models`.
      arrays: pairs of path ("blocks/mlp/up/kernel") and float32 array, each read when its turn comes.
      left_out: names of arrays in the folder that have no place in our model.
      tokenizer: files that belong to its tokenizer.
    """

    family: str
    config: Any
    arrays: Iterator[tuple[str, np.ndarray]]
    left_out: list[str]
    tokenizer: list[Path]


def import_model(folder: Path) -> Imported:
    """Read a folder written by `save_pretrained` or downloaded.

    Raises:
      FileNotFoundError: there is no config.json, or no safetensors.
      ValueError: safetensors is not installed; or listing what in the folder cannot be read as one of the
        families.
    """
    config = _read_json(own_file(folder, CONFIG), "a folder with config.json and model.safetensors")
    state = _open(folder)
    family, _ = read_config(config)
    ours, arrays = parameters(config, state, dtype=np.float32)
    return Imported(
        family=family.model_type,
        config=ours,
        arrays=arrays,
        left_out=left_out(config, state),
        tokenizer=tokenizer_files(folder),
    )


def export_model(
    folder: Path,
    options: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
    tokenizer: Path | None = None,
) -> list[str]:
    """Write a folder that `transformers` loads as it is.

    No more is in memory than one file's arrays, and one parameter with all its layers.

    Args:
      folder: where to; it must not hold anything. It gets its name when all is written.
      options: of the model's configuration, name -> value.
      shapes: path -> shape of every parameter, blocks stacked.
      read: path -> array.
      dtype: of what is written: float32, float16 or bfloat16.
      max_shard_bytes: a new file begins above that.
      tokenizer: a folder whose tokenizer files are copied, and whose config.json, if it has one, tells
        which tokens begin, end and fill up a text.

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
    config = config_of(options)
    arrays = tensors(config, shapes, read)
    safetensors = _safetensors()
    about = {**write_config(config), **_token_ids(tokenizer), "dtype": dtype}
    files = shard(tensor_shapes(config), np.dtype(DTYPES[dtype]).itemsize, max_shard_bytes)
    with new_folder(folder) as filled:
        _write_json(filled / CONFIG, about)
        for name, inside in files.items():
            found = {each: _cast(array, dtype) for each, array in _take(arrays, len(inside))}
            assert list(found) == inside
            safetensors.numpy.save_file(found, filled / name, metadata={"format": "pt"})
        if len(files) > 1:
            _write_index(filled / INDEX, files, tensor_shapes(config), np.dtype(DTYPES[dtype]).itemsize)
        for path in tokenizer_files(tokenizer) if tokenizer else []:
            (filled / path.name).write_bytes(read_bytes(path))
    return sorted(path.name for path in folder.iterdir())


def config_of(options: Mapping[str, Any]) -> Any:
    """Return the configuration with these options, of whichever class has them.

    Args:
      options: name -> value, such as a run's description has them as model.NAME.

    Raises:
      ValueError: they are those of no class that a family has, or of several.

    >>> options = {"vocab": 32, "seq": 8, "embed": 16, "num_layers": 1, "num_heads": 4, "segments": 2}
    >>> type(config_of(options)).__name__
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


def shard(
    shapes: Mapping[str, tuple[int, ...]], item_bytes: int, max_shard_bytes: int
) -> dict[str, list[str]]:
    """Assign arrays to files, in order; an array above the size limit gets a file of its own.

    >>> shard({"a": (2,), "b": (1,), "c": (3,)}, item_bytes=4, max_shard_bytes=12)
    {'model-00001-of-00002.safetensors': ['a', 'b'], 'model-00002-of-00002.safetensors': ['c']}
    """
    files: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        num_bytes = int(np.prod(shape)) * item_bytes
        if files[-1] and filled + num_bytes > max_shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += num_bytes
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer files in a folder, which are copied as they are.

    Raises:
      ValueError: one leads out of the folder.
    """
    names = {path.name for pattern in TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    return [own_file(folder, name) for name in sorted(names)]


def own_file(folder: Path, name: str) -> Path:
    """Return the path of a file of a download by a name that another of its files gives.

    Links may lead to elsewhere in the folder, and from a snapshot in the cache of Hugging Face's hub to its
    blobs.

    Raises:
      ValueError: the name, or what it leads to, is not in the folder.
    """
    if problem := name_problem(name):
        raise ValueError(f"{folder} names a file {short(name)}, which {problem}")
    target, root = (folder / name).resolve(), folder.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(target.is_relative_to(each) for each in roots):
        raise ValueError(
            f"{folder / name} is a link out of its folder, to {target}; if you trust it, put the file itself"
            " there"
        )
    return folder / name


class _OnDisk:
    """An array in a file: its shape at once, its values by `np.asarray`.

    The file is mapped only while it is read: else every page that was read once would stay with the process.
    """

    def __init__(self, path: Path, name: str, shape: tuple[int, ...]) -> None:
        self._path, self._name, self.shape = path, name, shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        with _safetensors().safe_open(self._path, framework="np") as file:
            array = file.get_tensor(self._name)
        return array if dtype is None else array.astype(dtype)


def _open(folder: Path) -> dict[str, _OnDisk]:
    """Name -> array of all files of a model.

    Raises:
      FileNotFoundError: there are none.
      ValueError: one cannot be read.
    """
    safetensors = _safetensors()
    paths = [own_file(folder, name) for name in _weight_files(folder)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise FileNotFoundError(
            f"{folder} has no {', '.join(missing)}; give a folder with {WEIGHTS}, or with {INDEX} and its"
            " files (older .bin files: load them with transformers and save them again)"
        )
    arrays = {}
    for path in paths:
        try:
            with safetensors.safe_open(path, framework="np") as file:
                slices = {each: file.get_slice(each) for each in file.keys()}  # noqa: SIM118
                dtypes = {each: found.get_dtype() for each, found in slices.items()}
                shapes = {each: tuple(found.get_shape()) for each, found in slices.items()}
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}; download or copy it again") from None
        checks.refuse(f"arrays in {path}", _array_problems(dtypes))
        arrays |= {each: _OnDisk(path, each, shape) for each, shape in shapes.items()}
    return arrays


def _weight_files(folder: Path) -> list[str]:
    """The names of the files with arrays.

    Raises:
      ValueError: the index is not of its form.
    """
    if not (folder / INDEX).is_file():
        return [WEIGHTS]
    weights = _read_json(own_file(folder, INDEX), "").get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from names of arrays to names of files")
    return sorted(set(weights.values()))


def _array_problems(dtypes: Mapping[str, object]) -> list[str]:
    """Arrays that are no parameters.

    >>> _array_problems({"a": "F32", "b": "I64"})
    ['b has dtype I64; parameters have F64, F32, F16 or BF16']
    """
    problems = [f"{name!r} has control characters in its name" for name in dtypes if not name.isprintable()]
    return problems + [
        f"{name} has dtype {dtype}; parameters have F64, F32, F16 or BF16"
        for name, dtype in dtypes.items()
        if name.isprintable() and dtype not in FLOATS
    ]


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ModuleNotFoundError:
        raise ValueError(
            "safetensors is not installed; it comes with the extra hf: uv sync --extra hf, or pip install"
            " 'shardtrain[hf]'"
        ) from None
    return safetensors


def _take(arrays: Iterator[tuple[str, np.ndarray]], num: int) -> Iterator[tuple[str, np.ndarray]]:
    for _ in range(num):
        yield next(arrays)


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(array.astype(DTYPES[dtype], copy=False))


def _token_ids(tokenizer: Path | None) -> dict[str, Any]:
    """Without a tokenizer no token is special: the defaults of `transformers` are those of its own models."""
    known: dict[str, Any] = {}
    if tokenizer is not None and (tokenizer / CONFIG).is_file():
        known = _read_json(own_file(tokenizer, CONFIG), "")
    found = {name: known.get(name) for name in TOKENS}
    # newer models have several that end a text
    each = {name: value if isinstance(value, list) else [value] for name, value in found.items()}
    checks.refuse(
        f"{CONFIG} of the tokenizer",
        [
            problem
            for name, values in each.items()
            for value in values
            for problem in (problem_of(whole_number, value, name, MOST_SIZE) if value is not None else [])
        ],
    )
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


def _read_json(path: Path, wanted: str) -> dict[str, Any]:
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path}; give {wanted}") from None
    except ValueError as error:
        raise ValueError(f"{error}; copy it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is {short(found)}; it is an object of names and values")
    return found
