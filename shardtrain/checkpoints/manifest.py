"""The manifest of a finished checkpoint: sizes and checksums of files, shapes and dtypes of arrays. No jax.

Owns the names in a checkpoint folder and `manifest.json`. A folder `step_00000020`, or `.part-1-of-3` of it
where several write, is whole: it got that name, with its manifest in it, by one rename. Next: `reader.py`.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from shardtrain.checkpoints.manifest_entries import (
    COMMON,
    MOST_PARTS,
    WHOLE,
    ArrayOrigin,
    File,
    Leaf,
    Manifest,
    WriterPart,
    body_of,
    manifest_of,
)
from shardtrain.system.untrusted_files import open_inside, parse_json, short, special_files, stat_inside

__all__ = [
    "ARRAYS",
    "COMMON",
    "PARTIAL",
    "WHOLE",
    "ArrayOrigin",
    "File",
    "Leaf",
    "Manifest",
    "WriterPart",
    "delete",
    "extra_problems",
    "finished",
    "has_manifest",
    "matches",
    "mismatches",
    "partial_folder",
    "partial_folders",
    "problems",
    "read_manifest",
    "read_name",
    "size_of",
    "step_folder",
    "sync",
    "write_manifest",
]

SCHEMA = 2
READABLE = (1, 2)
"""Schema 1 knew no parts, rows and replicas: it is schema 2 without them."""

ARRAYS = "arrays"
"""The folder inside a step's folder that Orbax writes; any Orbax program can read it."""

_STEP = "step_"
PARTIAL = ".partial"
"""How the name of a folder ends that is being written, or deleted."""

_MANIFEST = "manifest.json"
_NAME = re.compile(r"step_([0-9]{1,15})(?:\.part-([0-9]{1,5})-of-([0-9]{1,5}))?")
_MOST_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 22


def step_folder(folder: Path, step: int, part: WriterPart = WHOLE) -> Path:
    """Return the folder of a step's finished checkpoint, or of a part of it.

    Examples:
        >>> step_folder(Path("runs"), 20).name, step_folder(Path("runs"), 20, WriterPart(1, 3)).name
        ('step_00000020', 'step_00000020.part-1-of-3')
    """
    return folder / f"{_STEP}{step:08d}{part}"


def partial_folder(folder: Path, step: int, part: WriterPart = WHOLE) -> Path:
    """Return the folder in which a step is written, and into which it is renamed to be deleted."""
    return folder / (step_folder(folder, step, part).name + PARTIAL)


def finished(folder: Path) -> dict[int, dict[WriterPart, Path]]:
    """Folders of finished parts by step, ascending; whether each is whole, `problems` says."""
    found: dict[int, dict[WriterPart, Path]] = {}
    for path in sorted(folder.glob(f"{_STEP}*")):
        step, part = read_name(path.name)
        if step >= 0 and path == step_folder(folder, step, part):
            found.setdefault(step, {})[part] = path
    return dict(sorted(found.items()))


def read_name(name: str) -> tuple[int, WriterPart]:
    """The step and part of a folder; (-1, WHOLE) where it has none.

    >>> read_name("step_00000020.part-1-of-3"), read_name("step_new")
    ((20, WriterPart(index=1, count=3)), (-1, WriterPart(index=0, count=1)))
    """
    match = _NAME.fullmatch(name)
    part = WriterPart(int(match[2]), int(match[3])) if match and match[2] else WHOLE
    # a count that no run has would be counted up to
    if match is None or not part.index < part.count <= MOST_PARTS:
        return -1, WHOLE
    return int(match[1]), part


def partial_folders(folder: Path) -> list[Path]:
    """What interrupted saves and deletions left behind, or what is being saved right now."""
    found = folder.glob(f"{_STEP}*{PARTIAL}")
    return sorted(path for path in found if read_name(path.name.removesuffix(PARTIAL))[0] >= 0)


def has_manifest(step_folder: Path) -> bool:
    """Whether a manifest is there; nothing is read."""
    return (step_folder / _MANIFEST).is_file()


def write_manifest(step_folder: Path, manifest: Manifest) -> None:
    """Checksum all that lies in a step's folder, add the manifest, and force everything to the disk.

    Reads each file once: it is still in memory after the save, so the cost is that of CRC-32 (some 4 GB/s).

    Args:
        step_folder: the folder; its arrays are written already.
        manifest: without files; `extra` has values that JSON can hold, see `extra_problems`.

    Raises:
        OSError: the folder cannot be read or written.
    """
    paths = sorted(path for path in step_folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(_file, paths))
    by_name = {
        path.relative_to(step_folder).as_posix(): file for path, file in zip(paths, files, strict=True)
    }
    manifest = replace(manifest, files=by_name)
    (step_folder / _MANIFEST).write_text(_text({"schema": SCHEMA, **body_of(manifest)}))
    for path in (*step_folder.rglob("*"), step_folder):
        sync(path)


def _file(path: Path) -> File:
    with path.open("rb") as file:
        return File(num_bytes=path.stat().st_size, crc32=_crc32(file))


def read_manifest(step_folder: Path) -> tuple[Manifest | None, str]:
    """A step's manifest, or None and why it cannot be trusted.

    Raises:
        ValueError: it is whole, but of a later version of shardtrain.
    """
    if step_folder.is_symlink():
        return None, "it is a link; put the folder itself in its place"
    try:
        text = _manifest_text(step_folder)
    except FileNotFoundError:
        return None, f"no {_MANIFEST}"
    except (OSError, ValueError) as error:
        return None, f"{_MANIFEST} cannot be read: {error}"
    try:
        body = parse_json(text, ours=True)["body"]
        if _text(body) != text:
            return None, f"{_MANIFEST} does not agree with its own checksum"
        schema = body["schema"]
    except (ValueError, KeyError, TypeError):
        return None, f"{_MANIFEST} is damaged"
    if type(schema) is int and schema > SCHEMA:
        raise ValueError(
            f"{step_folder} was written in schema {schema}; this shardtrain reads schema "
            f"{' and '.join(map(str, READABLE))}. Use the shardtrain that wrote it, or another run folder."
        )
    try:
        if schema not in READABLE:
            raise ValueError(f"schema is {short(schema)}")
        return manifest_of(body), ""
    except ValueError as error:
        return None, f"{_MANIFEST} is not of the form that shardtrain writes: {error}"


def _manifest_text(step_folder: Path) -> str:
    num_bytes = stat_inside(step_folder, _MANIFEST).st_size
    if num_bytes > _MOST_BYTES:
        raise ValueError(f"it has {num_bytes:,} bytes; at most {_MOST_BYTES:,} are read")
    with open_inside(step_folder, _MANIFEST) as file:
        return file.read(num_bytes).decode()


def problems(step_folder: Path) -> list[str]:
    """Return all differences of a step's folder from what was saved; empty for a whole checkpoint.

    Sizes first, then checksums: each file of the right size is read once, several at a time (CRC-32 runs at
    some 4 GB/s a thread, so the disk is the limit; what it reads stays in memory for the load that follows).

    Raises:
        ValueError: it is whole, but of a later version of shardtrain.
    """
    manifest, reason = read_manifest(step_folder)
    if manifest is None:
        return [reason]
    if step_folder.name != f"{_STEP}{manifest.step:08d}{manifest.part}":
        return [f"its manifest is that of step {manifest.step}{manifest.part}"]
    if special := special_files(step_folder):
        return special
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda item: _file_problem(step_folder, *item), manifest.files.items())
        return [f"{path} {problem}" for path, problem in zip(manifest.files, found, strict=True) if problem]


def mismatches(
    saved: Mapping[str, Leaf],
    wanted: Mapping[str, Leaf],
    missing: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> list[str]:
    """Every array in which two states differ, by path; how they are cut into pieces is no difference.

    Args:
        saved: path -> array.
        wanted: path -> array.
        missing: patterns of paths (`params/head/*`) that need not be saved, or not in that shape.
        unused: patterns of paths that are saved and not wanted.

    Examples:
        >>> w = Leaf(shape=(2,), dtype="float32")
        >>> saved = {"a": w, "b": w, "d": w}
        >>> wanted = {"b": Leaf(shape=(3,), dtype="float32"), "c": w, "d": w}
        >>> mismatches(saved, wanted)
        ['a: saved float32 (2,), not asked for', 'b: saved float32 (2,), asked for float32 (3,)', \
'c: asked for float32 (2,), not saved']
        >>> mismatches(saved, wanted, missing=["b", "c"], unused=["a*"])
        []
    """

    def difference(path: str) -> str:
        if path not in wanted:
            return "" if matches(path, unused) else f"{path}: saved {saved[path]}, not asked for"
        if path not in saved:
            return "" if matches(path, missing) else f"{path}: asked for {wanted[path]}, not saved"
        if str(saved[path]) == str(wanted[path]) or matches(path, missing):
            return ""
        return f"{path}: saved {saved[path]}, asked for {wanted[path]}"

    return [text for path in {**saved, **wanted} if (text := difference(path))]


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether any pattern, in the shell's way, is that of a path.

    >>> matches("params/head/kernel", ["params/head/*"]), matches("params/head/kernel", ["head"])
    (True, False)
    """
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def extra_problems(extra: object, path: str = "extra") -> list[str]:
    """Everything in `extra` that would not come back from JSON: other types, keys that are not text.

    Tuples are let through; they come back as lists.

    Examples:
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
    if folder.is_symlink():
        folder.unlink()  # and nothing behind it
        return
    if not folder.exists():
        return
    partial = folder.with_name(folder.name.removesuffix(PARTIAL) + PARTIAL)
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


def _crc32(file: BinaryIO) -> int:
    checksum = 0
    while chunk := file.read(_CHUNK_BYTES):
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def size_of(step_folder: Path, name: str) -> int:
    """The size of a file that a manifest names; -1 where there is no such regular file inside the folder."""
    try:
        return stat_inside(step_folder, name).st_size
    except OSError:
        return -1


def _file_problem(step_folder: Path, name: str, file: File) -> str:
    try:
        num_bytes = stat_inside(step_folder, name).st_size
        if num_bytes != file.num_bytes:
            return f"has {num_bytes} bytes, {file.num_bytes} were saved"
        with open_inside(step_folder, name) as opened:
            same = _crc32(opened) == file.crc32
        return "" if same else f"has other contents than were saved ({num_bytes} bytes)"
    except FileNotFoundError:
        return f"is missing, {file.num_bytes} bytes were saved"
    except OSError as error:
        return f"cannot be read: {error}"
