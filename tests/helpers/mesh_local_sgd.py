"""Replicas of a small mesh that take local steps, beside the float64 reference of the same."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from local_sgd import local_sgd
from tiny_language_model import TinyConfig

from shardtrain.combine.fragments import Fragment, group_by_path
from shardtrain.combine.synchronisation import Outer
from shardtrain.data import place
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.pipeline.stacking import Partition
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.state import split_fragments
from shardtrain.train_step.step import make_step

MODEL = from_nnx(TinyConfig(vocab=16, embed=8, mlp=8, num_layers=3))
ROWS, SEQ, RATE, STEPS = 16, 4, 0.5, 5
SGD, ADAM = optax.sgd(RATE), optax.adam(1e-2)
NESTEROV = Outer(learning_rate=0.7, momentum=0.9, nesterov=True)
MESHES = {
    "data": {"data": 4},
    "data+fsdp": {"data": 4, "fsdp": 2},
    "data+tensor": {"data": 2, "tensor": 2},
    "data+pipeline": {"data": 2, "pipeline": 2},
}
STAGES, MICROBATCHES = Partition(num_stages=2, counts=(1, 2)), 2  # stored with a row of padding


@cache
def batches():
    random = np.random.default_rng(1)
    weights = np.ones(ROWS, np.float32)
    weights[-3:] = 0  # of four replicas the last one has a single example
    tokens = random.integers(0, 16, (STEPS, ROWS, SEQ + 1), np.int32)
    return [{"tokens": each, "weights": weights} for each in tokens]


def part(batch, replica, num_replicas):
    rows = ROWS // num_replicas
    return {name: x[replica * rows : (replica + 1) * rows] for name, x in batch.items()}


def by_microbatch(batch, num_replicas):
    """The rows in the order of microbatches, in each of which a replica has some of its own rows."""
    rows = np.arange(ROWS).reshape(num_replicas, MICROBATCHES, -1).swapaxes(0, 1).ravel()
    return {name: x[rows] for name, x in batch.items()}


@jax.jit
def plain_gradient(params, batch):
    def loss(params):
        apply = lambda *inputs: MODEL.apply(params, {}, jax.random.key(0), True, *inputs)[0]  # noqa: E731
        total, count, *_ = next_token_loss(apply, jax.tree.map(jnp.asarray, batch))
        return total / count

    return jax.grad(loss)(params)


@cache
def make(synchronisation, mesh, optimizer, last_step):
    """The placement and the step, compiled once."""
    layout = Layout(mesh=dict(mesh))
    jax_mesh = make_mesh(layout, jax.devices()[: math.prod(layout.mesh.values())])
    stages = STAGES if "pipeline" in layout.mesh else None
    placement = make_placement(
        MODEL, optimizer, layout, jax_mesh, synchronisation=synchronisation, stages=stages
    )
    return placement, make_step(MODEL, next_token_loss, optimizer, placement, last_step=last_step)


def steps(
    synchronisation, mesh, num_steps=STEPS, optimizer=None, state=None, first=0, last_step=-1, logged=None
):
    """The states after each step, on the host; and the placement. Metrics are appended to `logged`."""
    optimizer = optimizer or SGD
    placement, step = make(synchronisation, tuple(mesh.items()), optimizer, last_step)
    stages, layout = placement.stages, placement.layout
    state = init_state(MODEL, optimizer, placement, 3) if state is None else state
    found = [jax.device_get(state)]
    state = jax.device_put(state, placement.state)
    for batch in batches()[first:num_steps]:
        if stages is not None:
            batch = by_microbatch(batch, mesh["data"])
        batch = place(batch, placement.mesh, layout.batch_axes, 1 if stages is None else MICROBATCHES)
        state, metrics = step(state, batch)
        assert metrics["skipped"] == 0
        if logged is not None:
            logged.append(jax.device_get(metrics))
        found.append(jax.device_get(state))
    return found, placement


def expected(synchronisation, num_replicas, params, placement, **changes):
    params = in_order(params, placement.stages)
    counts = [part(batches()[0], r, num_replicas)["weights"].sum() * SEQ for r in range(num_replicas)]
    gradient = lambda params, r, step: plain_gradient(params, part(batches()[step - 1], r, num_replicas))  # noqa: E731
    fragments = [
        Fragment({path: rows and _blocks(rows, placement.stages) for path, rows in each.rows.items()})
        for each in split_fragments(synchronisation, placement.specs)
    ]
    return local_sgd(gradient, params, counts, STEPS, synchronisation, RATE, fragments, **changes)


def in_order(params, stages):
    """The parameters with their blocks in the model's order."""
    if stages is None:
        return params
    return {**params, "blocks": jax.tree.map(stages.restore_order, params["blocks"])}


def _blocks(rows, stages):
    stored = rows if stages is None else [stages.stored_blocks[row] for row in rows]
    return tuple(block for block in stored if block >= 0)


def same(params, reference, name, stages=None):
    for path, x in group_by_path(in_order(params, stages)).items():
        np.testing.assert_allclose(x, reference[path], 1e-5, 2e-6, err_msg=f"{name}: {path}")


def check_steps(synchronisation, mesh, last_step=-1, **changes):
    """Compare the parameters after each step with the reference; return the states and the placement."""
    states, placement = steps(synchronisation, mesh, last_step=last_step)
    start, options = states[0].params, {"last_step": last_step, **changes}
    reference = expected(synchronisation, mesh["data"], start, placement, **options)
    for number, (state, params) in enumerate(zip(states[1:], reference, strict=True), 1):
        same(state.params, params, f"step {number}", placement.stages)
    return states, placement
