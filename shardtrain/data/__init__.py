"""Data: text or tokens -> windows -> batches in a fixed order -> arrays on the mesh.

`corpus.py`, `chat.py` and `image_files.py` (formats of `sources/`), `mixture.py` and `windows.py` make
sources of samples, `batches.py` and `token_batches.py` load them in the order of `order.py`, `row_split.py`
splits rows over processes and pads them, `loader.py` and `placement.py` (jax) put a process's rows on the
mesh. Names load at first use: a config needs no jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtrain.data.augmentation import Augment as Augment
    from shardtrain.data.batches import Batches as Batches
    from shardtrain.data.batches import Loading as Loading
    from shardtrain.data.batches import Position as Position
    from shardtrain.data.chat import Chat as Chat
    from shardtrain.data.corpus import Corpus as Corpus
    from shardtrain.data.image_files import ImageFiles as ImageFiles
    from shardtrain.data.loader import BatchShard as BatchShard
    from shardtrain.data.loader import Loader as Loader
    from shardtrain.data.loader import batch_shard as batch_shard
    from shardtrain.data.masked import MaskedTokens as MaskedTokens
    from shardtrain.data.mixture import Mixture as Mixture
    from shardtrain.data.placement import place as place
    from shardtrain.data.placement import process_rows as process_rows
    from shardtrain.data.row_split import RowSplit as RowSplit
    from shardtrain.data.row_split import split_over_islands as split_over_islands
    from shardtrain.data.samples import Batch as Batch
    from shardtrain.data.samples import Source as Source
    from shardtrain.data.stream import Stream as Stream
    from shardtrain.data.text import Text as Text
    from shardtrain.data.token_batches import SizedSource as SizedSource
    from shardtrain.data.token_batches import TokenBatches as TokenBatches
    from shardtrain.data.token_pairs import TokenPairs as TokenPairs
    from shardtrain.data.tokens import open_tokens as open_tokens
    from shardtrain.data.tokens import write_tokens as write_tokens
    from shardtrain.data.windows import Tokens as Tokens
    from shardtrain.data.windows import Windows as Windows

_FILES = {
    "augmentation": ("Augment",),
    "batches": ("Batches", "Loading", "Position"),
    "chat": ("Chat",),
    "corpus": ("Corpus",),
    "image_files": ("ImageFiles",),
    "masked": ("MaskedTokens",),
    "mixture": ("Mixture",),
    "loader": ("BatchShard", "Loader", "batch_shard"),
    "placement": ("place", "process_rows"),
    "row_split": ("RowSplit", "split_over_islands"),
    "samples": ("Batch", "Source"),
    "stream": ("Stream",),
    "text": ("Text",),
    "token_batches": ("SizedSource", "TokenBatches"),
    "token_pairs": ("TokenPairs",),
    "tokens": ("open_tokens", "write_tokens"),
    "windows": ("Tokens", "Windows"),
}
"""File -> its public names, which load at first use."""

__all__ = sorted(name for names in _FILES.values() for name in names)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(importlib.import_module(f"shardtrain.data.{file}"), name)
    raise AttributeError(f"module 'shardtrain.data' has no attribute {name!r}")
