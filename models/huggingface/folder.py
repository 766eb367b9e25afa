"""Read files of a downloaded Hugging Face model: JSON files, safetensors files and tokenizer files.

Only this module imports safetensors (extra `hf`). Files are not trusted: names must stay inside the folder,
and arrays are checked before they are read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.errors.messages import refuse
from shardtrain.models.huggingface.families import BUFFERS
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import name_problem, read_json

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "vocab.*",
)  # fmt: skip
"""Files that are copied unchanged."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of parameters, by their names in safetensors."""


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer files in a folder, which are copied unchanged.

    Raises:
      ValueError: one leads out of the folder.
    """
    names = {path.name for pattern in TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    return [own_file(folder, name) for name in sorted(names)]


def own_file(folder: Path, name: str) -> Path:
    """Return the path of a file of a download, and check that it is inside the folder.

    Links may lead to other files of the folder, and from a snapshot in the cache of Hugging Face's hub to its
    blobs.

    Raises:
      ValueError: the name, or the target of a link, is not in the folder.
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


class _StoredArray:
    """An array in a file: its shape is known, and `np.asarray` reads its values.

    The file is mapped only while it is read: otherwise every page that was read once would stay in memory.
    """

    def __init__(self, path: Path, name: str, shape: tuple[int, ...]) -> None:
        self._path, self._name, self.shape = path, name, shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        with import_safetensors().safe_open(self._path, framework="np") as file:
            array = file.get_tensor(self._name)
        if array.dtype.kind not in "iub" and (wrong := np.count_nonzero(~np.isfinite(array))):
            raise ValueError(
                f"{self._path} has {wrong:,} values that are no numbers (NaN or infinite) among the"
                f" {array.size:,} of {self._name}; download or copy it again, or export the model anew"
            )
        return array if dtype is None else array.astype(dtype)


def open_weights(folder: Path, only: str | None = None) -> dict[str, _StoredArray]:
    """Open the arrays of all files of a model, or of one file: name -> array.

    Raises:
      FileNotFoundError: there are none.
      ValueError: one cannot be read.
    """
    safetensors = import_safetensors()
    paths = [own_file(folder, name) for name in ([only] if only else _weight_files(folder))]
    if missing := [path.name for path in paths if not path.is_file()]:
        if only:
            raise FileNotFoundError(f"{folder} has no {only}; give a folder with it")
        raise FileNotFoundError(
            f"{folder} has no {', '.join(missing)}; give a folder with {WEIGHTS}, or with {INDEX} and its"
            " files (older .bin files: load them with transformers and save them again)"
        )
    arrays = {}
    for path in paths:
        try:
            with safetensors.safe_open(path, framework="np") as file:
                names = [each for each in file.keys() if not each.endswith(BUFFERS)]  # noqa: SIM118
                slices = {each: file.get_slice(each) for each in names}
                dtypes = {each: found.get_dtype() for each, found in slices.items()}
                shapes = {each: tuple(found.get_shape()) for each, found in slices.items()}
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}; download or copy it again") from None
        refuse(f"arrays in {path}", _array_problems(dtypes))
        arrays |= {each: _StoredArray(path, each, shape) for each, shape in shapes.items()}
    return arrays


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the files with arrays.

    Raises:
      ValueError: the index is malformed.
    """
    if not (folder / INDEX).is_file():
        return [WEIGHTS]
    weights = read_object(own_file(folder, INDEX), "").get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from names of arrays to names of files")
    return sorted(set(weights.values()))


def _array_problems(dtypes: Mapping[str, object]) -> list[str]:
    """List arrays that cannot be parameters.

    >>> _array_problems({"a": "F32", "b": "I64"})
    ['b has dtype I64; parameters have F64, F32, F16 or BF16']
    """
    problems = [f"{name!r} has control characters in its name" for name in dtypes if not name.isprintable()]
    return problems + [
        f"{name} has dtype {dtype}; parameters have F64, F32, F16 or BF16"
        for name, dtype in dtypes.items()
        if name.isprintable() and dtype not in FLOATS
    ]


def import_safetensors() -> Any:
    """Import safetensors.

    Raises:
      ValueError: it is not installed.
    """
    try:
        import safetensors.numpy
    except ModuleNotFoundError:
        raise ValueError(
            "safetensors is not installed; it comes with the extra hf: uv sync --extra hf, or pip install"
            " 'shardtrain[hf]'"
        ) from None
    return safetensors


def read_object(path: Path, wanted: str) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
      path: the file.
      wanted: what the user should give, for the error if there is no such file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no JSON, or no object.
    """
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path}; give {wanted}") from None
    except ValueError as error:
        raise ValueError(f"{error}; copy it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is {short(found)}; it is an object of names and values")
    return found


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
