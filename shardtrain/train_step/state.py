"""The train state: what a step reads and writes, how it lies on the mesh, and how it begins.

It is created by one compiled program straight onto the mesh, never whole on the host.
Next: `step.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain import axes
from shardtrain.combine.replicas import Combine, cut, shard_shapes, stacked_paths
from shardtrain.errors.messages import near, problems_error
from shardtrain.functional.model import BLOCKS, Model, Tree, named_arrays, path_text
from shardtrain.optim.optimizer_state import stored
from shardtrain.pipeline.stacking import Partition
from shardtrain.sharding.array_dims import Named
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.resolve import completed, unplaced_text
from shardtrain.sharding.rules import PARAMETER_RULES
from shardtrain.sharding.specs import partition_specs, spec_axes, with_leading_dim, without_pipeline


class State(NamedTuple):
    """Everything that a step changes, and so everything that a checkpoint holds.

    Args:
      step: int32 scalar, steps done; with `seed` it determines all randomness of the next step.
      seed: uint32 scalar.
      params: nested dict of arrays.
      model_state: nested dict of what changes without being trained (running statistics).
      opt_state: the optimizer's state; where each replica has its own, (data, ...).
      combine_state: the combiner's, such as what a compression has left out so far: (devices, ...), for
        each device keeps that of its own shards. () where it keeps nothing.
      local: what replicas did since they were last combined, a `Local`; () where they are combined in
        every step.
    """

    step: Any
    seed: Any
    params: Any
    model_state: Any
    opt_state: Any
    combine_state: Any = ()
    local: Any = ()


class Local(NamedTuple):
    """Steps of replicas on their own.

    Args:
      drift: like params, each leaf (data, ...): a replica's parameters less the common ones.
      count: float32 (data,), examples or tokens since.
    """

    drift: Any
    count: Any


class Specs(NamedTuple):
    """How a state lies on a mesh of certain sizes; no device takes part.

    Args:
      abstract: the state's shapes and dtypes.
      arrays: path -> dims and shape of each parameter.
      params: like params, the PartitionSpec of each parameter as it is stored.
      sharded: like params, the PartitionSpec of what ZeRO shards: optimizer state, reduced gradients,
        and parameters at zero=3.
      state: a `State` of PartitionSpec.
      layout: the layout, with a rule for every name of the model, see `resolve.completed`.
      unplaced: what is whole for want of a name or a rule, as a line to read; None if nothing is.
    """

    abstract: State
    arrays: Mapping[str, Named]
    params: Any
    sharded: Any
    state: State
    layout: Layout
    unplaced: str | None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where everything lies: a layout joined with a model, an optimizer and a mesh.

    Args:
      mesh: the jax mesh.
      layout: the layout it was made from, completed for the model.
      combine: how the replicas of this mesh become one.
      specs: of the state.
      state: a `State` of NamedSharding.
      stages: how a pipeline in this mesh has cut the model's blocks; None without one.
      schedule: of the pipeline, see `pipeline.schedule.make_table`.
    """

    mesh: Mesh
    layout: Layout
    combine: Combine
    specs: Specs
    state: State
    stages: Partition | None = None
    schedule: str = "1f1b"

    @property
    def batch(self) -> NamedSharding:
        """The sharding of every array of a batch, shape (microbatches, rows, ...)."""
        return NamedSharding(self.mesh, PartitionSpec(None, self.layout.batch_axes))


def abstract_state(
    model: Model, optimizer: optax.GradientTransformation, stages: Partition | None = None
) -> State:
    """The shapes and dtypes of a state whose replicas have nothing of their own; nothing is computed."""
    return jax.eval_shape(lambda: _init(model, optimizer, jnp.uint32(0), _storing(stages)))


def _storing(
    stages: Partition | None, whole: Callable[[Any, Any], Any] = lambda path, x: x
) -> Callable[[Tree], Tree]:
    """Parameters with their blocks in the order of a pipeline's stages.

    Args:
      stages: None for no pipeline.
      whole: (path, array) -> the array, where every device has all blocks of its share: rows are moved there.
    """
    if stages is None or stages.is_plain:
        return lambda params: params

    def stored(path: Any, x: jax.Array) -> jax.Array:
        if not path_text(path).startswith(f"{BLOCKS}/"):
            return x
        return whole(path, stages.stored(whole(path, x)))

    return lambda params: jax.tree.map_with_path(stored, params)


def _init(
    model: Model,
    optimizer: optax.GradientTransformation,
    seed: jax.Array,
    store: Callable[[Tree], Tree] = lambda params: params,
) -> State:
    params, model_state = model.init(jax.random.key(seed))
    params = store(params)
    state = State(jnp.int32(0), seed, params, model_state, stored(optimizer).init(params))
    # weak types do not survive a checkpoint, and results of another dtype would follow from that
    return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.asarray(x).dtype), state)


def _with_replicas(
    state: State, combine: Combine, sizes: Mapping[str, int], arrays: Mapping[str, Named], sharded: Any
) -> State:
    """The state with what each replica has of its own."""
    if combine.is_mean:
        return state
    num_replicas = sizes[axes.DATA]

    def replicated(tree: Any, copies: int) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (copies, *jnp.shape(x))), tree)

    pieces = cut(shard_shapes(state.params, sharded, sizes), stacked_paths(arrays, sharded))
    state = state._replace(combine_state=replicated(combine.combiner.init(pieces), math.prod(sizes.values())))
    if combine.on_deltas:
        state = state._replace(opt_state=replicated(state.opt_state, num_replicas))
    if combine.local_steps > 1:
        drift = jax.tree.map(lambda x: jnp.zeros((num_replicas, *x.shape), x.dtype), state.params)
        state = state._replace(local=Local(drift, jnp.zeros(num_replicas)))
    return state


def state_specs(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    sizes: Mapping[str, int],
    combine: Combine = Combine(),
    stages: Partition | None = None,
) -> Specs:
    """How the state of this model and optimizer lies on a mesh of these sizes.

    Args:
      model: for its dims and shapes.
      optimizer: for the shapes of its state. An array of the state that stands under the path of
        a parameter and has its shape is sharded like it; any other is replicated.
      layout: the rules.
      sizes: axis -> size, see `layout.axis_sizes`.
      combine: how the replicas of this mesh become one.
      stages: how a pipeline cuts the model's blocks; None without one.

    Raises:
      ValueError: everything in which the layout does not fit the model.
    """
    abstract = abstract_state(model, optimizer, stages)
    arrays = named_arrays(model, abstract.params)
    dims = {dim for named in arrays.values() for dim in named.dims or () if dim is not None}
    known = sorted(dims | set(PARAMETER_RULES))
    if useless := [f"no such dim: {near(dim, known)}" for dim in layout.parameters if dim not in known]:
        raise problems_error("the layout has rules for parameters that the model does not have", useless)
    unplaced = unplaced_text(layout, arrays, sizes)
    layout = completed(layout, arrays, sizes)
    params, sharded = (
        partition_specs(arrays, abstract.params, rules, sizes, layout.unnamed)
        for rules in (layout.parameter_rules, layout.sharded_rules)
    )
    if not combine.is_mean:
        _check_data_axis(sharded)
    whole, by_replica = PartitionSpec(), PartitionSpec(axes.DATA)
    like_params = _like_params(abstract.opt_state, abstract.params, sharded)

    abstract = jax.eval_shape(lambda s: _with_replicas(s, combine, sizes, arrays, sharded), abstract)
    state = State(
        step=whole,
        seed=whole,
        params=params,
        model_state=jax.tree.map(lambda _: whole, abstract.model_state),
        opt_state=with_leading_dim(like_params, axes.DATA) if combine.on_deltas else like_params,
        combine_state=jax.tree.map(lambda _: PartitionSpec(tuple(sizes)), abstract.combine_state),
        local=Local(with_leading_dim(sharded, axes.DATA), by_replica) if combine.local_steps > 1 else (),
    )
    return Specs(abstract, arrays, params, sharded, state, layout, unplaced)


def _check_data_axis(sharded: Any) -> None:
    """A combiner needs whole replicas.

    Raises:
      ValueError: parameters are sharded over the data axis.
    """
    specs = jax.tree.leaves_with_path(sharded, is_leaf=lambda x: isinstance(x, PartitionSpec))
    if wrong := [path_text(path) for path, spec in specs if axes.DATA in spec_axes(spec)]:
        raise problems_error(
            "a combiner joins whole replicas over the data axis, but the layout shards parameters over it;"
            " use fsdp for that, or combine by 'mean'",
            wrong,
        )


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
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh: Mesh,
    combine: Combine = Combine(),
    stages: Partition | None = None,
    schedule: str = "1f1b",
) -> Placement:
    """Join a layout with a model, an optimizer and a mesh.

    Args:
      model: the model.
      optimizer: the optimizer.
      layout: the rules.
      mesh: the mesh.
      combine: how the replicas of this mesh become one.
      stages: how a pipeline cuts the model's blocks; a mesh with an axis pipeline above 1 needs it.
      schedule: of the pipeline, see `pipeline.schedule.make_table`.

    Raises:
      ValueError: everything in which the layout does not fit the model.
    """
    _check_stages(model, dict(mesh.shape), combine, stages)
    specs = state_specs(model, optimizer, layout, dict(mesh.shape), combine, stages)
    state = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs.state, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return Placement(
        mesh=mesh,
        layout=specs.layout,
        combine=combine,
        specs=specs,
        state=state,
        stages=stages,
        schedule=schedule,
    )


def _check_stages(model: Model, sizes: Mapping[str, int], combine: Combine, stages: Partition | None) -> None:
    num_stages = sizes[axes.PIPELINE]
    if (1 if stages is None else stages.num_stages) != num_stages:
        raise ValueError(
            f"the mesh has pipeline={num_stages}, and the model is cut into"
            f" {'no stages' if stages is None else f'{stages.num_stages} stages'}; make them with"
            f" pipeline.costs.make_partition(model, Pipeline(), {num_stages}, loss, microbatch)"
        )
    if stages is None:
        return
    problems = []
    if not combine.is_mean:
        problems.append(
            f"it sums the gradients of its replicas, and combine is {combine.by!r} on {combine.on};"
            " combine by 'mean', or join replicas as islands (--across)"
        )
    if model.chain is None or not model.chain.stacked:
        problems.append(
            "all its stages run one program, so blocks must be alike, their parameters stacked along the dim"
            f" {axes.LAYERS!r}, and this model's are not; stack them, or use --across pipeline"
        )
    state = jax.eval_shape(lambda: model.init(jax.random.key(0))[1])
    if kept := [path_text(path) for path, _ in jax.tree.leaves_with_path(state)]:
        problems.append(
            f"it hands on no running statistics, and the model has {', '.join(kept)}; use a norm without"
            " them, or --across pipeline"
        )
    if problems:
        raise problems_error(f"pipeline={num_stages} inside a mesh cannot run this", problems)


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
    specs, combine, sizes = placement.specs, placement.combine, dict(placement.mesh.shape)

    by_path = {
        path_text(path): spec
        for path, spec in jax.tree.leaves_with_path(
            specs.params, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
    }

    def whole(path: Any, x: jax.Array) -> jax.Array:
        spec = without_pipeline(by_path[path_text(path)], 0, x.shape, sizes)
        return jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, spec))

    def create(seed: jax.Array) -> State:
        state = _init(model, optimizer, seed, _storing(placement.stages, whole))
        return _with_replicas(state, combine, sizes, specs.arrays, specs.sharded)

    return jax.jit(create, out_shardings=placement.state)(jnp.uint32(seed))


def restorable_state(placement: Placement) -> State:
    """Shapes, dtypes and shardings of the state: what `Checkpoints.restore` reads into."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        placement.specs.abstract,
        placement.state,
    )
