"""Create the initial state by one compiled program on the mesh, so that it is never whole on the host.

Next: `step.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardtrain.functional.model import Model, group_by_path, path_text
from shardtrain.sharding.specs import move_pipeline
from shardtrain.system.xla_flags import quick_options
from shardtrain.train_step.loss_scale import init_loss_scale
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.replica_state import add_replicas
from shardtrain.train_step.state import State, new_state, order_stage_blocks


def init_state(
    model: Model, optimizer: optax.GradientTransformation, placement: Placement, seed: int = 0
) -> State:
    """Create the initial state on the mesh; it has the same values on any mesh.

    Args:
      model: the model.
      optimizer: the optimizer.
      placement: the placement of model and optimizer, see `make_placement`.
      seed: a number from 0 to 2**32 - 1.
    """
    specs, synchronisation, sizes = placement.specs, placement.synchronisation, dict(placement.mesh.shape)

    by_path = group_by_path(specs.params)

    # random numbers must not depend on the number of stages: draw blocks before they are split over stages
    def whole(path: Any, x: jax.Array) -> jax.Array:
        spec = move_pipeline(by_path[path_text(path)], 0, x.shape, sizes)
        return jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, spec))

    def create(seed: jax.Array) -> State:
        state = new_state(model, optimizer, seed, order_stage_blocks(placement.stages, whole))
        state = add_replicas(state, synchronisation, sizes, specs)
        return state._replace(loss_scale=init_loss_scale()) if specs.abstract.loss_scale else state

    given = jnp.uint32(seed)
    # inside another jit the whole program has the options
    is_inside = isinstance(given, Tracer)
    options = None if is_inside else quick_options(placement.mesh.devices.flat[0].platform)
    return jax.jit(create, out_shardings=placement.state, compiler_options=options)(given)


def restorable_state(placement: Placement) -> State:
    """Return the shapes, dtypes and shardings of the state, which `Checkpoints.restore` needs."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        placement.specs.abstract,
        placement.state,
    )
