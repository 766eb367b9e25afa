"""Checkpoints of what is trained alone: frozen parameters are read from where the run started.

A checkpoint names them and holds a digest of the files that have them; where those files are, only the user
says. Next: `resume.py`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardtrain.checkpoints.array_files import Reading, StoredArray
from shardtrain.checkpoints.differences import matches
from shardtrain.checkpoints.manifest_entries import Leaf, Manifest
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.checkpoints.slices import Index
from shardtrain.functional.frozen import ADAPTERS
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import open_regular

BASE = "base"
"""Entry of a checkpoint's extra data: what it leaves out, and the digest of what has that."""
PARAMS = "params/"
BLOCKS, BLOCK_BYTES = 1024, 1 << 12
"""Blocks of each file of a folder of Hugging Face that are part of its digest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReaderWithBase(CheckpointReader):
    """A reader of a checkpoint of what was trained, and of the frozen parameters elsewhere.

    Args:
      own: the reader of the checkpoint.
      base: the reader of what the run started from.
      arrays: paths that are read from there.
    """

    own: CheckpointReader
    base: CheckpointReader
    arrays: frozenset[str]

    @property
    def manifests(self) -> dict[int, Manifest]:
        return self.own.manifests

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes + self.base.num_bytes

    @cached_property
    def stored_arrays(self) -> dict[str, list[StoredArray]]:
        elsewhere = {path: self.base.stored_arrays[path] for path in sorted(self.arrays)}
        return elsewhere | self.own.stored_arrays

    def start(self, path: str, wanted: Leaf, index: Index | None = None) -> Reading:
        reader = self.own if path in self.own.stored_arrays else self.base
        return reader.start(path, wanted, index)


def left_out(
    frozen: frozenset[str], shapes: Mapping[str, tuple[int, ...]], base: CheckpointReader
) -> list[str]:
    """Return the paths of the parameters that a checkpoint need not have.

    Args:
      frozen: paths of the frozen parameters, adapters among them if others are trained.
      shapes: path -> shape of every parameter of the whole model.
      base: the reader of what the run started from.

    Raises:
      ValueError: there are none.
    """
    leaves = base.leaves
    found = [
        path
        for path in sorted(frozen)
        if not matches(path, ADAPTERS)
        and f"{PARAMS}{path}" in leaves
        and tuple(leaves[f"{PARAMS}{path}"].shape) == tuple(shapes[path])
    ]
    if not found:
        raise ValueError(
            "checkpoints.trained_only is True, and no frozen parameter of this run comes from what it started"
            " from; freeze some (--freeze, or --model.lora), or leave it out: --checkpoints.no-trained-only"
        )
    return found


def entry_of(base: CheckpointReader, arrays: list[str], name: Path) -> dict[str, Any]:
    """Return the entry of a checkpoint's extra data."""
    return {"arrays": [PARAMS + path for path in arrays], "digest": digest_of(base), "folder": str(name)}


def with_base(reader: CheckpointReader, base: CheckpointReader | None, change: str) -> CheckpointReader:
    """Return a reader of all parameters of a checkpoint.

    Args:
      reader: the reader of the checkpoint.
      base: the reader of what its run started from; None: not given.
      change: how to give it, for the error.

    Raises:
      ValueError: the checkpoint has only what was trained, and the rest was not given, or is another.
    """
    entry = reader.extra.get(BASE)
    if entry is None:
        return reader
    wanted, arrays, known = (entry.get(name) for name in ("digest", "arrays", "folder"))
    if not (isinstance(arrays, list) and all(isinstance(path, str) for path in arrays)):
        raise ValueError(f"step {reader.step} has no list of the arrays that it leaves out; it is broken")
    if base is None:
        raise ValueError(
            f"step {reader.step} has only what was trained; its other {len(arrays)} parameters are in"
            f" {short(known)}, where the run started: {change}"
        )
    if (found := digest_of(base)) != wanted:
        raise ValueError(
            f"step {reader.step} has only what was trained, beside parameters of digest {short(wanted)},"
            f" and those given have {found!r}; give what the run started from, then {short(known)}: {change}"
        )
    if missing := [path for path in arrays if path not in base.stored_arrays]:
        raise ValueError(f"{missing[0]} of step {reader.step} is not in what was given for it: {change}")
    return ReaderWithBase(
        step=reader.step, folders=reader.folders, num_parts=reader.num_parts, save_id=reader.save_id,
        own=reader, base=base, arrays=frozenset(arrays),
    )  # fmt: skip


def digest_of(reader: CheckpointReader) -> str:
    """Return a digest of the files of a reader.

    Of a checkpoint it is made of the checksums of all its files; of a folder of Hugging Face of the size of
    each file and of blocks at equal distances, which tells models apart in milliseconds, and finds no single
    bit.
    """
    found = hashlib.sha256()
    if reader.manifests:
        for part, manifest in sorted(reader.manifests.items()):
            for name, file in sorted(manifest.files.items()):
                found.update(f"{part} {name} {file.num_bytes} {file.crc32}\n".encode())
        return found.hexdigest()[:32]
    for folder in reader.folders.values():
        for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
            size = path.stat().st_size
            found.update(f"{path.name} {size}\n".encode())
            with open_regular(path) as file:
                for number in range(BLOCKS):
                    file.seek(number * max(BLOCK_BYTES, size // BLOCKS))
                    found.update(file.read(BLOCK_BYTES))
    return found.hexdigest()[:32]
