"""The state as it is saved: blocks in the model's own order, whatever pipeline a mesh has cut them into.

A pipeline whose stored order is that of the model is saved as it lies. Next: `checkpoint.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain import axes
from shardtrain.model import path_text
from shardtrain.pipeline.rows import Stages
from shardtrain.state import Placement, State, restorable_state

NOT = -1


def saved_state(placement: Placement) -> State:
    """Shapes, dtypes and shardings of the saved state: what `Checkpoints.restore` reads into."""
    state, stages = restorable_state(placement), placement.stages
    if stages is None or stages.is_plain:
        return state

    def saved(x: jax.ShapeDtypeStruct, dim: int) -> jax.ShapeDtypeStruct:
        if dim == NOT:
            return x
        shape = (*x.shape[:dim], stages.num_blocks, *x.shape[dim + 1 :])
        spec = _elsewhere(x.sharding.spec, dim, shape, dict(placement.mesh.shape))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(placement.mesh, spec))

    return jax.tree.map(saved, state, _block_dims(placement))


def to_saved(placement: Placement) -> Callable[[State], State]:
    """A state as the mesh has it -> as it is saved."""
    return _converted(placement, Stages.in_order, saved_state(placement))


def from_saved(placement: Placement) -> Callable[[State], State]:
    """A saved state -> as the mesh has it."""
    return _converted(placement, Stages.stored, restorable_state(placement))


def _converted(placement: Placement, convert: Callable[..., Any], like: State) -> Callable[[State], State]:
    stages = placement.stages
    if stages is None or stages.is_plain:
        return lambda state: state
    dims = _block_dims(placement)
    return jax.jit(
        lambda state: jax.tree.map(lambda x, dim: x if dim == NOT else convert(stages, x, dim), state, dims),
        out_shardings=jax.tree.map(lambda x: x.sharding, like),
    )


def _block_dims(placement: Placement) -> State:
    """For each array of the state, which dim counts blocks; -1 where none does."""
    state, own = placement.specs.abstract, int(placement.combine.on_deltas)
    blocks = {
        path_text(path): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(state.params)
        if path_text(path).startswith("blocks/")
    }

    def dim(leading: int) -> Callable[[Any, Any], int]:
        def of(path: Any, leaf: Any) -> int:
            keys = path_text(path).split("/")
            ends = ("/".join(keys[start:]) for start in range(len(keys)))
            return leading if any(blocks.get(end) == leaf.shape[leading:] for end in ends) else NOT

        return of

    nothing = jax.tree.map(lambda _: NOT, state)
    return nothing._replace(
        params=jax.tree.map_with_path(dim(0), state.params),
        opt_state=jax.tree.map_with_path(dim(own), state.opt_state),
        local=jax.tree.map_with_path(dim(1), state.local),
    )


def _elsewhere(spec: PartitionSpec, dim: int, shape: Sequence[int], sizes: dict[str, int]) -> PartitionSpec:
    """A spec with the axis pipeline on another dim than that of blocks, the first that it divides."""
    entries: list[tuple[str, ...]] = [((e,) if isinstance(e, str) else tuple(e or ())) for e in spec]
    entries += [()] * (len(shape) - len(entries))
    entries[dim] = tuple(axis for axis in entries[dim] if axis != axes.PIPELINE)
    for i, entry in enumerate(entries):
        shards = sizes[axes.PIPELINE]
        for axis in entry:
            shards *= sizes[axis]
        if i != dim and shape[i] % shards == 0:
            entries[i] = (*entry, axes.PIPELINE)
            break
    return PartitionSpec(*entries)
