"""How many rows of a batch each island, device and microbatch gets, and which of them are padding (no jax).

All padding is decided here: of an island whose rows do not divide, and of a short last batch.
Next: `loader.py` and `placement.py`, which make arrays on the mesh of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardtrain.errors.messages import near
from shardtrain.sharding import shares


@dataclass(frozen=True)
class RowSplit:
    """The split of a batch's rows over microbatches, and of each microbatch over mesh axes.

    Row r of B is in microbatch r // (B / M).

    Args:
      axis_sizes: mesh axis -> size, of the axes that split the rows of a microbatch.
      microbatches: M, parts of the batch that a step handles one after the other.

    >>> RowSplit({"data": 4}, 2).multiple, RowSplit({"data": 4}, 2).pad_rows(9)
    (8, 16)
    """

    axis_sizes: Mapping[str, int]
    microbatches: int = 1

    @classmethod
    def of(
        cls, mesh_sizes: Mapping[str, int], batch_axes: Sequence[str], microbatches: int = 1
    ) -> "RowSplit":
        """Return the split over some axes of a mesh.

        Args:
          mesh_sizes: mesh axis -> size, of the whole mesh.
          batch_axes: the axes that split the rows of a microbatch.
          microbatches: M.

        Raises:
          ValueError: the mesh lacks an axis.
        """
        unknown = [near(axis, mesh_sizes) for axis in batch_axes if axis not in mesh_sizes]
        if unknown:
            raise ValueError(
                f"the batch is to be split over an axis that the mesh does not have: {'; '.join(unknown)}"
            )
        return cls({axis: mesh_sizes[axis] for axis in batch_axes}, microbatches)

    @property
    def multiple(self) -> int:
        """The number that B must be a multiple of."""
        return math.prod(self.axis_sizes.values()) * self.microbatches

    def pad_rows(self, num_rows: int) -> int:
        """Return the least number of rows, above 0, that can be split and holds `num_rows`."""
        return max(-(-num_rows // self.multiple), 1) * self.multiple

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape on the mesh of an array of a batch: (B, ...) -> (M, B / M, ...)."""
        return (self.microbatches, shape[0] // self.microbatches, *shape[1:])

    def check(self, num_rows: int) -> None:
        """Check that a batch of B rows can be split.

        Raises:
          ValueError: it cannot, see `problem`.
        """
        if problem := self.problem(num_rows):
            raise ValueError(problem)

    def problem(self, num_rows: int) -> str | None:
        """Return why a batch of B rows cannot be split, with the sizes that can; None if it can.

        >>> RowSplit({"data": 4}).problem(6)
        "batch 6 cannot be split over axes ('data') of total size 4 and 1 microbatch: 6 % 4 = 2. Use 4 or 8."
        """
        if self.microbatches < 1:
            return f"batch {num_rows} cannot be split into {self.microbatches} microbatches. Use 1 or more."
        rest = num_rows % self.multiple
        if rest == 0 and num_rows > 0:
            return None
        names = ",".join(repr(axis) for axis in self.axis_sizes)
        total = self.multiple // self.microbatches
        parts = f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"
        below = num_rows - rest
        use = f"{below} or {below + self.multiple}" if below > 0 else f"{self.multiple}"
        return (
            f"batch {num_rows} cannot be split over axes ({names}) of total size {total} and {parts}:"
            f" {num_rows} % {self.multiple} = {rest}. Use {use}."
        )


def split_over_islands(
    num_rows: int,
    weights: Sequence[float],
    multiples: Sequence[int],
    limits: Sequence[int] | None = None,
) -> list[int]:
    """Split the rows of a batch over islands, in proportion to their weights.

    Each island gets a multiple of what it can split without padding, if such numbers add up to the batch;
    otherwise any number.

    Args:
      num_rows: B, rows of the whole batch.
      weights: island -> its weight.
      multiples: island -> `RowSplit.multiple` of its mesh.
      limits: island -> the most rows that it may get, a multiple of that; what is above goes to the others.

    Returns:
      island -> its number of rows; they add up to B.

    Raises:
      ValueError: the limits of the islands with a weight add up to less than the batch.

    >>> split_over_islands(32, [3, 2], [8, 8]), split_over_islands(7, [1, 1], [4, 2])
    ([16, 16], [4, 3])
    >>> split_over_islands(32, [3, 1, 1], [1, 1, 1], limits=[12, 32, 32])
    [12, 10, 10]
    """
    full: dict[int, int] = {}
    if limits is not None and sum(most for w, most in zip(weights, limits, strict=True) if w) < num_rows:
        raise ValueError(limits_text(num_rows, weights, limits))
    while True:
        rest, others = num_rows - sum(full.values()), [0 if i in full else w for i, w in enumerate(weights)]
        # shares without padding may not add up to the batch; then an island pads its own
        try:
            found = shares.shares(rest, others, multiples=list(multiples)) if rest else [0] * len(others)
        except ValueError:
            found = shares.shares(rest, others)
        found = [full.get(i, rows) for i, rows in enumerate(found)]
        above = {i: most for i, most in enumerate(limits or ()) if found[i] > most}
        if not above:
            return found
        full |= above


def limits_text(num_rows: int, weights: Sequence[float], limits: Sequence[int]) -> str:
    """Return the error message for a batch that islands cannot hold.

    >>> limits_text(32, [1, 1], [16, 8]).partition(". ")[0]
    'a batch of 32 rows does not fit the islands: they may have at most 16, 8 rows, 24 together'
    """
    most = [limit if weight else 0 for weight, limit in zip(weights, limits, strict=True)]
    return (
        f"a batch of {num_rows} rows does not fit the islands: they may have at most"
        f" {', '.join(map(str, most))} rows, {sum(most)} together. Use a batch of {sum(most)} rows or less,"
        " more islands, or larger limits"
    )


def fill_with_copies(rows: np.ndarray, num_real: int) -> tuple[np.ndarray, np.ndarray]:
    """Replace the rows from `num_real` on, which do not exist, by copies of those that do.

    Args:
      rows: row numbers from 0, int (n,).
      num_real: how many rows exist; where none does, all become row 0.

    Returns:
      (row numbers to load, int (n,); bool (n,), False for a copy: its weight must be 0).

    >>> rows, real = fill_with_copies(np.arange(4), 3)
    >>> rows.tolist(), real.tolist()
    ([0, 1, 2, 0], [True, True, True, False])
    """
    return rows % max(num_real, 1), rows < num_real


@lru_cache(maxsize=64)
def full_weights(num_rows: int) -> np.ndarray:
    """Return the weights of rows of which none is padding: the same array each time, so `place` knows it.

    Returns:
      Ones, float32 (num_rows,), read-only.
    """
    weights = np.ones(num_rows, np.float32)
    weights.flags.writeable = False
    return weights


def weigh(weights: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return the weights with those of padding set to 0; without padding, the array that was given.

    Args:
      weights: (n,) or (n, ...), one weight a row or a token.
      real: bool (n,), False for padding.

    Returns:
      float32, of the shape of `weights`.
    """
    if real.all() and weights.dtype == np.float32:
        return weights
    return np.where(real.reshape(-1, *[1] * (weights.ndim - 1)), weights, 0).astype(np.float32)
