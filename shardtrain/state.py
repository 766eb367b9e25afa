"""The train state: what a step reads and writes, how it lies on the mesh, and how it begins.

It is created by one compiled program straight onto the mesh, never whole on the host.
Next: `step.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.layout import PARAMETER_RULES, Layout, Named, near, problems_error
from shardtrain.model import Model, Tree, named_arrays, path_text
from shardtrain.sharding import partition_specs


class State(NamedTuple):
    """Everything that a step changes, and so everything that a checkpoint holds.

    Args:
      step: int32 scalar, steps done; with `seed` it determines all randomness of the next step.
      seed: uint32 scalar.
      params: nested dict of arrays.
      model_state: nested dict of what changes without being trained (running statistics).
      opt_state: the optimizer's state.
    """

    step: Any
    seed: Any
    params: Any
    model_state: Any
    opt_state: Any


class Specs(NamedTuple):
    """How a state lies on a mesh of certain sizes; no device takes part.

    Args:
      abstract: the state's shapes and dtypes.
      arrays: path -> dims and shape of each parameter.
      params: like params, the PartitionSpec of each parameter as it is stored.
      sharded: like params, the PartitionSpec of what ZeRO shards: optimizer state, reduced gradients,
        and parameters at zero=3.
      state: a `State` of PartitionSpec.
    """

    abstract: State
    arrays: Mapping[str, Named]
    params: Any
    sharded: Any
    state: State


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where everything lies: a layout joined with a model, an optimizer and a mesh.

    Args:
      mesh: the jax mesh.
      layout: the layout it was made from.
      specs: of the state.
      state: a `State` of NamedSharding.
    """

    mesh: Mesh
    layout: Layout
    specs: Specs
    state: State

    @property
    def batch(self) -> NamedSharding:
        """The sharding of every array of a batch, shape (microbatches, rows, ...)."""
        return NamedSharding(self.mesh, PartitionSpec(None, self.layout.batch_axes))


def abstract_state(model: Model, optimizer: optax.GradientTransformation) -> State:
    """The state's shapes and dtypes, nothing computed."""
    return jax.eval_shape(lambda: _init(model, optimizer, jnp.uint32(0)))


def _init(model: Model, optimizer: optax.GradientTransformation, seed: jax.Array) -> State:
    params, model_state = model.init(jax.random.key(seed))
    state = State(jnp.int32(0), seed, params, model_state, optimizer.init(params))
    # weak types do not survive a checkpoint, and results of another dtype would follow from that
    return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.asarray(x).dtype), state)


def state_specs(
    model: Model, optimizer: optax.GradientTransformation, layout: Layout, sizes: Mapping[str, int]
) -> Specs:
    """How the state of this model and optimizer lies on a mesh of these sizes.

    Args:
      model: for its dims and shapes.
      optimizer: for the shapes of its state. An array of the state that stands under the path of
        a parameter and has its shape is sharded like it; any other is replicated.
      layout: the rules.
      sizes: axis -> size, see `layout.axis_sizes`.

    Raises:
      ValueError: everything in which the layout does not fit the model.
    """
    abstract = abstract_state(model, optimizer)
    arrays = named_arrays(model, abstract.params)
    dims = {dim for named in arrays.values() for dim in named.dims or () if dim is not None}
    known = sorted(dims | set(PARAMETER_RULES))
    if useless := [f"no such dim: {near(dim, known)}" for dim in layout.parameters if dim not in known]:
        raise problems_error("the layout has rules for parameters that the model does not have", useless)
    params, sharded = (
        partition_specs(arrays, abstract.params, rules, sizes, layout.unnamed)
        for rules in (layout.parameter_rules, layout.sharded_rules)
    )
    whole = PartitionSpec()
    state = State(
        step=whole,
        seed=whole,
        params=params,
        model_state=jax.tree.map(lambda _: whole, abstract.model_state),
        opt_state=_like_params(abstract.opt_state, abstract.params, sharded),
    )
    return Specs(abstract, arrays, params, sharded, state)


def _like_params(opt_state: Any, params: Tree, specs: Any) -> Any:
    by_path = {
        path_text(path): (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree.leaves_with_path(params),
            jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)),
            strict=True,
        )
    }

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        keys = path_text(path).split("/")
        for start in range(len(keys)):
            shape, found = by_path.get("/".join(keys[start:]), (None, None))
            if found is not None and shape == leaf.shape:
                return found
        return PartitionSpec()

    return jax.tree.map_with_path(spec, opt_state)


def make_placement(
    model: Model, optimizer: optax.GradientTransformation, layout: Layout, mesh: Mesh
) -> Placement:
    """Join a layout with a model, an optimizer and a mesh.

    Raises:
      ValueError: everything in which the layout does not fit the model.
    """
    specs = state_specs(model, optimizer, layout, dict(mesh.shape))
    state = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs.state, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return Placement(mesh=mesh, layout=layout, specs=specs, state=state)


def init_state(
    model: Model, optimizer: optax.GradientTransformation, placement: Placement, seed: int = 0
) -> State:
    """The state before the first step, created on the mesh; the same numbers on any mesh.

    Args:
      model: the model.
      optimizer: the optimizer.
      placement: of these two, see `make_placement`.
      seed: from 0 to 2**32 - 1.
    """
    create = jax.jit(lambda seed: _init(model, optimizer, seed), out_shardings=placement.state)
    return create(jnp.uint32(seed))


def restorable_state(placement: Placement) -> State:
    """Shapes, dtypes and shardings of the state: what `Checkpoints.restore` reads into."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        placement.specs.abstract,
        placement.state,
    )
