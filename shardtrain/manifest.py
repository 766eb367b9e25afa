"""What a finished checkpoint holds, as a file that proves it: sizes and checksums, shapes and dtypes. No jax.

Owns the names in a checkpoint folder and `manifest.json`. A folder `step_00000020`, or `.part-1-of-3` of it
where several write, is whole: it got that name, with its manifest in it, by one rename. Next: `archive.py`.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA = 2
READABLE = (1, 2)
"""Schema 1 knew no parts, rows and replicas: it is schema 2 without them."""

ARRAYS = "arrays"
"""The folder inside a step's folder that Orbax writes; any Orbax program can read it."""

_STEP = "step_"
PARTIAL = ".partial"
"""How the name of a folder ends that is being written, or deleted."""

_MANIFEST = "manifest.json"
_PART = re.compile(r"step_(\d+)(?:\.part-(\d+)-of-(\d+))?")
_CHUNK_BYTES = 1 << 22


class Part(NamedTuple):
    """Which part of a step a writer saves: islands of stages, or with states of their own, save one each."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f".part-{self.index}-of-{self.count}" if self.count > 1 else ""


WHOLE = Part()


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
class Lie:
    """How an array lies in the state of the whole model, so that any other layout finds its pieces.

    Args:
        rows: the block of each row, where its blocks are stacked and not simply all of them in order; -1 is a
            row of padding.
        num_rows: blocks of the whole model, where there are rows.
        replica: whose it is, where each replica has one of its own.
        num_replicas: how many have; where `replica` is None, its first dim counts them. None: all have it in
            common.

    >>> Lie(rows=(4, 5), num_rows=6).whole((2, 8)), Lie(num_replicas=4).whole((4, 6, 8))
    ((6, 8), (6, 8))
    """

    rows: tuple[int, ...] | None = None
    num_rows: int | None = None
    replica: int | None = None
    num_replicas: int | None = None

    @property
    def counts_replicas(self) -> bool:
        """Its first dim does."""
        return self.num_replicas is not None and self.replica is None

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that it has in one replica of the whole model."""
        shape = tuple(shape)[1:] if self.counts_replicas else tuple(shape)
        return shape if self.num_rows is None else (self.num_rows, *shape[1:])


COMMON = Lie()


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the state.

    Args:
        shape: its global shape, as it is stored.
        dtype: the name of its dtype.
        lie: of which blocks and which replica it is.
    """

    shape: tuple[int, ...]
    dtype: str
    lie: Lie = COMMON

    def __str__(self) -> str:
        return f"{self.dtype} {self.lie.whole(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a finished checkpoint holds.

    Args:
        step: the training step it was saved after.
        orbax_version: of the Orbax that wrote the arrays.
        files: path below the step's folder -> size and checksum.
        leaves: path in the state -> shape, dtype, and which piece of it this is.
        extra: what the caller saved beside the arrays.
        part: of the step; the others have manifests of their own.
        saved_seconds: when, in seconds since 1970.
        save_id: the same in all parts of one save, and of no other.
    """

    step: int
    orbax_version: str
    files: Mapping[str, File]
    leaves: Mapping[str, Leaf]
    extra: dict[str, Any]
    part: Part = WHOLE
    saved_seconds: float = 0.0
    save_id: str = ""


def step_folder(folder: Path, step: int, part: Part = WHOLE) -> Path:
    """Where the finished checkpoint of a step lies, or a part of it.

    Example:
        >>> step_folder(Path("runs"), 20).name, step_folder(Path("runs"), 20, Part(1, 3)).name
        ('step_00000020', 'step_00000020.part-1-of-3')
    """
    return folder / f"{_STEP}{step:08d}{part}"


def partial_folder(folder: Path, step: int, part: Part = WHOLE) -> Path:
    """Where a step is written before it is finished, and where it goes to be deleted."""
    return folder / (step_folder(folder, step, part).name + PARTIAL)


def finished(folder: Path) -> dict[int, dict[Part, Path]]:
    """Folders of finished parts by step, ascending; whether each is whole, `problems` says."""
    found: dict[int, dict[Part, Path]] = {}
    for path in sorted(folder.glob(f"{_STEP}*")):
        step, part = read_name(path.name)
        if step >= 0 and path == step_folder(folder, step, part):
            found.setdefault(step, {})[part] = path
    return dict(sorted(found.items()))


def read_name(name: str) -> tuple[int, Part]:
    """The step and part of a folder; (-1, WHOLE) where it has none.

    >>> read_name("step_00000020.part-1-of-3"), read_name("step_new")
    ((20, Part(index=1, count=3)), (-1, Part(index=0, count=1)))
    """
    match = _PART.fullmatch(name)
    if match is None or not match[1].isascii():
        return -1, WHOLE
    return int(match[1]), Part(int(match[2]), int(match[3])) if match[2] else WHOLE


def partial_folders(folder: Path) -> list[Path]:
    """What interrupted saves and deletions left behind, or what is being saved right now."""
    return sorted(folder.glob(f"{_STEP}*{PARTIAL}"))


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
        files = list(pool.map(lambda path: File(num_bytes=path.stat().st_size, crc32=_crc32(path)), paths))
    by_name = {
        path.relative_to(step_folder).as_posix(): file for path, file in zip(paths, files, strict=True)
    }
    manifest = replace(manifest, files=by_name)
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
    if body["schema"] not in READABLE:
        raise ValueError(
            f"{step_folder} was written in schema {body['schema']}; this shardtrain reads schema "
            f"{' and '.join(map(str, READABLE))}. Use the shardtrain that wrote it, or another run folder."
        )
    return Manifest(
        step=body["step"],
        orbax_version=body["orbax_version"],
        files={path: File(**file) for path, file in body["files"].items()},
        leaves={path: _leaf(leaf) for path, leaf in body["leaves"].items()},
        extra=body["extra"],
        part=Part(*body.get("part", WHOLE)),
        saved_seconds=body.get("saved_seconds", 0.0),
        save_id=body.get("save_id", ""),
    ), ""


def _leaf(saved: dict[str, Any]) -> Leaf:
    lie = dict(saved.get("lie", {}))
    rows = lie.pop("rows", None)
    lie = Lie(**lie, rows=None if rows is None else tuple(rows))
    return Leaf(shape=tuple(saved["shape"]), dtype=saved["dtype"], lie=lie)


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
    if step_folder.name != f"{_STEP}{manifest.step:08d}{manifest.part}":
        return [f"its manifest is that of step {manifest.step}{manifest.part}"]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda item: _file_problem(step_folder / item[0], item[1]), manifest.files.items())
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

    Example:
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
