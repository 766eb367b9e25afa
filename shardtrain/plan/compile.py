"""A training step compiled ahead of time, also for devices that are not here, and its figures.

Only shapes go in: nothing is placed and nothing runs. Needs the optional package `ahead-of-time` for GPUs.
What the program moves is read in `collectives.py`, what it should move stands in `traffic.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import optax
from jax.experimental import topologies
from jax.sharding import Mesh

from shardtrain.layout import Layout
from shardtrain.loss import Loss
from shardtrain.model import Model
from shardtrain.plan.collectives import Collective, collectives
from shardtrain.plan.gpu_targets import GPU_TARGETS, target_config
from shardtrain.state import make_placement, restorable_state
from shardtrain.step import make_step

PLUGIN = "jax_cuda12_plugin"
DEVICES_PER_HOST = 8


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a compiled program needs and moves, as its compiler says; bytes are of one device.

    Args:
      argument_bytes: what goes in: for a step its state and its batch.
      output_bytes: what comes out.
      temp_bytes: what is held in between, on top of both.
      alias_bytes: the part of the output that takes the place of arguments (a donated state).
      collectives: what moves between devices.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    collectives: tuple[Collective, ...]


def compile_step(
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh: Mesh,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    microbatches: int = 1,
) -> jax.stages.Compiled:
    """Compile the training step for a mesh from shapes alone.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      layout: where everything lies.
      mesh: of this layout, see `make_mesh`; of real devices or of `described_devices`.
      batch: shape (B, ...) and dtype of every array of the global batch.
      microbatches: parts that each batch is computed in.

    Returns:
      The compiled program, for its text and `figures`; on real devices it can be called.

    Raises:
      ValueError: the layout does not fit the model, or B cannot be split.
    """
    placement = make_placement(model, optimizer, layout, mesh)
    problems = [
        rows_text(name, array.shape[0], microbatches, layout, dict(mesh.shape))
        for name, array in batch.items()
        if array.shape[0] % (microbatches * _num_shares(layout, dict(mesh.shape)))
    ]
    if problems:
        raise ValueError("\n".join(problems))
    shapes = {
        name: jax.ShapeDtypeStruct(
            (microbatches, array.shape[0] // microbatches, *array.shape[1:]),
            array.dtype,
            sharding=placement.batch,
        )
        for name, array in batch.items()
    }
    state = restorable_state(model, optimizer, placement)
    return make_step(model, loss, optimizer, placement).lower(state, shapes).compile()
