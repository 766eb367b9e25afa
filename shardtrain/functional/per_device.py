"""Compute convolutions, FFTs and some lookups of traced models on each device from its own rows.

XLA's partitioner gets convolutions wrong and fails at the others (docs/decisions/0059). Importing this module
installs the rule; it acts while a model is traced for several devices (`activation_rules.py`).
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.functional.mesh_axes import auto_axes, axis_names, find_mesh_axes, num_devices
from shardtrain.functional.run_trace import TRACE, note

Split = tuple[tuple[PartitionSpec, ...], PartitionSpec, dict[str, Any]]
"""The specs of an operation's operands and of its result; the parameters that differ on a device."""


def install(primitive: Any, split: Callable[..., Split | None]) -> None:
    """Make a primitive run per device wherever the rules of a run are active.

    Args:
      primitive: the operation.
      split: (operands, parameters, mesh) -> `Split`, or None where XLA may partition the operation.
    """
    bind = primitive.bind

    def bind_per_device(*operands: Any, **parameters: Any) -> Any:
        trace, mesh = TRACE.get(), jax.sharding.get_abstract_mesh()
        if trace is None or trace.any_mesh or _is_mapped_by_model(operands):
            return bind(*operands, **parameters)
        auto = auto_axes(mesh)
        found = split(operands, parameters, mesh) if num_devices(tuple(auto), mesh.shape) > 1 else None
        if found is None:
            return bind(*operands, **parameters)
        in_specs, out_specs, own = found
        split_axes = {axis for spec in in_specs for entry in spec for axis in axis_names(entry)}

        def run(*operands: jax.Array) -> Any:
            # all vary over the same axes: so the gradient of what each device has whole is summed
            return bind(*(_vary(x, split_axes) for x in operands), **{**parameters, **own})

        # replicas, a vmap around this, add their axes to the specs
        per_device = jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, axis_names=auto)
        _note_repeated(primitive.name, mesh, split_axes)
        return per_device(*operands)

    primitive.bind = bind_per_device


def _is_mapped_by_model(operands: tuple[Any, ...]) -> bool:
    """Return whether the model's own vmap is around the operation: jax merges its dim, and binds again."""
    mapped = [getattr(getattr(x, "_trace", None), "axis_data", None) for x in operands]
    return any(data is not None and data.spmd_name is None for data in mapped)


def _vary(x: jax.Array, names: set[str]) -> jax.Array:
    missing = tuple(names - jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _note_repeated(name: str, mesh: Any, split_axes: set[str]) -> None:
    """Log the axes along which several devices compute the same; replicas never do."""
    repeated = [
        f"{axis}={mesh.shape[axis]}"
        for axis in (axes.CONTEXT, axes.TENSOR)
        if mesh.shape[axis] > 1 and axis not in split_axes
    ]
    if repeated:
        note(f"{name}: devices along {', '.join(repeated)} each compute all of it")


def _fit_axes(names: tuple[str, ...], size: int, mesh: Any) -> tuple[str, ...]:
    """Return the first of these axes, as many as divide a dim."""
    while size % num_devices(names, mesh.shape):
        names = names[:-1]
    return names


def _spec(ndim: int, names: dict[int, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(names.get(dim) or None for dim in range(ndim)))


def _split_convolution(operands: Any, parameters: Any, mesh: Any) -> Split:
    """Split the images over the axes of rows, and the channels of the result over theirs, by whole groups."""
    lhs, rhs = operands
    lhs_dims, rhs_dims, out_dims = parameters["dimension_numbers"]
    groups = parameters["feature_group_count"]
    rows, channels = find_mesh_axes(axes.BATCH, axes.CHANNELS_OUT)
    rows = _fit_axes(rows if parameters["batch_group_count"] == 1 else (), lhs.shape[lhs_dims[0]], mesh)
    # kernels without names are whole on devices along tensor, and so is what surrounds them
    trace = TRACE.get()
    is_named = trace is not None and trace.unnamed == "refuse"
    channels = _fit_axes(
        channels if is_named else (), rhs.shape[rhs_dims[0]] if groups == 1 else groups, mesh
    )
    of_lhs = _spec(lhs.ndim, {lhs_dims[0]: rows, lhs_dims[1]: () if groups == 1 else channels})
    of_rhs = _spec(rhs.ndim, {rhs_dims[0]: channels})
    of_out = _spec(lhs.ndim, {out_dims[0]: rows, out_dims[1]: channels})
    own = {} if groups == 1 else {"feature_group_count": groups // num_devices(channels, mesh.shape)}
    return (of_lhs, of_rhs), of_out, own


def _split_fft(operands: Any, parameters: Any, mesh: Any) -> Split:
    """Split the first dim over the axes of rows, unless it is transformed."""
    (x,) = operands
    (rows,) = find_mesh_axes(axes.BATCH)
    rows = _fit_axes(rows, x.shape[0], mesh) if x.ndim > len(parameters["fft_lengths"]) else ()
    spec = _spec(x.ndim, {0: rows})
    return (spec,), spec, {}


def _split_lookup(operands: Any, parameters: Any, mesh: Any) -> Split | None:
    """Split the first dim over the axes of rows, if it is one of lookups, in stages of a pipeline.

    There XLA looks up parts of sequences by permutes, for which stages wait for ever, and ends the process at
    lookups of each row in its own entries. It may look up whole rows in a table, which may be sharded.
    """
    if mesh.shape[axes.PIPELINE] == 1:
        return None
    table, indices = operands
    dims = parameters["dimension_numbers"]
    rows, *parts = (find_mesh_axes(dim)[0] for dim in (axes.BATCH, axes.SEQ, axes.RESIDUAL_SEQ))
    if not dims.operand_batching_dims and num_devices(tuple(itertools.chain(*parts)), mesh.shape) == 1:
        return None
    rows = _fit_axes(rows, indices.shape[0], mesh) if indices.ndim > 1 and 0 not in dims.offset_dims else ()
    of_table = dict(zip(dims.start_indices_batching_dims, dims.operand_batching_dims, strict=True)).get(0)
    in_specs = _spec(table.ndim, {} if of_table is None else {of_table: rows}), _spec(indices.ndim, {0: rows})
    return in_specs, _spec(indices.ndim - 1 + len(dims.offset_dims), {0: rows}), {}


install(jax.lax.conv_general_dilated_p, _split_convolution)
install(jax.lax.gather_p, _split_lookup)
install(jax.lax.fft_p, _split_fft)
