"""Compare the gradients of a few rows on the run's mesh with the gradients on one device.

The compiler's partitioner can be silently wrong (docs/xla/README.md), and so can a shard_map of the user's
model. Next: `prepared_run.py`, which calls this check.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from shardtrain import axes
from shardtrain.axes import TENSOR
from shardtrain.data import Batch, place, process_rows
from shardtrain.functional.activation_rules import activation_rules, noting
from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.collective_matmul import NOTED
from shardtrain.functional.model import Model, path_text
from shardtrain.functional.rng import new_key, step_key
from shardtrain.functional.traced_loss import trace_few_rows, trace_loss
from shardtrain.jaxpr.equations import list_equations
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.single_arrays import OPERATOR_AXES
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.placement import Placement, init_state, make_placement
from shardtrain.train_step.state import order_stage_blocks
from shardtrain.trainer.config import Run, parse_checked_rows
from shardtrain.trainer.setup import FIRST_POSITION, RunSetup, count_parts, load_first_rows

_COVERED = """
    abs add add_any and argmax argmin asin atan2 bitcast_convert_type broadcast_in_dim cbrt ceil
    checkpoint clamp concatenate cond conv_general_dilated convert_element_type copy copy_p cos
    cumlogsumexp cummax cumprod cumsum custom_jvp_call custom_vjp_call div dot_general dynamic_slice
    dynamic_update_slice eq erf erf_inv exp exp2 expm1 fft floor gather ge gt integer_pow iota
    is_finite jit le log log1p logistic lt max min mul name ne neg not optimization_barrier or pad
    pow random_bits random_fold_in random_seed random_split random_unwrap random_wrap real
    reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum reduce_window
    reduce_window_max reduce_window_sum rem remat2 reshape reshard rev round rsqrt scan scatter
    scatter-add select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical
    sign sin slice sort split sqrt square squeeze stack stop_gradient sub tan tanh threefry2x32
    top_k transpose while xor
"""
COVERED = frozenset(_COVERED.split())
"""Operations with which random models on random meshes were right (tests/fuzz)."""

TOLERANCES = {2: 0.1, 4: 0.01}
"""Bytes of the narrowest floats -> largest difference by rounding, relative to a gradient's largest entry."""

LEAST = 1e-4
"""Smallest scale of a gradient, relative to the largest entry of all gradients."""


def check_layout(run: Run, setup: RunSetup, batches: Any, note: Callable[[str], None]) -> None:
    """Check that gradients on the mesh equal those of one device, see `Run.check_layout`.

    Stages on islands are not checked: no island has the whole model.

    Args:
      run: the run.
      setup: its model, mesh and placement.
      batches: the batches of the run, on any process.
      note: receives the result.

    Raises:
      ValueError: they differ by more than rounding.
    """
    sizes = {axis: size for axis, size in setup.mesh.shape.items() if size > 1}
    # the partitioner is most often wrong where each operator has a sharding of its own
    asked = run.check_layout != "auto" or bool(run.strategy.layout.operators)
    rows_of_device = parse_checked_rows(run.check_layout)
    if not rows_of_device or len(sizes) < (1 if asked else 2) or setup.grid is not None:
        return
    shapes = load_first_rows(batches, 1)
    num_parts = count_parts(run, setup.mesh, 1) * (run.elastic.slots or 1)
    program, num_rows = trace_few_rows(
        lambda number: trace_loss(setup.whole_model, run.loss, shapes, number),
        batches.num_rows(FIRST_POSITION) // num_parts,
    )
    # a loss of groups of rows takes as many as in the run
    rows_of_device = rows_of_device if num_rows == 2 else num_rows
    traced = [each.equation for each in list_equations(program)]
    unusual = sorted({equation.primitive.name for equation in traced} - COVERED)
    if not (asked or unusual):
        return
    began_seconds = time.monotonic()
    # a schedule of stages is made for the run's number of microbatches
    num_microbatches = run.strategy.accumulate if setup.placement.stages else 1
    # operators may split rows over any of their axes
    over = OPERATOR_AXES if run.strategy.layout.operators else setup.placement.layout.batch_axes
    num_devices = math.prod(setup.mesh.shape[axis] for axis in over)
    rows = load_first_rows(batches, rows_of_device * num_devices * num_microbatches)
    differences = _compare(run, setup, rows, num_microbatches)
    # rounding is that of the narrowest floats
    dtypes = {x.aval.dtype for equation in traced for x in equation.outvars if hasattr(x.aval, "dtype")}
    floats = [max(dtype.itemsize, 2) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    most = TOLERANCES[min([4, *floats])]
    wrong = {path: off for path, off in differences.items() if not off <= most}
    if wrong:
        raise ValueError(_difference_text(sizes, wrong, len(differences), unusual))
    note(
        f"layout checked: the gradients of {len(next(iter(rows.values())))} rows equal those of one device"
        f" up to {max(differences.values()):.0e} ({time.monotonic() - began_seconds:.1f} s)"
    )


def _compare(run: Run, setup: RunSetup, rows: Batch, num_microbatches: int) -> dict[str, float]:
    """Return path -> largest difference from one device, relative to the largest entry of the gradient."""
    given, model, mesh = setup.placement, setup.model, setup.mesh
    placement = make_placement(
        model, optax.identity(), run.strategy.layout, mesh, stages=given.stages, schedule=given.schedule
    )
    num_replicas = math.prod(mesh.shape[axis] for axis in placement.layout.replica_axes)
    # batch statistics are computed over the rows of a replica, so one device computes as many parts
    parts = num_microbatches * (1 if model.axis_name else num_replicas)
    found = _gradients(run, model, placement, rows, num_microbatches)
    one = Layout(mesh={axes.DATA: 1})
    one_device = make_placement(model, optax.identity(), one, make_mesh(one, jax.local_devices()[:1]))
    expected = jax.device_get(_gradients(run, model, one_device, rows, parts))
    expected = jax.device_get(order_stage_blocks(given.stages)(expected))

    def on_mesh(x: np.ndarray, spec: Any) -> jax.Array:
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), x.__getitem__)

    expected = jax.tree.map(on_mesh, expected, placement.specs.sharded)

    def largest_differences(found: Any, expected: Any) -> tuple[Any, Any]:
        largest = jax.tree.map(lambda x: jnp.max(jnp.abs(x)), expected)
        return largest, jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)), found, expected)

    largest, off = jax.device_get(jax.jit(largest_differences)(found, expected))
    least = LEAST * max(map(float, jax.tree.leaves(largest)))
    scale = jax.tree.map(lambda x: max(float(x), least, float(jnp.finfo(jnp.float32).tiny)), largest)
    relative = jax.tree.map(lambda x, scale: float(x) / scale, off, scale)
    return {path_text(path): x for path, x in jax.tree.leaves_with_path(relative)}


def _gradients(run: Run, model: Model, placement: Placement, rows: Batch, microbatches: int) -> Any:
    state = init_state(model, optax.identity(), placement, run.seed)
    mesh, batch_axes, num_rows = placement.mesh, placement.layout.batch_axes, len(next(iter(rows.values())))
    own = process_rows(num_rows, mesh, batch_axes, microbatches)
    batch = place({name: x[own] for name, x in rows.items()}, mesh, batch_axes, microbatches, num_rows)
    gradients = make_gradients(model, run.loss, placement)
    compute = jax.jit(gradients, compiler_options=placement.compiler_options)
    return compute(state.params, state.model_state, step_key(state.seed, state.step), batch).grads


def _difference_text(
    sizes: Mapping[str, int], wrong: Mapping[str, float], num_parameters: int, unusual: Sequence[str]
) -> str:
    """Format the error for gradients that differ from those of one device."""
    worst = max(wrong, key=lambda path: wrong[path] if wrong[path] == wrong[path] else math.inf)
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    untried = f" It has operations that were not tried on meshes: {', '.join(unusual)}." if unusual else ""
    return (
        f"on the mesh {mesh} the gradients of {len(wrong)} of {num_parameters} parameters differ from one"
        f" device: {worst!r} is off by {wrong[worst]:.1%} of its largest entry.{untried} If the"
        " model has its own shard_map, correct its collectives; else the compiler splits the model"
        f" wrongly: use one axis, data={math.prod(sizes.values())}, or name the dims of activations by"
        " nn.with_logical_constraint. --check-layout off trains with these gradients"
    )


def check_sequences(run: Run, model: Model, sizes: Mapping[str, int], microbatch: Batch) -> None:
    """Trace the loss over sharded sequences, without devices, as the step of a run would.

    Args:
      run: the run.
      model: its model.
      sizes: axis -> size.
      microbatch: a batch as the loss receives it, arrays or shapes.

    Raises:
      ValueError: attention cannot split the sequences or heads; a constraint has no rule; or the layout has
        collective matmul, and no product uses it.
    """
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    params, model_state = jax.eval_shape(lambda: model.init(new_key(0)))

    def loss(params: Any, model_state: Any, key: jax.Array, batch: Any) -> Any:
        apply = lambda *inputs: model.apply(params, model_state, key, True, *inputs)[0]  # noqa: E731
        return sum_loss(run.loss, apply, batch, rng=key)[0]

    layout = run.strategy.layout
    notes: list[str] = []
    with noting(notes.append), activation_rules(layout.activation_rules, mesh, *layout.tracing):
        jax.eval_shape(loss, params, model_state, jax.eval_shape(lambda: new_key(0)), microbatch)
    if layout.collective_matmul and sizes[TENSOR] > 1 and not any(note.startswith(NOTED) for note in notes):
        raise ValueError(
            f"collective_matmul is set, and no product of this model is computed part by part over"
            f" tensor={sizes[TENSOR]}: it leaves none to the run, as the transformers of this library do; or"
            " context times tensor does not divide the positions of its sequences; or the layout has rules"
            " that shard residual_seq, heads or mlp otherwise. Set collective_matmul = false"
        )
