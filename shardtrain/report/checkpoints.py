"""Checkpoints as tables for people: what a folder has, what one holds, in what two differ.

What lies in a checkpoint is told by `checkpoints/reader.py`; who asks is `cli/checkpoint.py`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.checkpoints.manifest import Leaf, Manifest, read_manifest, size_of
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.report.quantities import bytes_text
from shardtrain.report.tables import table_text
from shardtrain.system.untrusted_files import some

MESH = "strategy.layout.mesh."
CHUNK_ITEMS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Change:
    """In what the values of an array differ.

    Args:
      path: of the array.
      max_abs: the largest difference.
      relative: the norm of the difference over that of the first.
      norms: of the first and of the second.
    """

    path: str
    max_abs: float
    relative: float
    norms: tuple[float, float]


def list_text(readers: list[CheckpointReader], unfinished: list[Path]) -> str:
    """A line for each step: when it was saved, its size, the mesh, and what is wrong at a first look.

    Sizes of files are compared with the manifest, their contents are not (`shardtrain checkpoint verify`).
    """
    rows = [_list_row(archive) for archive in readers]
    rows += [("", path.name, "", "", "", "unfinished: being saved, or interrupted") for path in unfinished]
    return table_text(("step", "saved", "size", "parts", "mesh", "state"), rows)


def show_text(archive: CheckpointReader) -> str:
    """One step: every array, the run that saved it, and how far it had read."""
    rows = [
        (path, _shape(leaf), leaf.dtype, bytes_text(leaf.num_bytes)) for path, leaf in archive.leaves.items()
    ]
    leaves = archive.leaves.values()
    num_items = sum(math.prod(leaf.shape) for leaf in leaves)
    num_bytes = sum(leaf.num_bytes for leaf in leaves)
    lines = [
        f"step {archive.step}, saved {_saved(next(iter(archive.manifests.values())), archive)}",
        table_text(("array", "shape", "dtype", "size"), rows)
        + f"{len(rows)} arrays, {num_items:,} numbers, {bytes_text(num_bytes)}; on the disk"
        f" {bytes_text(archive.num_bytes)} in {_parts(archive)}",
    ]
    extra = dict(archive.extra)
    for name, value in (extra.pop("run", None) or {}).items():
        lines.append(f"  {name} = {value!r}")
    lines += [f"{name}: {value}" for name, value in extra.items()]
    return "\n".join(lines) + "\n"


def diff_text(first: CheckpointReader, second: CheckpointReader) -> str:
    """In what two steps differ: arrays that one lacks or has in another shape, values, options of the run."""
    a, b = first.leaves, second.leaves
    lines = [f"{path}: only in the first, {a[path]}" for path in a if path not in b]
    lines += [f"{path}: only in the second, {b[path]}" for path in b if path not in a]
    lines += [f"{path}: {a[path]} -> {b[path]}" for path in a if path in b and not _alike(a[path], b[path])]
    lines += [f"run: {line}" for line in _run_changes(first.extra, second.extra)]
    both = [path for path in a if path in b and _alike(a[path], b[path])]
    changes = [change(path, first.read(path), second.read(path)) for path in both]
    rows = [
        (each.path, f"{each.max_abs:.3g}", f"{each.relative:.3g}", *(f"{norm:.6g}" for norm in each.norms))
        for each in changes
        if each.max_abs != 0
    ]
    same = len(both) - len(rows)
    header = ("array", "largest change", "relative", "norm before", "norm after")
    text = "".join(f"{line}\n" for line in lines) + (table_text(header, rows) if rows else "")
    return (
        f"step {first.step} -> step {second.step}\n{text}{same} of {len(both)} common arrays are the same\n"
    )


def change(path: str, first: np.ndarray, second: np.ndarray) -> Change:
    """How far the values of two arrays of one shape are apart; NaN in the same places is no difference.

    >>> change("w", np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    Change(path='w', max_abs=0.5, relative=0.1, norms=(5.0, 5.408326913195984))
    """
    largest, sums = 0.0, np.zeros(3)
    for a, b in _chunks(first, second):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, a - b)
        if apart.size:
            found = np.abs(apart).max()
            largest = found if math.isnan(found) else max(largest, float(found))
        sums += [np.square(apart).sum(), np.square(a).sum(), np.square(b).sum()]
    apart_norm, *norms = (float(norm) for norm in np.sqrt(sums))
    relative = apart_norm / norms[0] if norms[0] else (0.0 if apart_norm == 0 else math.inf)
    return Change(path=path, max_abs=largest, relative=relative, norms=(norms[0], norms[1]))


def _chunks(first: np.ndarray, second: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both as float64, some at a time: the arrays may fill half of the memory."""
    a, b = first.reshape(-1), second.reshape(-1)
    for start in range(0, max(1, a.size), CHUNK_ITEMS):
        piece = slice(start, start + CHUNK_ITEMS)
        yield a[piece].astype(np.float64), b[piece].astype(np.float64)


def _list_row(archive: CheckpointReader) -> tuple[Any, ...]:
    read = {part: read_manifest(folder) for part, folder in sorted(archive.folders.items())}
    manifests = [manifest for manifest, _ in read.values() if manifest is not None]
    problems = [reason for _, reason in read.values() if reason]
    problems += [
        f"{name} is not as it was saved"
        for part, (manifest, _) in read.items()
        for name in (_other_sizes(archive.folders[part], manifest) if manifest else [])
    ]
    if archive.missing:
        verb = "is" if len(archive.missing) == 1 else "are"
        problems.append(f"part {some(archive.missing)} {verb} missing")
    num_bytes = sum(file.num_bytes for manifest in manifests for file in manifest.files.values())
    return (
        archive.step,
        _saved(manifests[0], archive) if manifests else "",
        bytes_text(num_bytes),
        archive.num_parts,
        _mesh((manifests[0].extra.get("run") or {}) if manifests else {}),
        "; ".join(problems) or "finished",
    )


def _other_sizes(folder: Path, manifest: Manifest) -> list[str]:
    return [name for name, file in manifest.files.items() if size_of(folder, name) != file.num_bytes]


def _saved(manifest: Manifest, archive: CheckpointReader) -> str:
    seconds = manifest.saved_seconds or next(iter(archive.folders.values())).stat().st_mtime
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def _mesh(run: Mapping[str, Any]) -> str:
    """As it was asked for; -1 is what was left."""
    sizes = {name.removeprefix(MESH): size for name, size in run.items() if name.startswith(MESH)}
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())


def _parts(archive: CheckpointReader) -> str:
    kinds = Counter(len(manifest.files) for manifest in archive.manifests.values())
    files = sum(number * count for number, count in kinds.items())
    return f"{files} files" if archive.num_parts == 1 else f"{archive.num_parts} parts, {files} files"


def _alike(a: Leaf, b: Leaf) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _run_changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    a, b = (dict(extra.get("run") or {}) for extra in (first, second))
    missing = "(not there)"
    return [
        f"{name}: {a.get(name, missing)!r} -> {b.get(name, missing)!r}"
        for name in {**a, **b}
        if a.get(name, missing) != b.get(name, missing)
    ]


def _shape(leaf: Leaf) -> str:
    return " x ".join(map(str, leaf.shape)) or "scalar"
