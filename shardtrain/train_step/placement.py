"""Place a state on a mesh: find the sharding of each array, and create the first state.

It is created by one compiled program, so that it is never whole on the host. Next: `step.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain import axes
from shardtrain.combine.replicas import find_stacked_paths
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.errors.messages import near, refuse
from shardtrain.functional.frozen import drop_paths
from shardtrain.functional.model import Model, Tree, group_by_path, name_arrays, path_text
from shardtrain.pipeline.stacking import Partition
from shardtrain.sharding.array_dims import NamedArray
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.resolve import complete_layout, format_unplaced
from shardtrain.sharding.rules import PARAMETER_RULES
from shardtrain.sharding.specs import add_leading_dim, move_pipeline, partition_specs
from shardtrain.system.xla_flags import quick_options, step_options
from shardtrain.train_step.placement_checks import (
    check_data_axis,
    check_elements,
    check_experts,
    check_layers,
    check_operators,
    check_stages,
)
from shardtrain.train_step.state import (
    State,
    abstract_state,
    add_replicas,
    init_loss_scale,
    init_outer,
    make_local_layout,
    new_state,
    order_stage_blocks,
    shard_on_host,
    split_fragments,
)


class Specs(NamedTuple):
    """The PartitionSpecs of a state, for a mesh given by its axis sizes; no device is needed.

    Args:
      abstract: the state's shapes and dtypes.
      arrays: path -> dims and shape of each parameter.
      params: like params, the PartitionSpec of each parameter as it is stored.
      sharded: like params, the PartitionSpec of the arrays that ZeRO shards: optimizer state, reduced
        gradients, and parameters at zero=3.
      state: a `State` of PartitionSpec.
      layout: the layout, with a rule for every name of the model, see `resolve.complete_layout`.
      unplaced: a line about arrays that are replicated for lack of names or rules; None if there are none.
      stages: the partition of the model's blocks into stages of this mesh; None without a pipeline.
      frozen: paths of the parameters that are not trained, and never exchanged.
    """

    abstract: State
    arrays: Mapping[str, NamedArray]
    params: Any
    sharded: Any
    state: State
    layout: Layout
    unplaced: str | None
    stages: Partition | None = None
    frozen: frozenset[str] = frozenset()

    @property
    def trained(self) -> Tree:
        """Shapes and dtypes of the parameters that are trained."""
        return drop_paths(self.abstract.params, self.frozen)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The shardings of a state and of batches: a layout joined with a model, an optimizer and a mesh.

    Args:
      mesh: the jax mesh.
      layout: the layout, completed for the model.
      synchronisation: how the replicas of this mesh are synchronised.
      specs: the PartitionSpecs of the state.
      state: a `State` of NamedSharding.
      schedule: the schedule of the pipeline, see `pipeline.schedule.make_table`.
      in_float16: whether this island computes in float16, so that its gradients may overflow.
      measures_noise: whether each step measures squared gradient norms for the gradient noise scale.
      accumulate_dtype: dtype in which gradients of several microbatches are added up.
      in_parts: whether the program of the gradients is cut, as in `gradient_pieces.py`, `stage_functions.py`.
    """

    mesh: Mesh
    layout: Layout
    synchronisation: Synchronisation
    specs: Specs
    state: State
    schedule: str = "1f1b"
    in_float16: bool = False
    measures_noise: bool = False
    accumulate_dtype: str = "float32"
    in_parts: bool = False

    @property
    def stages(self) -> Partition | None:
        """The partition of the model's blocks into stages of this mesh; None without a pipeline."""
        return self.specs.stages

    @property
    def batch(self) -> NamedSharding:
        """The sharding of every array of a batch, shape (microbatches, rows, ...)."""
        return NamedSharding(self.mesh, PartitionSpec(None, self.layout.batch_axes))

    @property
    def replica_is_one_cpu(self) -> bool:
        """Whether each replica is one CPU with a whole state, for which XLA compiles some forms badly."""
        device = self.mesh.abstract_mesh.abstract_device
        num_replicas = self.mesh.shape[axes.DATA] if axes.DATA in self.layout.replica_axes else 1
        return self.mesh.size == num_replicas and device is not None and device.platform == "cpu"

    @property
    def compiler_options(self) -> dict[str, bool | str] | None:
        """Compiler options of programs with gradients; None means the defaults."""
        return step_options(self.mesh.devices.flat[0].platform)


def make_placement(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh: Mesh,
    *,
    synchronisation: Synchronisation = Synchronisation(),
    stages: Partition | None = None,
    schedule: str = "1f1b",
    scales_loss: bool = False,
    in_float16: bool = False,
    measures_noise: bool = False,
    accumulate_dtype: str = "float32",
    offload: str = "none",
) -> Placement:
    """Place the state of a model and an optimizer on a mesh, by the rules of a layout.

    Args:
      model: the model.
      optimizer: the optimizer.
      layout: the rules.
      mesh: the mesh.
      synchronisation: how the replicas of this mesh are synchronised.
      stages: the partition of the model's blocks into stages; needed if the axis pipeline is above 1.
      scales_loss: whether the state has a scale of the loss, see `state.LossScale`.
      offload: "optimizer" keeps the arrays of the optimizer in host memory; "none" does not.
      schedule: see `Placement`.
      in_float16: see `Placement`.
      measures_noise: see `Placement`.
      accumulate_dtype: see `Placement`.

    Raises:
      ValueError: lists everything in which the layout does not fit the model; or a parameter has no elements,
        or the devices do not support such host memory.
    """
    check_stages(model, layout, dict(mesh.shape), synchronisation, stages)
    specs = state_specs(model, optimizer, layout, dict(mesh.shape), synchronisation, stages, scales_loss)
    state = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs.state)
    if offload == "optimizer":
        state = state._replace(opt_state=shard_on_host(specs.abstract.opt_state, state.opt_state, mesh))
    return Placement(
        mesh=mesh,
        layout=specs.layout,
        synchronisation=synchronisation,
        specs=specs,
        state=state,
        schedule=schedule,
        in_float16=in_float16,
        measures_noise=measures_noise,
        accumulate_dtype=accumulate_dtype,
    )


def state_specs(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    sizes: Mapping[str, int],
    synchronisation: Synchronisation = Synchronisation(),
    stages: Partition | None = None,
    scales_loss: bool = False,
) -> Specs:
    """Make the specs of the state of a model and an optimizer, for a mesh of these sizes.

    Args:
      model: the model.
      optimizer: the optimizer. An array of its state is sharded like a parameter if its path ends with the
        path of the parameter and it has its shape; otherwise it is replicated.
      layout: the rules.
      sizes: axis -> size, see `layout.axis_sizes`.
      synchronisation: how the replicas of this mesh are synchronised.
      stages: the partition of the model's blocks into stages; None without a pipeline.
      scales_loss: whether the state has a scale of the loss.

    Raises:
      ValueError: lists everything in which the layout does not fit the model; or a parameter has no elements.
    """
    # the order of blocks changes no shape, unless stages have unequal numbers of them
    abstract = abstract_state(model, optimizer, None if stages is None or stages.is_plain else stages)
    if scales_loss:
        abstract = abstract._replace(loss_scale=jax.eval_shape(init_loss_scale))
    arrays = name_arrays(model, abstract.params)
    check_elements(arrays)
    check_operators(layout, sizes, synchronisation)
    # 1. the layout must fit the model: every rule is for a dim of some parameter
    dims = {dim for named in arrays.values() for dim in named.dims or () if dim is not None}
    known = sorted(dims | set(PARAMETER_RULES))
    refuse(
        "the layout has rules for parameters that the model does not have",
        [f"no such dim: {near(dim, known)}" for dim in layout.parameters if dim not in known],
    )
    unplaced = format_unplaced(layout, arrays, sizes)
    layout = complete_layout(layout, arrays, sizes)
    check_experts(arrays, layout.sharded_rules, sizes)
    # 2. two specs for each parameter: for its storage, and for its gradient and optimizer state (ZeRO)
    params, sharded = (
        partition_specs(arrays, abstract.params, rules, sizes, layout.unnamed, layout.of_parameters)
        for rules in (layout.parameter_rules, layout.sharded_rules)
    )
    if not synchronisation.is_mean:
        check_data_axis(sharded)
        if stages is not None:
            check_layers(sharded, find_stacked_paths(arrays, sharded))
    whole, by_replica = PartitionSpec(), PartitionSpec(axes.DATA)
    like_params = _make_specs_like_params(abstract.opt_state, abstract.params, sharded)

    # 3. the whole state; arrays that differ between replicas get a leading dim over data
    specs = Specs(abstract, arrays, params, sharded, abstract, layout, unplaced, stages, model.frozen)
    if not synchronisation.is_mean:
        abstract = jax.eval_shape(lambda s: add_replicas(s, synchronisation, sizes, specs), abstract)
    state = State(
        step=whole,
        seed=whole,
        params=params,
        model_state=jax.tree.map(lambda _: whole, abstract.model_state),
        opt_state=add_leading_dim(like_params, axes.DATA) if synchronisation.on_deltas else like_params,
        combine_state=jax.tree.map(lambda _: PartitionSpec(tuple(sizes)), abstract.combine_state),
        local=make_local_layout(synchronisation, add_leading_dim(sharded, axes.DATA), by_replica)
        if abstract.local
        else (),
        outer_state=_make_outer_specs(synchronisation, specs),
        loss_scale=jax.tree.map(lambda _: whole, abstract.loss_scale),
    )
    return specs._replace(abstract=abstract, state=state)


def find_own_shardings(
    synchronisation: Synchronisation, placement: Placement, state: State, sums: Any = ()
) -> State:
    """Return the shardings of an island's state with what it changes alone.

    Args:
      synchronisation: how islands are synchronised.
      placement: the placement of the parameters on this island.
      state: the state of this island, or its shapes or shardings.
      sums: what is added up between merges.
    """
    mesh, specs = placement.mesh, placement.specs
    whole = NamedSharding(mesh, PartitionSpec())
    drift, outer = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), (specs.sharded, _make_outer_specs(synchronisation, specs))
    )
    local = make_local_layout(synchronisation, drift, whole, jax.tree.map(lambda _: whole, sums))
    local = local._replace(model_state=jax.tree.map(lambda _: whole, state.model_state))
    return state._replace(combine_state=whole, local=local, outer_state=outer)


def _make_outer_specs(synchronisation: Synchronisation, specs: Specs) -> Any:
    """Return the specs of the outer optimizer's state: each array is sharded like its parameter."""
    outer, params = synchronisation.outer_optimizer, specs.abstract.params
    fragments = split_fragments(synchronisation, specs)
    state = jax.eval_shape(lambda params: init_outer(fragments, outer, params), params)
    return tuple(
        _make_specs_like_params(own, each.take(params), each.select(specs.sharded))
        for each, own in zip(fragments, state, strict=False)
    )


def _make_specs_like_params(opt_state: Any, params: Tree, specs: Any) -> Any:
    """Return the spec of each array of an optimizer's state: arrays are sharded like their parameters."""
    by_path, shapes = group_by_path(specs), group_by_path(params)

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        # an array of the optimizer that belongs to a parameter has its shape, and a path that ends in its
        # path
        keys = path_text(path).split("/")
        for start in range(len(keys)):
            name = "/".join(keys[start:])
            if name in shapes and shapes[name].shape == leaf.shape:
                return by_path[name]
        return PartitionSpec()

    return jax.tree.map_with_path(spec, opt_state)


def constrain(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Constrain every array of a tree to its PartitionSpec, inside jit."""
    return jax.tree.map(lambda x, spec: with_sharding_constraint(x, NamedSharding(mesh, spec)), tree, specs)


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
    return attach_shardings(placement.specs.abstract, placement.state)


def attach_shardings(shapes: Any, shardings: Any) -> Any:
    """Return the shapes and dtypes of a tree with shardings, of which one may be for a whole subtree."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        jax.tree.broadcast(shardings, shapes),
    )
