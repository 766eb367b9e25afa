"""Sharded training of Flax models, from a laptop to unequal hosts joined by MPI.

The names below load at first use: `import shardtrain` itself imports nothing heavy.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardtrain.checkpoint import Checkpoints
    from shardtrain.checkpoint_policy import CheckpointPolicy
    from shardtrain.config import Run, StartFrom, Strategy
    from shardtrain.data import Batches, MaskedTokens, Text, Tokens, place
    from shardtrain.islands.membership import join
    from shardtrain.islands.options import Across
    from shardtrain.islands.verdict import Watch
    from shardtrain.layout import Layout, read_layout
    from shardtrain.linen_model import from_linen
    from shardtrain.loss import (
        classification_loss,
        cross_entropy,
        masked_token_loss,
        next_token_loss,
        translation_loss,
    )
    from shardtrain.mesh import make_mesh
    from shardtrain.model import Model, from_nnx
    from shardtrain.optimizer import Optimizer, Schedule, make_optimizer
    from shardtrain.pipeline.options import Pipeline
    from shardtrain.recipes import Scaling
    from shardtrain.recovery import Recovery
    from shardtrain.replicas import Combine
    from shardtrain.restore import Allow
    from shardtrain.state import init_state, make_placement, restorable_state
    from shardtrain.step import make_evaluate, make_gradients, make_step
    from shardtrain.trained_model import build, load
    from shardtrain.trainer import train

_ROOMS = {
    "checkpoint": ("Checkpoints",),
    "checkpoint_policy": ("CheckpointPolicy",),
    "config": ("Run", "StartFrom", "Strategy"),
    "data": ("Batches", "MaskedTokens", "Text", "Tokens", "place"),
    "islands.membership": ("join",),
    "islands.options": ("Across",),
    "islands.verdict": ("Watch",),
    "layout": ("Layout", "read_layout"),
    "loss": (
        "classification_loss",
        "cross_entropy",
        "masked_token_loss",
        "next_token_loss",
        "translation_loss",
    ),
    "mesh": ("make_mesh",),
    "linen_model": ("from_linen",),
    "model": ("Model", "from_nnx"),
    "optimizer": ("Optimizer", "Schedule", "make_optimizer"),
    "pipeline.options": ("Pipeline",),
    "recipes": ("Scaling",),
    "recovery": ("Recovery",),
    "replicas": ("Combine",),
    "restore": ("Allow",),
    "state": ("init_state", "make_placement", "restorable_state"),
    "step": ("make_evaluate", "make_gradients", "make_step"),
    "trained_model": ("build", "load"),
    "trainer": ("train",),
}

__all__ = [
    "Across",
    "Allow",
    "Batches",
    "CheckpointPolicy",
    "Checkpoints",
    "Combine",
    "Layout",
    "MaskedTokens",
    "Model",
    "Optimizer",
    "Pipeline",
    "Recovery",
    "Run",
    "Scaling",
    "Schedule",
    "StartFrom",
    "Strategy",
    "Text",
    "Tokens",
    "Watch",
    "build",
    "classification_loss",
    "cross_entropy",
    "from_linen",
    "from_nnx",
    "init_state",
    "join",
    "load",
    "make_evaluate",
    "make_gradients",
    "make_mesh",
    "make_optimizer",
    "make_placement",
    "make_step",
    "masked_token_loss",
    "next_token_loss",
    "place",
    "read_layout",
    "restorable_state",
    "train",
    "translation_loss",
]


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(f"shardtrain.{room}"), name)
    raise AttributeError(f"module 'shardtrain' has no attribute {name!r}")
