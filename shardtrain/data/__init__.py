"""Data: text or tokens -> windows -> batches in a fixed order -> arrays on the mesh.

`text.py`, `tokens.py` and `windows.py` make sources, `batches.py` (Grain) puts a source in order,
`placement.py` (jax) puts a batch on the mesh. Names load at first use: a config needs neither.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtrain.data.batches import Batch, Batches, Position, Source
    from shardtrain.data.masked import MaskedTokens
    from shardtrain.data.placement import batch_problem, place, process_rows
    from shardtrain.data.text import Text
    from shardtrain.data.tokens import open_tokens, write_tokens
    from shardtrain.data.windows import Tokens, Windows

_FILES = {
    "batches": ("Batch", "Batches", "Position", "Source"),
    "masked": ("MaskedTokens",),
    "placement": ("batch_problem", "place", "process_rows"),
    "text": ("Text",),
    "tokens": ("open_tokens", "write_tokens"),
    "windows": ("Tokens", "Windows"),
}

__all__ = [
    "Batch",
    "Batches",
    "MaskedTokens",
    "Position",
    "Source",
    "Text",
    "Tokens",
    "Windows",
    "batch_problem",
    "open_tokens",
    "place",
    "process_rows",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(importlib.import_module(f"shardtrain.data.{file}"), name)
    raise AttributeError(f"module 'shardtrain.data' has no attribute {name!r}")
