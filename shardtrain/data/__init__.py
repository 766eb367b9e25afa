"""Data: text or tokens -> windows -> batches in a fixed order -> arrays on the mesh.

`corpus.py`, `chat.py` and `image_files.py` (formats of `sources/`), `mixture.py` and `windows.py` make
sources of samples, `batches.py` and `token_batches.py` load them in the order of `order.py`, `row_split.py`
splits rows over processes and pads them, `loader.py` and `placement.py` (jax) put a process's rows on the
mesh. Names load at first use: a config needs no jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtrain.data.augmentation import Augment
    from shardtrain.data.batches import Batches, Loading, Position
    from shardtrain.data.chat import Chat
    from shardtrain.data.corpus import Corpus
    from shardtrain.data.image_files import ImageFiles
    from shardtrain.data.loader import BatchShard, Loader, batch_shard
    from shardtrain.data.masked import MaskedTokens
    from shardtrain.data.mixture import Mixture
    from shardtrain.data.placement import place, process_rows
    from shardtrain.data.row_split import RowSplit, split_over_islands
    from shardtrain.data.samples import Batch, Source
    from shardtrain.data.stream import Stream
    from shardtrain.data.text import Text
    from shardtrain.data.token_batches import SizedSource, TokenBatches
    from shardtrain.data.token_pairs import TokenPairs
    from shardtrain.data.tokens import open_tokens, write_tokens
    from shardtrain.data.windows import Tokens, Windows

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

__all__ = [
    "Augment",
    "Batch",
    "BatchShard",
    "Batches",
    "Chat",
    "Corpus",
    "ImageFiles",
    "Loader",
    "Loading",
    "MaskedTokens",
    "Mixture",
    "Position",
    "RowSplit",
    "SizedSource",
    "Source",
    "Stream",
    "Text",
    "TokenBatches",
    "TokenPairs",
    "Tokens",
    "Windows",
    "batch_shard",
    "open_tokens",
    "place",
    "process_rows",
    "split_over_islands",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(importlib.import_module(f"shardtrain.data.{file}"), name)
    raise AttributeError(f"module 'shardtrain.data' has no attribute {name!r}")
