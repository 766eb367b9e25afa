"""Sharded training of Flax models, from a laptop to unequal hosts joined by MPI.

The names below load at first use: `import shardtrain` itself imports nothing heavy.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardtrain.checkpoints.checkpointer import Checkpoints
    from shardtrain.checkpoints.differences import Allow
    from shardtrain.checkpoints.policy import CheckpointPolicy
    from shardtrain.combine.synchronisation import Outer, Synchronisation
    from shardtrain.data import (
        Augment,
        Batches,
        Chat,
        Corpus,
        ImageFiles,
        Loading,
        MaskedTokens,
        Mixture,
        Source,
        Stream,
        Text,
        TokenBatches,
        TokenPairs,
        Tokens,
        place,
    )
    from shardtrain.functional.cross_entropy import cross_entropy
    from shardtrain.functional.linen_model import from_linen
    from shardtrain.functional.loss import (
        Loss,
        Regularized,
        classification_loss,
        masked_token_loss,
        next_token_loss,
        translation_loss,
    )
    from shardtrain.functional.metrics import Metric, TopAccuracy, add_metrics
    from shardtrain.functional.model import Model
    from shardtrain.functional.nnx_model import from_nnx
    from shardtrain.islands.membership import join
    from shardtrain.islands.options import Across
    from shardtrain.islands.watchdog.diagnosis import Watch
    from shardtrain.optim.optimizer import Optimizer, make_optimizer
    from shardtrain.optim.scaling import Scaling
    from shardtrain.optim.schedules import Schedule
    from shardtrain.pipeline.options import Pipeline
    from shardtrain.sharding.layout import Layout
    from shardtrain.sharding.layout_file import read_layout
    from shardtrain.sharding.mesh import make_mesh
    from shardtrain.train_step.initial_state import init_state, restorable_state
    from shardtrain.train_step.placement import make_placement
    from shardtrain.train_step.step import make_evaluate, make_gradients, make_step
    from shardtrain.trainer.config import Run, StartFrom
    from shardtrain.trainer.hooks import Hook
    from shardtrain.trainer.pretrained import read_pretrained
    from shardtrain.trainer.recovery import Recovery
    from shardtrain.trainer.strategy import Strategy, read_strategy
    from shardtrain.trainer.train import Trained, train
    from shardtrain.trainer.trained_model import build, load

_MODULES = {
    "checkpoints.checkpointer": ("Checkpoints",),
    "checkpoints.policy": ("CheckpointPolicy",),
    "trainer.config": ("Run", "StartFrom"),
    "trainer.strategy": ("Strategy", "read_strategy"),
    "data": (
        "Augment",
        "Batches",
        "Chat",
        "Corpus",
        "ImageFiles",
        "Loading",
        "MaskedTokens",
        "Mixture",
        "Source",
        "Stream",
        "Text",
        "TokenBatches",
        "TokenPairs",
        "Tokens",
        "place",
    ),
    "islands.membership": ("join",),
    "islands.options": ("Across",),
    "islands.watchdog.diagnosis": ("Watch",),
    "sharding.layout": ("Layout",),
    "sharding.layout_file": ("read_layout",),
    "functional.cross_entropy": ("cross_entropy",),
    "functional.loss": (
        "Loss",
        "Regularized",
        "classification_loss",
        "masked_token_loss",
        "next_token_loss",
        "translation_loss",
    ),
    "sharding.mesh": ("make_mesh",),
    "functional.linen_model": ("from_linen",),
    "functional.metrics": ("Metric", "TopAccuracy", "add_metrics"),
    "functional.model": ("Model",),
    "functional.nnx_model": ("from_nnx",),
    "optim.optimizer": ("Optimizer", "make_optimizer"),
    "optim.schedules": ("Schedule",),
    "pipeline.options": ("Pipeline",),
    "optim.scaling": ("Scaling",),
    "trainer.hooks": ("Hook",),
    "trainer.pretrained": ("read_pretrained",),
    "trainer.recovery": ("Recovery",),
    "combine.synchronisation": ("Outer", "Synchronisation"),
    "checkpoints.differences": ("Allow",),
    "train_step.initial_state": ("init_state", "restorable_state"),
    "train_step.placement": ("make_placement",),
    "train_step.step": ("make_evaluate", "make_gradients", "make_step"),
    "trainer.trained_model": ("build", "load"),
    "trainer.train": ("Trained", "train"),
}

__all__ = [
    "Across",
    "Allow",
    "Augment",
    "Batches",
    "Chat",
    "CheckpointPolicy",
    "Checkpoints",
    "Corpus",
    "Hook",
    "ImageFiles",
    "Layout",
    "Loading",
    "Loss",
    "MaskedTokens",
    "Metric",
    "Mixture",
    "Model",
    "Optimizer",
    "Outer",
    "Pipeline",
    "Recovery",
    "Regularized",
    "Run",
    "Scaling",
    "Schedule",
    "Source",
    "StartFrom",
    "Strategy",
    "Stream",
    "Synchronisation",
    "Text",
    "TokenBatches",
    "TokenPairs",
    "Tokens",
    "TopAccuracy",
    "Trained",
    "Watch",
    "add_metrics",
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
    "read_pretrained",
    "read_strategy",
    "restorable_state",
    "train",
    "translation_loss",
]

_RENAMED = {"pretrained": "read_pretrained", "with_metrics": "add_metrics"}
"""Earlier name -> name."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"shardtrain.{module}"), name)
    now = f"; its name is {_RENAMED[name]} now" if name in _RENAMED else ""
    raise AttributeError(f"module 'shardtrain' has no attribute {name!r}{now}")
