"""Run a function for each replica of a mesh, over a leading dim that is sharded over the replica axes.

Next: `replica_sums.py`, `stage_functions.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.train_step.placement import Placement


def map_replicas(
    function: Callable[..., Any],
    in_axes: Sequence[int | None],
    placement: Placement,
    axis_name: str | None = None,
) -> Callable[..., Any]:
    """Map the function of one replica over a dim of replicas, for use inside jit.

    Args:
      function: the function of one replica.
      in_axes: for each argument, the dim of its arrays that counts replicas; None if there is no such dim.
      placement: the placement of the state, whose layout has the replica axes.
      axis_name: the name of the dim inside the function, for models with collectives over replicas.

    Returns:
      A function whose results have a leading dim of replicas.
    """
    replica_axes = placement.layout.replica_axes
    if axis_name is None and all(placement.mesh.shape[axis] == 1 for axis in replica_axes):
        return _run_only_replica(function, in_axes)
    # spmd_axis_name shards the leading dim that vmap makes, so each device computes its own replica
    mapped = jax.vmap(function, tuple(in_axes), axis_name=axis_name, spmd_axis_name=replica_axes or None)
    if axis_name is not None or not placement.replica_is_one_cpu or placement.in_parts:
        return mapped
    # every device of the axis data runs it with its own part of the dim of replicas
    specs = [PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, axes.DATA) for dim in in_axes]
    by_device = jax.shard_map(
        _run_only_replica(function, in_axes),
        mesh=placement.mesh,
        axis_names={axes.DATA},
        in_specs=tuple(specs),
        out_specs=PartitionSpec(axes.DATA),
        check_vma=False,
    )

    def either(*arguments: Any) -> Any:
        # jax cannot compile a callback, such as that of jax.debug.print, where some axes are manual
        has_callbacks = bool(jax.make_jaxpr(mapped)(*arguments).effects)
        return (mapped if has_callbacks else by_device)(*arguments)

    return either


def _run_only_replica(function: Callable[..., Any], in_axes: Sequence[int | None]) -> Callable[..., Any]:
    """Do what vmap does over a dim of size 1, without that dim inside the function.

    XLA for CPUs has much slower loops for arrays of four dims than of three dims.
    """

    def without(argument: Any, axis: int | None) -> Any:
        return argument if axis is None else jax.tree.map(lambda x: jnp.squeeze(x, axis), argument)

    def only(*arguments: Any) -> Any:
        results = function(*(without(*each) for each in zip(arguments, in_axes, strict=True)))
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), results)

    return only
