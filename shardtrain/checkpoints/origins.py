"""Record the origin of each saved array: its blocks and its replica in the whole model.

A mesh or a stage saves its arrays as it stores them, and other layouts find their rows by these origins.
Next: `trainer/resume.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardtrain import axes
from shardtrain.checkpoints.manifest_entries import COMMON, ArrayOrigin
from shardtrain.functional.model import BLOCKS, Tree, path_text
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.sharding.specs import move_pipeline
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.state import State

OF_DEVICES = ("combine_state/", "local/", "loss_scale/")
"""Paths of arrays that differ between islands, or between devices of a mesh."""
OF_LAYOUT = (*OF_DEVICES, "outer_state/")
"""Paths of arrays that depend on buckets, devices or fragments, and are restored only on the same layout."""


def select_saved_state(state: State, own: bool = False) -> State:
    """Return the arrays of a state to save.

    Args:
      state: arrays or shapes.
      own: select only arrays that differ per island, because another island saves the common ones.
    """
    if own:
        return state._replace(step=(), seed=(), params=(), model_state=(), outer_state=())
    return state


def make_find_origins(
    placement: Placement,
    stage_model: StageModel | None = None,
    island: tuple[int, int] = (0, 1),
    own_optimizers: bool = False,
    replica: tuple[int, int] | None = None,
) -> Callable[[State], dict[str, ArrayOrigin]]:
    """Make a function from a state to the origins of its arrays by path; whole arrays are left out.

    Args:
      placement: the placement of the state.
      stage_model: the stage of this island; None if islands are no stages.
      island: (index of this island, number of islands).
      own_optimizers: whether each island has its own optimizer state.
      replica: (index of this island's replica, number of replicas) if islands are stages, else None.
    """
    rows, num_rows = _rows(placement, stage_model)
    in_mesh = placement.mesh.shape[axes.DATA] if placement.synchronisation.on_deltas else None

    def find_origin(path: str, shape: tuple[int, ...]) -> ArrayOrigin:
        if path.startswith(OF_DEVICES):
            return ArrayOrigin(replica=island[0], num_replicas=island[1]) if island[1] > 1 else COMMON
        # optimizer states of islands are numbered by island; in a mesh their first dim counts replicas
        own = own_optimizers and path.startswith("opt_state/")
        number, num_replicas = replica or island
        whose = ArrayOrigin(replica=number, num_replicas=num_replicas) if own else COMMON
        if in_mesh is not None and path.startswith("opt_state/"):
            whose, shape = ArrayOrigin(num_replicas=in_mesh), shape[1:]
        # the array belongs to a stacked parameter, even if it has fewer dims, as factored moments do
        keys = path.split("/")
        is_of_block = any("/".join(keys[start:]) in blocks for start in range(len(keys)))
        if is_of_block and shape[:1] == (len(rows),):
            return replace(whose, rows=rows, num_rows=num_rows)
        return whose

    whole = placement.specs.abstract
    leaves = [leaf for tree in (whole.params, whole.model_state) for leaf in jax.tree.leaves_with_path(tree)]
    paths = [path_text(path) for path, _ in leaves]
    blocks = {path for path in paths if rows and path.startswith(f"{BLOCKS}/")}

    def of(state: State) -> dict[str, ArrayOrigin]:
        shapes = {path_text(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(state)}
        found = {path: find_origin(path, shape) for path, shape in shapes.items()}
        return {path: each for path, each in found.items() if each != COMMON}

    return of


def _rows(placement: Placement, stage_model: StageModel | None) -> tuple[tuple[int, ...], int]:
    """Return the block of each row of stacked arrays, and their number; ((), 0) if all are in order."""
    if stage_model is not None:
        if not stage_model.stacked:
            return (), 0
        return tuple(stage_model.block_numbers), stage_model.stages.num_blocks
    stages = placement.stages
    return ((), 0) if stages is None or stages.is_plain else (stages.stored_blocks, stages.num_blocks)


def restore_block_order(placement: Placement, params: Tree) -> Tree:
    """Return parameters with their blocks in the model's order."""
    stages, mesh = placement.stages, placement.mesh
    if stages is None or stages.is_plain:
        return params

    def move_array(path: Any, x: jax.Array, spec: Any) -> jax.Array:
        if not path_text(path).startswith(f"{BLOCKS}/"):
            return x
        # reorder rows where every device has all of them: else XLA gathers whole arrays
        shape = (stages.num_blocks, *x.shape[1:])
        elsewhere = NamedSharding(mesh, move_pipeline(spec, 0, shape, dict(mesh.shape)))
        x = jax.lax.with_sharding_constraint(x, elsewhere)
        return jax.lax.with_sharding_constraint(stages.restore_order(x), elsewhere)

    return jax.jit(lambda tree: jax.tree.map_with_path(move_array, tree, placement.specs.params))(params)
