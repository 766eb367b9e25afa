"""Read slices of the stored arrays of a checkpoint; the boundary to TensorStore. No jax.

Orbax writes them as Zarr arrays (`save.py`). Each file is compared with the manifest before it is read. Next:
`reader.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from shardtrain.checkpoints.manifest_entries import COMPRESSION, SMALL_BYTES, Leaf
from shardtrain.checkpoints.paths import ARRAYS
from shardtrain.system.excerpts import some
from shardtrain.system.untrusted_files import num_bytes_in, special_files

_CACHE_BYTES = 1 << 24
"""Cache of chunks, for slices that share a chunk."""


@dataclass(frozen=True)
class StoredArray:
    """An array in one part of a step.

    Args:
        folder: the folder of the part.
        leaf: the array as the manifest describes it.
    """

    folder: Path
    leaf: Leaf


@dataclass(frozen=True)
class PendingRead:
    """A slice of an array that is being read from the disk.

    Args:
        array: receives the slice.
        under_way: the reads that fill it.
    """

    array: np.ndarray
    under_way: Sequence[Any]

    def result(self) -> np.ndarray:
        """Wait until everything is read, and return the array."""
        for future in self.under_way:
            future.result()
        return self.array


class ArrayFiles:
    """The files of stored arrays, each opened once."""

    def __init__(self) -> None:
        self._stores: dict[tuple[Path, str], Any] = {}
        self._num_bytes: dict[Path, int] = {}
        # shared by all arrays, so that indices and chunks are read once
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})

    def dtype(self, stored: StoredArray, path: str) -> np.dtype:
        """Return the dtype of a stored array.

        Args:
            stored: the array.
            path: the path of the array in the state.

        Raises:
            ValueError: the file is not what the manifest describes.
        """
        return self._open(stored, path).dtype.numpy_dtype

    def start(self, stored: StoredArray, path: str, source: Any, array: np.ndarray, target: Any) -> Any:
        """Start to read a slice of a stored array into a slice of an array in memory.

        Args:
            stored: the array.
            path: the path of the array in the state.
            source: index of the slice in the stored array.
            array: the array that receives it.
            target: index of the slice in `array`.

        Returns:
            A future, whose `result()` waits for the slice.

        Raises:
            ValueError: the file is not what the manifest describes.
        """
        # chunks go directly to the target array, without another copy
        goal = tensorstore.array(array, write=True)
        return goal[target].write(self._open(stored, path)[source])

    def _open(self, stored: StoredArray, path: str) -> Any:
        key = (stored.folder, path)
        if key not in self._stores:
            num_bytes = self._num_bytes_in(stored.folder)
            base = {"driver": "file", "path": f"{stored.folder / ARRAYS}/"}
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
            store = {"driver": "zarr", "kvstore": kvstore}
            found = tensorstore.open(store, open=True, context=self._context).result()
            # compare the file with its manifest first: an untrusted file may declare any size
            if problem := _find_problem(found, stored.leaf, num_bytes):
                raise ValueError(f"{path} in {stored.folder}: {problem}")
            self._stores[key] = found
        return self._stores[key]

    def _num_bytes_in(self, folder: Path) -> int:
        """Return the size of all files of a part, looked up once, before any file is opened.

        Raises:
            ValueError: the folder has links, or special files that would block.
        """
        if folder not in self._num_bytes:
            if special := special_files(folder):
                raise ValueError(f"{folder} is not read: {some(special)}")
            self._num_bytes[folder] = num_bytes_in(folder)
        return self._num_bytes[folder]


def _find_problem(store: Any, leaf: Leaf, num_bytes: int) -> str:
    """Return how a stored array differs from its manifest, or exceeds the size of its files."""
    found = (tuple(store.shape), store.dtype.numpy_dtype.name)
    if found != (leaf.shape, leaf.dtype):
        return f"its file has {found[1]} {found[0]}, and the manifest {leaf.dtype} {leaf.shape}"
    # arrays are not compressed any more, so that the files have all their bytes
    is_compressed = store.spec().to_json()["metadata"].get("compressor") is not None
    most_bytes = num_bytes * COMPRESSION + SMALL_BYTES if is_compressed else num_bytes
    return too_large_text(leaf.num_bytes, most_bytes) if leaf.num_bytes > most_bytes else ""


def too_large_text(num_bytes: int, most_bytes: int) -> str:
    """Format the problem of an array that declares more bytes than its files can hold."""
    return f"it declares {num_bytes:,} bytes, and its files can hold {most_bytes:,}; bring back a copy"
