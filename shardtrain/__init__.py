"""Sharded training of Flax models, from a laptop to unequal hosts joined by MPI.

The names below load at first use: `import shardtrain` itself imports nothing heavy.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardtrain.checkpoints.checkpointer import Checkpoints as Checkpoints
    from shardtrain.checkpoints.differences import Allow as Allow
    from shardtrain.checkpoints.policy import CheckpointPolicy as CheckpointPolicy
    from shardtrain.combine.synchronisation import Outer as Outer
    from shardtrain.combine.synchronisation import Synchronisation as Synchronisation
    from shardtrain.data import Augment as Augment
    from shardtrain.data import Batches as Batches
    from shardtrain.data import Chat as Chat
    from shardtrain.data import Corpus as Corpus
    from shardtrain.data import ImageFiles as ImageFiles
    from shardtrain.data import Loading as Loading
    from shardtrain.data import MaskedTokens as MaskedTokens
    from shardtrain.data import Mixture as Mixture
    from shardtrain.data import Source as Source
    from shardtrain.data import Stream as Stream
    from shardtrain.data import Text as Text
    from shardtrain.data import TokenBatches as TokenBatches
    from shardtrain.data import TokenPairs as TokenPairs
    from shardtrain.data import Tokens as Tokens
    from shardtrain.data import place as place
    from shardtrain.elastic.island import ElasticIsland as ElasticIsland
    from shardtrain.elastic.member import Membership as Membership
    from shardtrain.elastic.options import Elastic as Elastic
    from shardtrain.functional.cross_entropy import cross_entropy as cross_entropy
    from shardtrain.functional.linen_model import from_linen as from_linen
    from shardtrain.functional.loss import Loss as Loss
    from shardtrain.functional.loss import Regularized as Regularized
    from shardtrain.functional.loss import classification_loss as classification_loss
    from shardtrain.functional.loss import masked_token_loss as masked_token_loss
    from shardtrain.functional.loss import next_token_loss as next_token_loss
    from shardtrain.functional.loss import translation_loss as translation_loss
    from shardtrain.functional.metrics import Metric as Metric
    from shardtrain.functional.metrics import TopAccuracy as TopAccuracy
    from shardtrain.functional.metrics import add_metrics as add_metrics
    from shardtrain.functional.model import Model as Model
    from shardtrain.functional.nnx_model import from_nnx as from_nnx
    from shardtrain.functional.remat_counts import RematCounts as RematCounts
    from shardtrain.islands.membership import join as join
    from shardtrain.islands.options import Across as Across
    from shardtrain.islands.watchdog.diagnosis import Watch as Watch
    from shardtrain.optim.optimizer import Optimizer as Optimizer
    from shardtrain.optim.optimizer import make_optimizer as make_optimizer
    from shardtrain.optim.scaling import Scaling as Scaling
    from shardtrain.optim.schedules import Schedule as Schedule
    from shardtrain.pipeline.options import Pipeline as Pipeline
    from shardtrain.sharding.layout import Layout as Layout
    from shardtrain.sharding.layout_file import read_layout as read_layout
    from shardtrain.sharding.mesh import make_mesh as make_mesh
    from shardtrain.train_step.elastic_program import ElasticProgram as ElasticProgram
    from shardtrain.train_step.island_compute import Training as Training
    from shardtrain.train_step.placement import init_state as init_state
    from shardtrain.train_step.placement import make_placement as make_placement
    from shardtrain.train_step.placement import restorable_state as restorable_state
    from shardtrain.train_step.step import make_evaluate as make_evaluate
    from shardtrain.train_step.step import make_gradients as make_gradients
    from shardtrain.train_step.step import make_step as make_step
    from shardtrain.trainer.config import Run as Run
    from shardtrain.trainer.config import StartFrom as StartFrom
    from shardtrain.trainer.hooks import Hook as Hook
    from shardtrain.trainer.pretrained import read_pretrained as read_pretrained
    from shardtrain.trainer.recovery import Recovery as Recovery
    from shardtrain.trainer.strategy import Strategy as Strategy
    from shardtrain.trainer.strategy import read_strategy as read_strategy
    from shardtrain.trainer.train import Trained as Trained
    from shardtrain.trainer.train import train as train
    from shardtrain.trainer.trained_model import build as build
    from shardtrain.trainer.trained_model import load as load

_MODULES = {
    "checkpoints.checkpointer": ("Checkpoints",),
    "checkpoints.policy": ("CheckpointPolicy",),
    "trainer.config": ("Run", "StartFrom"),
    "trainer.strategy": ("Strategy", "read_strategy"),
    "data": (
        *("Augment", "Batches", "Chat", "Corpus", "ImageFiles", "Loading", "MaskedTokens"),
        *("Mixture", "Source", "Stream", "Text", "TokenBatches", "TokenPairs", "Tokens", "place"),
    ),
    "elastic.island": ("ElasticIsland",),
    "elastic.member": ("Membership",),
    "elastic.options": ("Elastic",),
    "islands.membership": ("join",),
    "islands.options": ("Across",),
    "islands.watchdog.diagnosis": ("Watch",),
    "sharding.layout": ("Layout",),
    "sharding.layout_file": ("read_layout",),
    "functional.cross_entropy": ("cross_entropy",),
    "functional.loss": (
        *("Loss", "Regularized", "classification_loss", "masked_token_loss", "next_token_loss"),
        *("translation_loss",),
    ),
    "sharding.mesh": ("make_mesh",),
    "functional.linen_model": ("from_linen",),
    "functional.metrics": ("Metric", "TopAccuracy", "add_metrics"),
    "functional.model": ("Model",),
    "functional.nnx_model": ("from_nnx",),
    "optim.optimizer": ("Optimizer", "make_optimizer"),
    "optim.schedules": ("Schedule",),
    "functional.remat_counts": ("RematCounts",),
    "pipeline.options": ("Pipeline",),
    "optim.scaling": ("Scaling",),
    "trainer.hooks": ("Hook",),
    "trainer.pretrained": ("read_pretrained",),
    "trainer.recovery": ("Recovery",),
    "combine.synchronisation": ("Outer", "Synchronisation"),
    "checkpoints.differences": ("Allow",),
    "train_step.elastic_program": ("ElasticProgram",),
    "train_step.island_compute": ("Training",),
    "train_step.placement": ("init_state", "make_placement", "restorable_state"),
    "train_step.step": ("make_evaluate", "make_gradients", "make_step"),
    "trainer.trained_model": ("build", "load"),
    "trainer.train": ("Trained", "train"),
}
"""Module -> its public names, which load at first use."""

__all__ = sorted(name for names in _MODULES.values() for name in names)  # pyright: ignore[reportUnsupportedDunderAll]

_RENAMED = {"pretrained": "read_pretrained", "with_metrics": "add_metrics"}
"""Earlier name -> name."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"shardtrain.{module}"), name)
    now = f"; its name is {_RENAMED[name]} now" if name in _RENAMED else ""
    raise AttributeError(f"module 'shardtrain' has no attribute {name!r}{now}")
