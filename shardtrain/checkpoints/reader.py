"""The boundary to TensorStore: read any slice of any array out of the parts of a saved step.

Orbax writes them (`checkpointer.py`), as Zarr arrays that TensorStore reads in slices: so every process reads
what it needs, whichever blocks and replicas were saved together. Needs no jax.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from shardtrain.checkpoints.manifest import problems, read_manifest
from shardtrain.checkpoints.manifest_entries import (
    COMMON,
    COMPRESSION,
    SMALL_BYTES,
    ArrayOrigin,
    Leaf,
    Manifest,
)
from shardtrain.checkpoints.paths import ARRAYS, finished
from shardtrain.system.untrusted_files import num_bytes_in, some, special_files

Index = tuple[Any, ...]

_CACHE_BYTES = 1 << 24
"""What was read last, for slices that begin in the same chunk."""


@dataclass(frozen=True)
class StoredArray:
    """An array in one part of a step."""

    folder: Path
    leaf: Leaf


@dataclass(frozen=True)
class Reading:
    """An array, or a slice of one, on its way from the disk.

    Args:
        array: what is being filled, in place.
        under_way: what is still to arrive.
    """

    array: np.ndarray
    under_way: Sequence[Any]

    def result(self) -> np.ndarray:
        """Wait for it."""
        for future in self.under_way:
            future.result()
        return self.array


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointReader:
    """A finished step.

    Args:
        step: after which it was saved.
        folders: the parts that can be seen from here.
        num_parts: how many there are.
        save_id: what its parts have in common; "" where there is one.
    """

    step: int
    folders: Mapping[int, Path]
    num_parts: int
    save_id: str = ""

    @property
    def missing(self) -> list[int]:
        """Parts that cannot be seen from here."""
        return [part for part in range(self.num_parts) if part not in self.folders]

    def broken(self, parts: Sequence[int] | None = None) -> dict[str, list[str]]:
        """Folders whose files are not what was saved: name -> everything in which they differ.

        Args:
            parts: which to look at; by default all that can be seen.

        Raises:
            ValueError: one is of a later version of shardtrain.
        """
        chosen = sorted(self.folders) if parts is None else parts
        found = {self.folders[part].name: problems(self.folders[part]) for part in chosen}
        return {name: wrong for name, wrong in found.items() if wrong}

    def problems(self) -> list[str]:
        """What `broken` finds, and parts that cannot be seen, a line each."""
        lines = [f"{name}: {problem}" for name, wrong in self.broken().items() for problem in wrong]
        missing = [f"part {some(self.missing)} of {self.num_parts} cannot be seen"] if self.missing else []
        return lines + missing

    @cached_property
    def manifests(self) -> dict[int, Manifest]:
        """Of the parts that can be seen.

        Raises:
            ValueError: one cannot be read.
        """
        found = {}
        for part, folder in sorted(self.folders.items()):
            manifest, reason = read_manifest(folder)
            if manifest is None:
                raise ValueError(f"{folder}: {reason}; run `shardtrain checkpoint verify` on the run folder")
            found[part] = manifest
        return found

    @property
    def extra(self) -> dict[str, Any]:
        """What was saved beside the state: the run's description, the position in the data."""
        return next(iter(self.manifests.values())).extra

    @property
    def num_bytes(self) -> int:
        """Of all files that can be seen."""
        return sum(file.num_bytes for each in self.manifests.values() for file in each.files.values())

    @cached_property
    def stored_arrays(self) -> dict[str, list[StoredArray]]:
        """Path -> the pieces of that array."""
        found: dict[str, list[StoredArray]] = {}
        for part, manifest in self.manifests.items():
            for path, leaf in manifest.leaves.items():
                found.setdefault(path, []).append(StoredArray(self.folders[part], leaf))
        return found

    def leaf(self, path: str, origin: ArrayOrigin = COMMON) -> Leaf:
        """An array as one replica of the whole model has it: that replica whose piece `origin` asks for."""
        pieces = self.stored_arrays[path]
        replica = (origin.replica or 0) % (pieces[0].leaf.origin.num_replicas or 1)
        mine = next((p.leaf for p in pieces if p.leaf.origin.replica == replica), pieces[0].leaf)
        return Leaf(shape=mine.origin.whole(mine.shape), dtype=mine.dtype)

    @property
    def leaves(self) -> dict[str, Leaf]:
        """Path -> array, as the first replica of the whole model has it, in the model's own order."""
        return {path: self.leaf(path) for path in self.stored_arrays}

    def read(self, path: str) -> np.ndarray:
        """One array whole, in the model's own order; the first replica's where each has its own.

        Args:
            path: such as `params/embedding/table`.

        Raises:
            KeyError: there is no such array.
            ValueError: a part that it needs cannot be seen; or it declares more bytes than are there.
        """
        leaf = self.leaves[path]
        saved_bytes = sum(piece.leaf.num_bytes for piece in self.stored_arrays[path])
        if leaf.num_bytes > saved_bytes:
            raise ValueError(f"{path} of step {self.step}: {_too_large(leaf.num_bytes, saved_bytes)}")
        return self.start(path, leaf).result()

    def start(self, path: str, wanted: Leaf, index: Index | None = None) -> Reading:
        """Begin to read a slice of an array, which may be of other blocks and replicas than were saved.

        Where replicas have arrays of their own, replica r gets that of replica r % n of those n that were
        saved. Rows of padding become zeros.

        Args:
            path: of the array.
            wanted: its shape, dtype and origin.
            index: a slice of `wanted.shape`; by default all of it.

        Raises:
            ValueError: a part that it needs cannot be seen.
        """
        given = index or tuple(slice(None) for _ in wanted.shape)
        index = tuple(slice(*i.indices(n)[:2]) for i, n in zip(given, wanted.shape, strict=True))
        shape = tuple(i.stop - i.start for i in index)
        pieces, origin = self.stored_arrays[path], wanted.origin
        num_saved = pieces[0].leaf.origin.num_replicas or 1
        array = np.empty(shape, self._open(pieces[0], path).dtype.numpy_dtype)
        goal = tensorstore.array(array, write=True)
        under_way = []
        replicas = range(index[0].start, index[0].stop) if origin.counts_replicas else [origin.replica or 0]
        rest = index[1:] if origin.counts_replicas else index
        for i, replica in enumerate(replicas):
            place = (i,) if origin.counts_replicas else ()
            for where, piece, what in self._rows(path, origin, rest, replica % num_saved, array):
                source = self._open(piece, path)
                # chunk by chunk into its place: nothing is put together elsewhere first
                under_way.append(goal[(*place, *where)].write(source[what]))
        return Reading(array, under_way)

    def _rows(
        self, path: str, origin: ArrayOrigin, index: Index, replica: int, array: np.ndarray
    ) -> Iterator[tuple[Index, StoredArray, Any]]:
        """(where in the array, from which piece, what of it), in as few slices as there can be."""
        mine = [p for p in self.stored_arrays[path] if p.leaf.origin.replica in (None, replica)]
        if not mine:
            raise ValueError(self._missing_text(path, f"replica {replica}"))
        lead = (replica,) if mine[0].leaf.origin.counts_replicas else ()
        if origin.rows is None and mine[0].leaf.origin.rows is None:
            yield (...,), mine[0], (*lead, *index)
            return
        places = {row: (piece, i) for piece in reversed(mine) for i, row in enumerate(_rows_of(piece.leaf))}
        rows = range(origin.num_rows or len(places)) if origin.rows is None else origin.rows
        chosen = list(rows[index[0]])
        if lost := [row for row in chosen if row >= 0 and row not in places]:
            raise ValueError(self._missing_text(path, f"blocks {lost}"))
        offset = int(origin.counts_replicas)
        for start, stop in _runs([places.get(row) for row in chosen]):
            where = (slice(start, stop),)
            if chosen[start] < 0:
                array[(slice(None),) * offset + where] = np.zeros((), array.dtype)
                continue
            piece, first = places[chosen[start]]
            yield (*where, ...), piece, (*lead, slice(first, first + stop - start), *index[1:])

    def _missing_text(self, path: str, what: str) -> str:
        return (
            f"{path}, {what}, of step {self.step} cannot be seen from here: of {self.num_parts} parts"
            f" [{some(self.missing)}] are missing; use a run folder that all hosts share"
        )

    @cached_property
    def _stores(self) -> dict[tuple[Path, str], Any]:
        return {}

    @cached_property
    def _context(self) -> Any:
        """Of all arrays: what lies where in the files, and a chunk of several slices, are read once."""
        return tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})

    def _open(self, piece: StoredArray, path: str) -> Any:
        key = (piece.folder, path)
        if key not in self._stores:
            there_bytes = self._there_bytes(piece.folder)
            base = {"driver": "file", "path": f"{piece.folder / ARRAYS}/"}
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
            store = {"driver": "zarr", "kvstore": kvstore}
            found = tensorstore.open(store, open=True, context=self._context).result()
            if problem := _store_problem(found, piece.leaf, there_bytes):
                raise ValueError(f"{path} in {piece.folder}: {problem}")
            self._stores[key] = found
        return self._stores[key]

    def _there_bytes(self, folder: Path) -> int:
        """The size of what lies in a part, looked at once, before anything of it is opened.

        Raises:
            ValueError: it holds what would block, or leads elsewhere.
        """
        if folder not in self._sizes:
            if special := special_files(folder):
                raise ValueError(f"{folder} is not read: {some(special)}")
            self._sizes[folder] = num_bytes_in(folder)
        return self._sizes[folder]

    @cached_property
    def _sizes(self) -> dict[Path, int]:
        return {}


def _store_problem(store: Any, leaf: Leaf, there_bytes: int) -> str:
    """In what a stored array is not what the manifest says of it; and what there are too few bytes for."""
    found = (tuple(store.shape), store.dtype.numpy_dtype.name)
    if found != (leaf.shape, leaf.dtype):
        return f"its file has {found[1]} {found[0]}, and the manifest {leaf.dtype} {leaf.shape}"
    # since arrays are saved as they are, each of their bytes is there
    is_compressed = store.spec().to_json()["metadata"].get("compressor") is not None
    most_bytes = there_bytes * COMPRESSION + SMALL_BYTES if is_compressed else there_bytes
    return _too_large(leaf.num_bytes, most_bytes) if leaf.num_bytes > most_bytes else ""


def _too_large(num_bytes: int, most_bytes: int) -> str:
    return f"it declares {num_bytes:,} bytes, and its files can hold {most_bytes:,}; bring back a copy"


def _rows_of(leaf: Leaf) -> Sequence[int]:
    shape = leaf.shape[1:] if leaf.origin.counts_replicas else leaf.shape
    return range(shape[0]) if leaf.origin.rows is None else leaf.origin.rows


def _runs(places: Sequence[tuple[Any, int] | None]) -> Iterator[tuple[int, int]]:
    """Consecutive places of one piece, or of none: (start, stop).

    >>> list(_runs([("a", 1), ("a", 2), ("b", 3), None, None, ("a", 3)]))
    [(0, 2), (2, 3), (3, 5), (5, 6)]
    """

    def key(i: int) -> Any:
        place = places[i]
        return None if place is None else (id(place[0]), place[1] - i)

    for _, run in groupby(range(len(places)), key):
        numbers = list(run)
        yield numbers[0], numbers[-1] + 1


def find_readers(*folders: Path) -> list[CheckpointReader]:
    """All finished steps of a run whose parts are all there, ascending.

    Args:
        folders: of checkpoints: a fast one and the shared one; what is in the first is taken from there.
    """
    return [reader for reader in visible_readers(*folders) if not reader.missing]


def visible_readers(*folders: Path) -> list[CheckpointReader]:
    """All finished steps that can be seen, those with missing parts too; where a step was saved in several
    ways, the newer last.
    """
    seen: dict[tuple[int, int, str], dict[int, Path]] = {}
    for folder in folders:
        for step, parts in finished(folder).items():
            for part, path in parts.items():
                manifest = read_manifest(path)[0] if part.count > 1 else None
                save_id = "" if manifest is None else manifest.save_id
                seen.setdefault((step, part.count, save_id), {}).setdefault(part.index, path)
    found = [
        CheckpointReader(step=step, folders=paths, num_parts=count, save_id=save_id)
        for (step, count, save_id), paths in seen.items()
    ]
    return sorted(found, key=lambda each: (each.step, _saved_seconds(each)))


def _saved_seconds(reader: CheckpointReader) -> float:
    manifest, _ = read_manifest(next(iter(reader.folders.values())))
    return 0.0 if manifest is None else manifest.saved_seconds
