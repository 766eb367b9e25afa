"""Read any slice of any array from the parts of a finished step. No jax.

Each process reads only what it needs, however blocks and replicas were saved: `slices.py` finds the stored
slices, `array_files.py` reads them. Next: `discover.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.checkpoints.array_files import ArrayFiles, PendingRead, StoredArray, too_large_text
from shardtrain.checkpoints.manifest import problems, read_manifest
from shardtrain.checkpoints.manifest_entries import COMMON, ArrayOrigin, Leaf, Manifest
from shardtrain.checkpoints.paths import find_finished_steps
from shardtrain.checkpoints.slices import Index, find_stored_slices
from shardtrain.system.excerpts import some


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointReader:
    """A reader of one finished step.

    Args:
        step: the step after which it was saved.
        folders: part -> its folder, for the parts visible to this process.
        num_parts: number of parts.
        save_id: the identifier that its parts share; "" for a single part.
    """

    step: int
    folders: Mapping[int, Path]
    num_parts: int
    save_id: str = ""

    @property
    def missing(self) -> list[int]:
        """The parts that are not visible to this process."""
        return [part for part in range(self.num_parts) if part not in self.folders]

    def broken(self, parts: Sequence[int] | None = None) -> dict[str, list[str]]:
        """Return the damaged folders: name -> all differences from what was saved.

        Args:
            parts: the parts to verify; by default all visible ones.

        Raises:
            ValueError: a part was written by a later version of shardtrain.
        """
        chosen = sorted(self.folders) if parts is None else parts
        found = {self.folders[part].name: problems(self.folders[part]) for part in chosen}
        return {name: wrong for name, wrong in found.items() if wrong}

    def problems(self) -> list[str]:
        """Return the differences that `broken` finds, and the missing parts, one line each."""
        lines = [f"{name}: {problem}" for name, wrong in self.broken().items() for problem in wrong]
        missing = [f"part {some(self.missing)} of {self.num_parts} cannot be seen"] if self.missing else []
        return lines + missing

    @cached_property
    def manifests(self) -> dict[int, Manifest]:
        """Part -> its manifest, for the visible parts.

        Raises:
            ValueError: a manifest cannot be read.
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
        """The extra data: the description of the run, the position in the data."""
        return next(iter(self.manifests.values())).extra

    @property
    def num_bytes(self) -> int:
        """The size of all files of the visible parts."""
        return sum(file.num_bytes for each in self.manifests.values() for file in each.files.values())

    @cached_property
    def stored_arrays(self) -> dict[str, list[StoredArray]]:
        """Path -> the stored arrays that together make up the array."""
        found: dict[str, list[StoredArray]] = {}
        for part, manifest in self.manifests.items():
            for path, leaf in manifest.leaves.items():
                found.setdefault(path, []).append(StoredArray(self.folders[part], leaf))
        return found

    def leaf(self, path: str, origin: ArrayOrigin = COMMON) -> Leaf:
        """Return shape and dtype of an array in one replica of the whole model.

        Args:
            path: the path of the array.
            origin: the origin with its replica; the first replica by default.
        """
        pieces = self.stored_arrays[path]
        replica = (origin.replica or 0) % (pieces[0].leaf.origin.num_replicas or 1)
        mine = next((p.leaf for p in pieces if p.leaf.origin.replica == replica), pieces[0].leaf)
        return Leaf(shape=mine.origin.whole(mine.shape), dtype=mine.dtype)

    @property
    def leaves(self) -> dict[str, Leaf]:
        """Path -> shape and dtype of each array in the first replica of the whole model."""
        return {path: self.leaf(path) for path in self.stored_arrays}

    def read(self, path: str, numbers: tuple[int, ...] = ()) -> np.ndarray:
        """Read an array of the whole model with its blocks in order; the first replica's if replicas differ.

        Args:
            path: the path, such as `params/embedding/table`.
            numbers: indices of the first dims, to read only what is there.

        Raises:
            KeyError: there is no such array.
            ValueError: a necessary part is missing; or the array declares more bytes than its files have.
        """
        leaf = self.leaves[path]
        saved_bytes = sum(piece.leaf.num_bytes for piece in self.stored_arrays[path])
        if leaf.num_bytes > saved_bytes:
            raise ValueError(f"{path} of step {self.step}: {too_large_text(leaf.num_bytes, saved_bytes)}")
        index = tuple(slice(n, n + 1) for n in numbers) + tuple(slice(n) for n in leaf.shape[len(numbers) :])
        found = self.start(path, leaf, index).result()
        return found[(0,) * len(numbers)] if numbers else found

    def start(self, path: str, wanted: Leaf, index: Index | None = None) -> PendingRead:
        """Start to read a slice of an array, in any layout of blocks and replicas.

        If replicas have their own arrays, replica r gets the array of saved replica r % n. Rows of padding
        become zeros.

        Args:
            path: the path of the array.
            wanted: its shape, dtype and origin.
            index: a slice of `wanted.shape`; by default all of it.

        Raises:
            ValueError: a necessary part is missing.
        """
        # make every slice explicit, so that its shape is known before anything is read
        given = index or tuple(slice(None) for _ in wanted.shape)
        index = tuple(slice(*i.indices(n)[:2]) for i, n in zip(given, wanted.shape, strict=True))
        shape = tuple(i.stop - i.start for i in index)
        # find where each slice is stored, and start to read it into its place in one new array
        pieces, origin = self.stored_arrays[path], wanted.origin
        count = pieces[0].leaf.origin.num_replicas or 1
        files = self._files
        array = np.empty(shape, files.dtype(pieces[0], path))
        under_way = []
        # if the first dim counts replicas, read one replica after the other
        replicas = range(index[0].start, index[0].stop) if origin.counts_replicas else [origin.replica or 0]
        rest = index[1:] if origin.counts_replicas else index
        for i, replica in enumerate(replicas):
            lead = (i,) if origin.counts_replicas else ()
            unseen = partial(self._unseen, path)
            for target, piece, source in find_stored_slices(pieces, origin, rest, replica % count, unseen):
                # rows of padding are not stored
                if piece is None:
                    array[(*lead, *target)] = np.zeros((), array.dtype)
                else:
                    under_way.append(files.start(piece, path, source, array, (*lead, *target)))
        return PendingRead(array, under_way)

    def _unseen(self, path: str, what: str) -> ValueError:
        return ValueError(
            f"{path}, {what}, of step {self.step} is not visible to this process: of {self.num_parts}"
            f" parts [{some(self.missing)}] are missing; use a run folder that all hosts share"
        )

    @cached_property
    def _files(self) -> ArrayFiles:
        return ArrayFiles()


def find_readers(*folders: Path) -> list[CheckpointReader]:
    """Return readers of all finished steps of a run that have all parts, in order of step.

    Args:
        folders: folders of checkpoints, the fastest first; the first that has a part is used.
    """
    return [reader for reader in visible_readers(*folders) if not reader.missing]


def visible_readers(*folders: Path) -> list[CheckpointReader]:
    """Return readers of all visible finished steps, by step and then by time; parts may be missing."""
    seen: dict[tuple[int, int, str], dict[int, Path]] = {}
    for folder in folders:
        for step, parts in find_finished_steps(folder).items():
            for part, path in parts.items():
                # parts of one step may be from different saves: only those with the same id belong together
                manifest = read_manifest(path)[0] if part.count > 1 else None
                save_id = "" if manifest is None else manifest.save_id
                seen.setdefault((step, part.count, save_id), {}).setdefault(part.index, path)
    found = [
        CheckpointReader(step=step, folders=paths, num_parts=count, save_id=save_id)
        for (step, count, save_id), paths in seen.items()
    ]
    return sorted(found, key=lambda each: (each.step, _read_saved_seconds(each)))


def _read_saved_seconds(reader: CheckpointReader) -> float:
    manifest, _ = read_manifest(next(iter(reader.folders.values())))
    return 0.0 if manifest is None else manifest.saved_seconds
