"""Format checkpoints: the list of a folder, the contents of one, the differences between two.

`checkpoints/reader.py` reads them, and `cli/checkpoint.py` prints the text.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.checkpoints.differences import compare_descriptions
from shardtrain.checkpoints.evaluations import BestStep
from shardtrain.checkpoints.manifest import measure_file, read_manifest
from shardtrain.checkpoints.manifest_entries import Leaf, Manifest
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.report.quantities import bytes_text
from shardtrain.report.tables import table_text
from shardtrain.system.excerpts import some

MESH = "strategy.layout.mesh."
CHUNK_ITEMS = 1 << 22


def list_text(readers: list[CheckpointReader], unfinished: list[Path], best: BestStep | None = None) -> str:
    """Format a row per checkpoint: step, time, size, mesh and state; the best one is marked.

    File sizes are compared with the manifest, but not contents (see `shardtrain checkpoint verify`).
    """
    rows = [_list_row(reader, best) for reader in readers]
    rows += [("", path.name, "", "", "", "unfinished: being saved, or interrupted") for path in unfinished]
    return table_text(("step", "saved", "size", "parts", "mesh", "state"), rows)


def show_text(reader: CheckpointReader) -> str:
    """Format one checkpoint: its arrays, the options of its run, and its position in the data."""
    rows = [
        (path, _shape(leaf), leaf.dtype, bytes_text(leaf.num_bytes)) for path, leaf in reader.leaves.items()
    ]
    leaves = reader.leaves.values()
    num_items = sum(math.prod(leaf.shape) for leaf in leaves)
    num_bytes = sum(leaf.num_bytes for leaf in leaves)
    lines = [
        f"step {reader.step}, saved {_format_saved(next(iter(reader.manifests.values())), reader)}",
        table_text(("array", "shape", "dtype", "size"), rows)
        + f"{len(rows)} arrays, {num_items:,} numbers, {bytes_text(num_bytes)}; on the disk"
        f" {bytes_text(reader.num_bytes)} in {_parts(reader)}",
    ]
    extra = dict(reader.extra)
    for name, value in (extra.pop("run", None) or {}).items():
        lines.append(f"  {name} = {value!r}")
    lines += [f"{name}: {value}" for name, value in extra.items()]
    return "\n".join(lines) + "\n"


def diff_text(first: CheckpointReader, second: CheckpointReader) -> str:
    """Format the differences between two checkpoints: arrays, shapes, values, options of the run."""
    a, b = first.leaves, second.leaves
    lines = [f"{path}: only in the first, {a[path]}" for path in a if path not in b]
    lines += [f"{path}: only in the second, {b[path]}" for path in b if path not in a]
    lines += [f"{path}: {a[path]} -> {b[path]}" for path in a if path in b and not _alike(a[path], b[path])]
    lines += [
        f"run: {line}" for line in compare_descriptions(*(x.extra.get("run") or {} for x in (first, second)))
    ]
    both = [path for path in a if path in b and _alike(a[path], b[path])]
    changes = [(path, *compare_arrays(first.read(path), second.read(path))) for path in both]
    rows = [
        (path, f"{largest:.3g}", f"{relative:.3g}", *(f"{norm:.6g}" for norm in norms))
        for path, largest, relative, *norms in changes
        if largest != 0
    ]
    same = len(both) - len(rows)
    header = ("array", "largest change", "relative", "norm before", "norm after")
    text = "".join(f"{line}\n" for line in lines) + (table_text(header, rows) if rows else "")
    return (
        f"step {first.step} -> step {second.step}\n{text}{same} of {len(both)} common arrays are the same\n"
    )


def compare_arrays(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float, float]:
    """Compare two arrays of one shape; NaN in the same places is no difference.

    Returns:
      The largest absolute difference, the norm of the difference over that of the first, and both norms.

    >>> compare_arrays(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    (0.5, 0.1, 5.0, 5.408326913195984)
    """
    largest, sums = 0.0, np.zeros(3)
    for a, b in _chunks(first, second):
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, a - b)
        if difference.size:
            found = np.abs(difference).max()
            largest = found if math.isnan(found) else max(largest, float(found))
        sums += [np.square(difference).sum(), np.square(a).sum(), np.square(b).sum()]
    difference_norm, *norms = (float(norm) for norm in np.sqrt(sums))
    relative = difference_norm / norms[0] if norms[0] else (0.0 if difference_norm == 0 else math.inf)
    return largest, relative, norms[0], norms[1]


def _chunks(first: np.ndarray, second: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield both arrays as float64 in chunks, as they may fill half of the memory."""
    a, b = first.reshape(-1), second.reshape(-1)
    for start in range(0, max(1, a.size), CHUNK_ITEMS):
        chunk = slice(start, start + CHUNK_ITEMS)
        yield a[chunk].astype(np.float64), b[chunk].astype(np.float64)


def _list_row(reader: CheckpointReader, best: BestStep | None) -> tuple[Any, ...]:
    read = {part: read_manifest(folder) for part, folder in sorted(reader.folders.items())}
    manifests = [manifest for manifest, _ in read.values() if manifest is not None]
    problems = [reason for _, reason in read.values() if reason]
    problems += [
        f"its manifest is that of step {manifest.step}{manifest.part}"
        for part, (manifest, _) in read.items()
        if manifest is not None and (manifest.step, manifest.part.index) != (reader.step, part)
    ]
    problems += [
        f"{name} has changed since it was saved"
        for part, (manifest, _) in read.items()
        for name, file in (manifest.files.items() if manifest else ())
        if measure_file(reader.folders[part], name) != file.num_bytes
    ]
    if reader.missing:
        verb = "is" if len(reader.missing) == 1 else "are"
        problems.append(f"part {some(reader.missing)} {verb} missing")
    num_bytes = sum(file.num_bytes for manifest in manifests for file in manifest.files.values())
    mark = f"; best {best.metric} {best.value:.6g}" if best is not None and best.step == reader.step else ""
    return (
        reader.step,
        _format_saved(manifests[0], reader) if manifests else "",
        bytes_text(num_bytes),
        reader.num_parts,
        _mesh((manifests[0].extra.get("run") or {}) if manifests else {}),
        "; ".join(problems or ["finished"]) + mark,
    )


def _format_saved(manifest: Manifest, reader: CheckpointReader) -> str:
    seconds = manifest.saved_seconds or next(iter(reader.folders.values())).stat().st_mtime
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def _mesh(run: Mapping[str, Any]) -> str:
    """Format the mesh of the options of a run, in which -1 is the remaining devices."""
    sizes = {name.removeprefix(MESH): size for name, size in run.items() if name.startswith(MESH)}
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())


def _parts(reader: CheckpointReader) -> str:
    kinds = Counter(len(manifest.files) for manifest in reader.manifests.values())
    files = sum(number * count for number, count in kinds.items())
    return f"{files} files" if reader.num_parts == 1 else f"{reader.num_parts} parts, {files} files"


def _alike(a: Leaf, b: Leaf) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _shape(leaf: Leaf) -> str:
    return " x ".join(map(str, leaf.shape)) or "scalar"
