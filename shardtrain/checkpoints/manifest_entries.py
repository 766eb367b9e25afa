"""Parse the entries of a checkpoint's manifest from untrusted JSON. No jax.

Names, sizes and counts are checked before they are used. `manifest.py` reads and writes the file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import check_kind, check_whole_number, finite_number, name_problem

MOST_STEP = 10**15
MOST_PARTS = 1 << 14
MOST_BLOCKS = 1 << 20
MOST_DIMS = 32
MOST_SIZE = 1 << 48
MOST_SECONDS = 2.5e11  # in the year 9892; a date has no later years

DTYPE_BYTES = {
    **dict.fromkeys(("bool", "int2", "int4", "uint2", "uint4", "int8", "uint8", "float4_e2m1fn"), 1),
    **{f"float8_{kind}": 1 for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2")},
    **{f"float8_{kind}": 1 for kind in ("e5m2fnuz", "e8m0fnu")},
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Possible dtype of an array -> bytes per element."""

COMPRESSION = 1024
"""Largest compression ratio of arrays: earlier versions compressed them, this one does not."""
SMALL_BYTES = 1 << 20


class WriterPart(NamedTuple):
    """Index and number of the parts of a step: each stage, or island with its own state, saves one."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f".part-{self.index}-of-{self.count}" if self.count > 1 else ""


WHOLE = WriterPart()


@dataclass(frozen=True, kw_only=True)
class File:
    """Size and checksum of one file of a finished checkpoint.

    Args:
        num_bytes: its size.
        crc32: its checksum; it finds accidents (every single flipped bit), not forgery.
    """

    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class ArrayOrigin:
    """The rows and replica of the whole model's array that a stored array holds; any layout can read it.

    Args:
        rows: the block of each row if stacked blocks are not all in order, else None; -1 is a row of padding.
        num_rows: blocks of the whole model if there are rows, else None.
        replica: the replica that it belongs to, if each replica has its own array.
        num_replicas: number of replicas with their own arrays; if `replica` is None, the first dim counts
            them. None means that all replicas share it.

    >>> ArrayOrigin(rows=(4, 5), num_rows=6).whole((2, 8)), ArrayOrigin(num_replicas=4).whole((4, 6, 8))
    ((6, 8), (6, 8))
    """

    rows: tuple[int, ...] | None = None
    num_rows: int | None = None
    replica: int | None = None
    num_replicas: int | None = None

    @property
    def counts_replicas(self) -> bool:
        """Whether the first dim of the stored array counts replicas."""
        return self.num_replicas is not None and self.replica is None

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in one replica of the whole model, for an array stored in this shape."""
        shape = tuple(shape)[1:] if self.counts_replicas else tuple(shape)
        return shape if self.num_rows is None else (self.num_rows, *shape[1:])


COMMON = ArrayOrigin()


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the state.

    Args:
        shape: its global shape, as it is stored.
        dtype: the name of its dtype.
        origin: its blocks and its replica.
    """

    shape: tuple[int, ...]
    dtype: str
    origin: ArrayOrigin = COMMON

    def __str__(self) -> str:
        return f"{self.dtype} {self.origin.whole(self.shape)}"

    @property
    def num_bytes(self) -> int:
        """The size of the stored array in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a finished checkpoint.

    Args:
        step: the training step it was saved after.
        orbax_version: the version of the Orbax that wrote the arrays.
        files: path in the step's folder -> size and checksum.
        leaves: path in the state -> shape, dtype and origin.
        extra: the extra data that the caller saved.
        part: the part of the step; the other parts have their own manifests.
        saved_seconds: time of the save in seconds since 1970.
        save_id: an identifier that all parts of one save share.
    """

    step: int
    orbax_version: str
    files: Mapping[str, File]
    leaves: Mapping[str, Leaf]
    extra: dict[str, Any]
    part: WriterPart = WHOLE
    saved_seconds: float = 0.0
    save_id: str = ""


def parse_manifest(body: Mapping[str, Any]) -> Manifest:
    """Parse the JSON of a manifest; earlier manifests call the origin of an array `lie`.

    Args:
        body: the parsed JSON, see `system.untrusted_files.parse_json`.

    Raises:
        ValueError: an entry is missing, of another type, or out of its range.
    """
    if missing := [
        name for name in ("step", "orbax_version", "files", "leaves", "extra") if name not in body
    ]:
        raise ValueError(f"it has no {', '.join(missing)}")
    files = check_kind(body["files"], dict, "files")
    leaves = check_kind(body["leaves"], dict, "leaves")
    manifest = Manifest(
        step=check_whole_number(body["step"], "step", MOST_STEP),
        orbax_version=check_kind(body["orbax_version"], str, "orbax_version"),
        files={name: _file(name, file) for name, file in files.items()},
        leaves={path: _leaf(path, leaf) for path, leaf in leaves.items()},
        extra=_extra(body["extra"]),
        part=_part(body.get("part", [0, 1])),
        saved_seconds=finite_number(body.get("saved_seconds", 0.0), "saved_seconds", MOST_SECONDS),
        save_id=check_kind(body.get("save_id", ""), str, "save_id"),
    )
    if problem := find_size_problem(manifest):
        raise ValueError(problem)
    return manifest


def find_size_problem(manifest: Manifest) -> str:
    """Return the problem of arrays that declare more bytes than their files can hold; "" if there is none."""
    declared = sum(leaf.num_bytes for leaf in manifest.leaves.values())
    there = sum(file.num_bytes for file in manifest.files.values())
    if declared <= there * COMPRESSION + SMALL_BYTES:
        return ""
    return f"its arrays declare {declared:,} bytes, and its files have {there:,}"


def _file(name: str, entry: Any) -> File:
    if problem := name_problem(name):
        raise ValueError(f"the name of the file {short(name)} {problem}")
    entry = check_kind(entry, dict, name)
    if set(entry) != {"num_bytes", "crc32"}:
        raise ValueError(
            f"{short(name)} has the entries {short(sorted(entry))}; they are num_bytes and crc32"
        )
    return File(
        num_bytes=check_whole_number(entry["num_bytes"], f"num_bytes of {name}", MOST_SIZE),
        crc32=check_whole_number(entry["crc32"], f"crc32 of {name}", (1 << 32) - 1),
    )


def _leaf(path: str, entry: Any) -> Leaf:
    what = path[:200]
    entry = check_kind(entry, dict, what)
    shape = check_kind(entry.get("shape"), list, f"the shape of {what}")
    if len(shape) > MOST_DIMS:
        raise ValueError(f"{what} has {len(shape)} dims; at most {MOST_DIMS} are read")
    if entry.get("dtype") not in tuple(DTYPE_BYTES):
        raise ValueError(f"the dtype of {what} is {short(entry.get('dtype'))}, which no array of a state has")
    shape = tuple(check_whole_number(size, f"a size of {what}", MOST_SIZE, 1) for size in shape)
    return Leaf(
        shape=shape,
        dtype=entry["dtype"],
        origin=_origin(what, shape, entry.get("origin", entry.get("lie", {}))),
    )


def _origin(what: str, shape: tuple[int, ...], entry: Any) -> ArrayOrigin:
    entry = check_kind(entry, dict, f"the origin of {what}")
    if unknown := set(entry) - {"rows", "num_rows", "replica", "num_replicas"}:
        raise ValueError(f"the origin of {what} has unknown keys {short(sorted(unknown))}")
    ranges = {"num_rows": MOST_BLOCKS, "replica": MOST_PARTS, "num_replicas": MOST_PARTS}
    numbers = {name: entry.get(name) for name in ranges}
    for name, value in numbers.items():
        if value is not None:
            check_whole_number(value, f"{name} of {what}", ranges[name], 0 if name == "replica" else 1)
    rows = entry.get("rows")
    if rows is not None:
        rows = tuple(
            check_whole_number(row, f"a row of {what}", (numbers["num_rows"] or 0) - 1, -1)
            for row in check_kind(rows, list, f"rows of {what}")
        )
    origin = ArrayOrigin(rows=rows, **numbers)
    if origin.replica is not None and origin.replica >= (origin.num_replicas or 0):
        raise ValueError(f"{what} is of replica {origin.replica} of {origin.num_replicas}")
    sizes = shape[1:] if origin.counts_replicas else shape
    if origin.counts_replicas and shape[:1] != (origin.num_replicas,):
        raise ValueError(f"{what} counts {origin.num_replicas} replicas and has shape {shape}")
    if (rows is not None and sizes[:1] != (len(rows),)) or (origin.num_rows is not None and not sizes):
        raise ValueError(f"{what} has rows that do not fit its shape {shape}")
    return origin


def _part(entry: Any) -> WriterPart:
    if type(entry) is not list or len(entry) != 2:
        raise ValueError(f"part is {short(entry)}; it is an index and a count")
    count = check_whole_number(entry[1], "the number of parts", MOST_PARTS, 1)
    return WriterPart(check_whole_number(entry[0], "the index of the part", count - 1), count)


def _extra(entry: Any) -> dict[str, Any]:
    extra = check_kind(entry, dict, "extra")
    for name in ("run", "position", "imported", "tokens"):
        if extra.get(name) is not None:
            check_kind(extra[name], dict, f"extra/{name}")
    return extra
