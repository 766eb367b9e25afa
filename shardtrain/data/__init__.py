"""Data: text or tokens -> windows -> batches in a fixed order -> arrays on the mesh.

`corpus.py` and `image_files.py` (formats of `sources/`), `mixture.py` and `windows.py` make sources of
samples, `batches.py` (Grain) and `token_batches.py` put a source in order, `row_split.py` decides who gets
which rows and what is padding, `loader.py` and `placement.py` (jax) put a process's rows on the mesh. Names
load at first use: a config needs neither Grain nor jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtrain.data.batches import Batches, Position
    from shardtrain.data.corpus import Corpus
    from shardtrain.data.image_files import ImageFiles
    from shardtrain.data.loader import BatchShard, Loader, batch_shard
    from shardtrain.data.masked import MaskedTokens
    from shardtrain.data.mixture import Mixture
    from shardtrain.data.placement import place, process_rows
    from shardtrain.data.row_split import RowSplit, split_over_islands
    from shardtrain.data.samples import Batch, Source
    from shardtrain.data.text import Text
    from shardtrain.data.token_batches import SizedSource, TokenBatches
    from shardtrain.data.tokens import open_tokens, write_tokens
    from shardtrain.data.windows import Tokens, Windows

_FILES = {
    "batches": ("Batches", "Position"),
    "corpus": ("Corpus",),
    "image_files": ("ImageFiles",),
    "masked": ("MaskedTokens",),
    "mixture": ("Mixture",),
    "loader": ("BatchShard", "Loader", "batch_shard"),
    "placement": ("place", "process_rows"),
    "row_split": ("RowSplit", "split_over_islands"),
    "samples": ("Batch", "Source"),
    "text": ("Text",),
    "token_batches": ("SizedSource", "TokenBatches"),
    "tokens": ("open_tokens", "write_tokens"),
    "windows": ("Tokens", "Windows"),
}

__all__ = [
    "Batch",
    "BatchShard",
    "Batches",
    "Corpus",
    "ImageFiles",
    "Loader",
    "MaskedTokens",
    "Mixture",
    "Position",
    "RowSplit",
    "SizedSource",
    "Source",
    "Text",
    "TokenBatches",
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
