"""The state as it is saved: blocks in the model's own order, whatever pipeline a mesh has cut them into.

A pipeline whose stored order is that of the model is saved as it lies. Next: `checkpoint.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardtrain.model import BLOCKS, path_text
from shardtrain.pipeline.rows import Stages
from shardtrain.sharding import without_pipeline
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
        spec = without_pipeline(x.sharding.spec, dim, shape, dict(placement.mesh.shape))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(placement.mesh, spec))

    return jax.tree.map(saved, state, _block_dims(placement))


def to_saved(placement: Placement) -> Callable[[State], State]:
    """A state as the mesh has it -> as it is saved."""
    return _converted(placement, Stages.in_order, saved_state(placement))


def from_saved(placement: Placement) -> Callable[[State], State]:
    """A saved state -> as the mesh has it."""
    return _converted(placement, Stages.stored, restorable_state(placement))


def _converted(placement: Placement, convert: Callable[..., Any], like: State) -> Callable[[State], State]:
    """What a combiner keeps stays as it is: it is no array of blocks, and of other islands perhaps."""
    stages, mesh = placement.stages, placement.mesh
    if stages is None or stages.is_plain:
        return lambda state: state
    dims = _block_dims(placement)._asdict()
    specs = saved_state(placement)._asdict()
    names = ("params", "opt_state", "local")

    def moved(x: Any, dim: int, saved: jax.ShapeDtypeStruct) -> Any:
        if dim == NOT:
            return x
        # rows change their places where every device has all of them: else XLA gathers whole arrays
        elsewhere = NamedSharding(mesh, saved.sharding.spec)
        x = jax.lax.with_sharding_constraint(x, elsewhere)
        return jax.lax.with_sharding_constraint(convert(stages, x, dim), elsewhere)

    def run(trees: dict[str, Any]) -> dict[str, Any]:
        return {name: jax.tree.map(moved, trees[name], dims[name], specs[name]) for name in names}

    shardings = {name: jax.tree.map(lambda x: x.sharding, like._asdict()[name]) for name in names}
    compiled = jax.jit(run, out_shardings=shardings)
    return lambda state: state._replace(**compiled({name: getattr(state, name) for name in names}))


def _block_dims(placement: Placement) -> State:
    """For each array of the state, which dim counts blocks; -1 where none does."""
    state, own = placement.specs.abstract, int(placement.combine.on_deltas)
    assert placement.stages is not None
    num_rows = len(placement.stages.rows)
    paths = (path_text(path) for path, _ in jax.tree.leaves_with_path(state.params))
    blocks = {path for path in paths if path.startswith(f"{BLOCKS}/")}

    def dim(leading: int) -> Callable[[Any, Any], int]:
        def of(path: Any, leaf: Any) -> int:
            keys = path_text(path).split("/")
            # of a parameter, whatever its other dims: factored moments have fewer
            is_of_block = any("/".join(keys[start:]) in blocks for start in range(len(keys)))
            return leading if is_of_block and leaf.shape[leading : leading + 1] == (num_rows,) else NOT

        return of

    nothing = jax.tree.map(lambda _: NOT, state)
    return nothing._replace(
        params=jax.tree.map_with_path(dim(0), state.params),
        opt_state=jax.tree.map_with_path(dim(own), state.opt_state),
        local=jax.tree.map_with_path(dim(1), state.local),
    )
