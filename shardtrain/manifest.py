"""What a finished checkpoint holds, as a file that proves it: sizes and checksums, shapes and dtypes. No jax.

Owns the names in a checkpoint folder and `manifest.json`; writing and reading arrays is in `checkpoint.py`.
A folder `step_00000020` is whole: it got that name, with its manifest in it, by one rename.
"""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

SCHEMA = 1
ARRAYS = "arrays"
"""The folder inside a step's folder that Orbax writes; any Orbax program can read it."""

_STEP = "step_"
_PARTIAL = ".partial"
_MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class File:
    """One file as it was when the checkpoint was finished.

    Args:
        num_bytes: its size.
        crc32: its checksum; it finds accidents (every single flipped bit), not forgery.
    """

    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the state.

    Args:
        shape: its global shape.
        dtype: the name of its dtype.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a finished checkpoint holds.

    Args:
        step: the training step it was saved after.
        orbax_version: of the Orbax that wrote the arrays.
        files: path below the step's folder -> size and checksum.
        leaves: path in the state -> shape and dtype.
        extra: what the caller saved beside the arrays.
    """

    step: int
    orbax_version: str
    files: Mapping[str, File]
    leaves: Mapping[str, Leaf]
    extra: dict[str, Any]


def step_folder(folder: Path, step: int) -> Path:
    """Where the finished checkpoint of a step lies.

    Example:
        >>> step_folder(Path("runs"), 20).name
        'step_00000020'
    """
    return folder / f"{_STEP}{step:08d}"


def partial_folder(folder: Path, step: int) -> Path:
    """Where a step is written before it is finished, and where it goes to be deleted."""
    return folder / (step_folder(folder, step).name + _PARTIAL)


def finished_steps(folder: Path) -> list[int]:
    """Steps that have a folder of their own, ascending; whether each is whole, `problems` says."""
    digits = [path.name.removeprefix(_STEP) for path in folder.glob(f"{_STEP}*")]
    steps = sorted(int(text) for text in digits if text.isascii() and text.isdecimal())
    return [step for step in steps if step_folder(folder, step).exists()]


def partial_folders(folder: Path) -> list[Path]:
    """What interrupted saves and deletions left behind, or what is being saved right now."""
    return sorted(folder.glob(f"{_STEP}*{_PARTIAL}"))


def has_manifest(step_folder: Path) -> bool:
    """Whether a manifest is there; nothing is read."""
    return (step_folder / _MANIFEST).is_file()


def write_manifest(
    step_folder: Path, *, step: int, orbax_version: str, leaves: Mapping[str, Leaf], extra: dict[str, Any]
) -> None:
    """Checksum all that lies in a step's folder, add the manifest, and force everything to the disk.

    Reads each file once: it is still in memory after the save, so the cost is that of CRC-32 (some 4 GB/s).

    Args:
        step_folder: the folder; its arrays are written already.
        step: the training step.
        orbax_version: of the Orbax that wrote the arrays.
        leaves: path in the state -> shape and dtype.
        extra: values that JSON can hold, see `extra_problems`.

    Raises:
        OSError: the folder cannot be read or written.
    """
    paths = sorted(path for path in step_folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(lambda path: File(num_bytes=path.stat().st_size, crc32=_crc32(path)), paths))
    manifest = Manifest(
        step=step,
        orbax_version=orbax_version,
        files={
            path.relative_to(step_folder).as_posix(): file for path, file in zip(paths, files, strict=True)
        },
        leaves=leaves,
        extra=extra,
    )
    (step_folder / _MANIFEST).write_text(_text({"schema": SCHEMA, **asdict(manifest)}))
    for path in (*step_folder.rglob("*"), step_folder):
        sync(path)


def read_manifest(step_folder: Path) -> tuple[Manifest | None, str]:
    """A step's manifest, or None and why it cannot be trusted.

    Raises:
        ValueError: it is whole, but of a later version of shardtrain.
    """
    try:
        text = (step_folder / _MANIFEST).read_text()
    except FileNotFoundError:
        return None, f"no {_MANIFEST}"
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{_MANIFEST} cannot be read: {error}"
    try:
        body = json.loads(text)["body"]
        if _text(body) != text:
            return None, f"{_MANIFEST} does not agree with its own checksum"
    except (ValueError, KeyError, TypeError):
        return None, f"{_MANIFEST} is damaged"
    if body["schema"] != SCHEMA:
        raise ValueError(
            f"{step_folder} was written in schema {body['schema']}; this shardtrain reads schema {SCHEMA}. "
            "Use the shardtrain that wrote it, or another run folder."
        )
    return Manifest(
        step=body["step"],
        orbax_version=body["orbax_version"],
        files={path: File(**file) for path, file in body["files"].items()},
        leaves={
            path: Leaf(shape=tuple(leaf["shape"]), dtype=leaf["dtype"])
            for path, leaf in body["leaves"].items()
        },
        extra=body["extra"],
    ), ""


def problems(step_folder: Path) -> list[str]:
    """Everything in which a step's folder differs from what was saved; empty for a whole checkpoint.

    Sizes first, then checksums: each file of the right size is read once, several at a time (CRC-32 runs at
    some 4 GB/s a thread, so the disk is the limit; what it reads stays in memory for the load that follows).

    Raises:
        ValueError: it is whole, but of a later version of shardtrain.
    """
    manifest, reason = read_manifest(step_folder)
    if manifest is None:
        return [reason]
    if step_folder.name != f"{_STEP}{manifest.step:08d}":
        return [f"its manifest is that of step {manifest.step}"]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda item: _file_problem(step_folder / item[0], item[1]), manifest.files.items())
        return [f"{path} {problem}" for path, problem in zip(manifest.files, found, strict=True) if problem]


def mismatches(saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf]) -> list[str]:
    """Every array in which two states differ, by path.

    Example:
        >>> w = Leaf(shape=(2,), dtype="float32")
        >>> mismatches({"a": w, "b": w}, {"b": Leaf(shape=(3,), dtype="float32"), "c": w})
        ['a: saved float32 (2,), not asked for', 'b: saved float32 (2,), asked for float32 (3,)', \
'c: asked for float32 (2,), not saved']
    """

    def difference(path: str) -> str:
        if path not in wanted:
            return f"{path}: saved {saved[path]}, not asked for"
        if path not in saved:
            return f"{path}: asked for {wanted[path]}, not saved"
        return f"{path}: saved {saved[path]}, asked for {wanted[path]}"

    paths = {**saved, **wanted}
    return [difference(path) for path in paths if saved.get(path) != wanted.get(path)]


def extra_problems(extra: object, path: str = "extra") -> list[str]:
    """Everything in `extra` that would not come back from JSON: other types, keys that are not text.

    Tuples are let through; they come back as lists.

    Example:
        >>> extra_problems({"seed": 1, "position": {3: 4}, "when": {5}})
        ['extra/position: key 3 is int, not str', 'extra/when: set']
    """
    if extra is None or isinstance(extra, bool | int | float | str):
        return []
    if isinstance(extra, dict):
        keys = [f"{path}: key {key!r} is {_kind(key)}, not str" for key in extra if not isinstance(key, str)]
        inner = (extra_problems(value, f"{path}/{key}") for key, value in extra.items())
        return [*keys, *chain.from_iterable(inner)]
    if isinstance(extra, list | tuple):
        inner = (extra_problems(value, f"{path}/{index}") for index, value in enumerate(extra))
        return list(chain.from_iterable(inner))
    return [f"{path}: {_kind(extra)}"]


def delete(folder: Path) -> None:
    """Delete a step's folder, if it is there; interrupted at any point, what is left is a partial folder."""
    if not folder.exists():
        return
    partial = folder.with_name(folder.name.removesuffix(_PARTIAL) + _PARTIAL)
    if partial != folder:
        delete(partial)
        folder.rename(partial)
    shutil.rmtree(partial)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _kind(value: object) -> str:
    return type(value).__name__


def _text(body: dict[str, Any]) -> str:
    """The one text of a manifest: any other text, were it only a space longer, is not trusted."""
    checksum = zlib.crc32(json.dumps(body).encode())
    return json.dumps({"crc32": checksum, "body": body}, indent=1) + "\n"


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _file_problem(path: Path, file: File) -> str:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != file.num_bytes:
            return f"has {num_bytes} bytes, {file.num_bytes} were saved"
        return "" if _crc32(path) == file.crc32 else f"has other contents than were saved ({num_bytes} bytes)"
    except FileNotFoundError:
        return f"is missing, {file.num_bytes} bytes were saved"
    except OSError as error:
        return f"cannot be read: {error}"
