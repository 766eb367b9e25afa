"""Random streams of a chain: no two of its parts may draw from the same one.

A call of the model counts the draws of a stream through all of its parts; a stage computes one part and
counts from 0. A stream that two parts share would give other numbers in a pipeline than on one device.

Next: `nnx_model.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from shardtrain.functional.model import BLOCKS

Path = tuple[Any, ...]


class ChainStreams:
    """Which part of a chain draws from which stream, as traces find it out."""

    def __init__(self) -> None:
        self._part_of: dict[Path, str] = {}

    def watch(
        self, part: str, module: nnx.Module, call: Callable[[], Any], blocks: range | None = None
    ) -> Any:
        """Call a part of a chain and return what it returns.

        Args:
          part: its name in a message.
          module: the module of which it is a part.
          call: the part.
          blocks: it computes these blocks of an nnx.List alone and may draw from their streams; None: all.

        Raises:
          ValueError: it draws from a stream from which another part, or another stage, draws.
        """
        before = _counts(module)
        result = call()
        for path, count in _counts(module).items():
            if count is before.get(path):
                continue
            if blocks is not None and path[0] == BLOCKS and path[1] in blocks:
                continue
            other = self._part_of.setdefault(path, part)
            if other != part or blocks is not None:
                raise ValueError(
                    "in a pipeline each stage counts the draws of a random stream from 0, and"
                    f" {'/'.join(map(str, path[:-1]))} is drawn from in {other} and in"
                    f" {f'{part} of other blocks' if other == part else part}: their masks would differ from"
                    " those of one device; give each its own stream in the constructor, as in"
                    " nnx.Dropout(0.1, rngs=rngs) or self.rngs = rngs.fork()"
                )
        return result


def _counts(module: nnx.Module) -> dict[Path, jax.Array]:
    """Return the number of draws so far of each stream of a module, by the path of its count."""
    counts = nnx.to_flat_state(nnx.state(module, nnx.RngCount))
    return {path: count.get_value() for path, count in counts}
