"""The gradient noise scale of a step: known noise is found, on any mesh, and nothing else changes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.functional.loss import next_token_loss
from shardtrain.pipeline.cuts import make_partition
from shardtrain.pipeline.options import Pipeline
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.step import make_step
from shardtrain.trainer.config import Run
from shardtrain.trainer.setup import make_setup
from shardtrain.trainer.strategy import Strategy

DIMS, NOISE, START = 24, 1.5, 0.4
STAY = optax.set_to_zero()


def start_point(rng: jax.Array) -> tuple[Any, Any]:
    """The point at which all gradients are."""
    return {"point": jnp.full(DIMS, START)}, ()


POINT = st.Model(
    init=start_point,
    apply=lambda params, state, rng, train: (params["point"], state),
    dims={"point": ("embed",)},
)


def quadratic(apply, batch):
    """|w - x|^2 / 2: its gradient is w less the mean of x, with the noise of x."""
    far = jnp.square(apply() - batch["x"]).sum(1) / 2
    return (far * batch["weights"]).sum(), batch["weights"].sum()


def batches(number, rows):
    """Draws around 0, so that |G|^2 is DIMS START^2, and tr(Sigma) is DIMS NOISE^2."""
    draw = np.random.default_rng(0)
    for _ in range(number):
        x = draw.normal(0, NOISE, (rows, DIMS)).astype(np.float32)
        yield {"x": x, "weights": (draw.random(rows) < 0.8).astype(np.float32)}


def tokens_of(rows):
    """A batch of whole rows."""
    return {"tokens": rows, "weights": np.ones(len(rows), np.float32)}


def noise_of(metrics):
    """The estimates of a step, as float64."""
    return np.array([float(metrics[f"gradient_{name}"][0]) for name in ("square", "trace", "batch")])


def estimate(parts):
    """The same from the gradients of sums and counts of all parts, solved by least squares in float64."""
    grads, counts = (np.array(x, np.float64) for x in zip(*parts, strict=True))
    whole, count = grads.sum(0), counts.sum()
    # E|S|^2 = count^2 |G|^2 + count tr(Sigma), for the sum over parts and for the whole
    known = np.array([[np.square(counts).sum(), count], [count**2, count]])
    square, trace = np.linalg.solve(known, [np.square(grads).sum(), np.square(whole).sum()])
    return np.array([square, trace, count])


@pytest.mark.parametrize(("sizes", "microbatches"), [({"data": 3}, 2), ({"fsdp": 2}, 3)])
def test_known_noise_is_found_from_unequal_parts(sizes, microbatches):
    layout = Layout(mesh=sizes)
    mesh = make_mesh(layout, jax.devices()[: math.prod(sizes.values())])
    replicas = sizes.get("data", 1)
    placement = make_placement(POINT, STAY, layout, mesh, measures_noise=True)
    step, state = make_step(POINT, quadratic, STAY, placement), init_state(POINT, STAY, placement)
    found = []
    for batch in batches(300, 24):
        state, metrics = step(state, st.place(batch, mesh, layout.batch_axes, microbatches))
        parts = []
        for x, weights in zip(
            *(np.split(batch[name], microbatches * replicas) for name in ("x", "weights")), strict=True
        ):
            parts.append((((START - x) * weights[:, None]).sum(0), weights.sum()))
        found.append(noise_of(jax.device_get(metrics)))
        np.testing.assert_allclose(found[-1], estimate(parts), rtol=1e-3, atol=1e-3)
    square, trace, batch = np.mean(found, axis=0)
    # 300 steps of about 19 examples: the standard error of |G|^2 is 3 % and that of tr(Sigma) below 1 %
    assert square == pytest.approx(DIMS * START**2, rel=0.12)
    assert trace == pytest.approx(DIMS * NOISE**2, rel=0.04)
    assert batch == pytest.approx(0.8 * 24, rel=0.03)


def test_measuring_changes_losses_and_parameters_by_rounding_alone():
    optimizer, layout, got = optax.adam(1e-2), Layout(mesh={"data": 2}), []
    mesh = make_mesh(layout, jax.devices()[:2])
    for measures in (False, True):
        placement = make_placement(POINT, optimizer, layout, mesh, measures_noise=measures)
        step, state = (
            make_step(POINT, quadratic, optimizer, placement),
            init_state(POINT, optimizer, placement),
        )
        losses = []
        for batch in batches(3, 8):
            state, metrics = step(state, st.place(batch, mesh, layout.batch_axes, 2))
            losses.append(metrics["loss_sum"])
        assert ("gradient_trace" in metrics) == measures
        got.append(jax.device_get((losses, state.params)))
    for a, b in zip(*map(jax.tree.leaves, got), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-7)


def test_a_pipeline_measures_its_replicas():
    model = st.from_nnx(TinyConfig(num_layers=2))
    tokens = np.random.default_rng(0).integers(0, 256, (8, 9), np.int32)
    # rows of a replica: its half of each microbatch
    by_replica = tokens.reshape(2, 2, 2, 9).transpose(1, 0, 2, 3).reshape(8, 9)
    got = []
    for sizes, rows, microbatches in (({"data": 2}, by_replica, 1), ({"pipeline": 2, "data": 2}, tokens, 2)):
        layout = Layout(mesh=sizes)
        mesh = make_mesh(layout, jax.devices()[: math.prod(sizes.values())])
        stages = None
        if "pipeline" in sizes:
            stages = make_partition(model, Pipeline(), 2, next_token_loss, tokens_of(tokens[:4]))
        placement = make_placement(model, STAY, layout, mesh, stages=stages, measures_noise=True)
        step, state = make_step(model, next_token_loss, STAY, placement), init_state(model, STAY, placement)
        _, metrics = step(state, st.place(tokens_of(rows), mesh, layout.batch_axes, microbatches))
        got.append(noise_of(jax.device_get(metrics)))
    np.testing.assert_allclose(*got, rtol=1e-4)


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        (
            Strategy(layout=Layout(mesh={"fsdp": 2})),
            "1 replica and 1 microbatch; use --accumulate 2, or",
        ),
        (
            Strategy(layout=Layout(mesh={"pipeline": 2}), accumulate=2),
            "1 microbatch (a pipeline adds up its own); use --mesh data=2, or leave it out",
        ),
    ],
)
def test_a_single_gradient_tells_no_noise(strategy, problem):
    run = Run(model=TinyConfig(num_layers=2), data=st.Text(), strategy=strategy, gradient_noise_scale=True)
    mesh = make_mesh(strategy.layout, jax.devices()[:2])
    with pytest.raises(ValueError) as error:
        make_setup(run, microbatch=tokens_of(np.zeros((2, 9), np.int32)), mesh=mesh)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        (Strategy(synchronisation=st.Synchronisation(by="adasum")), "combine 'adasum' on gradients, whose"),
        (
            Strategy(synchronisation=st.Synchronisation(on="deltas", every=2)),
            "combine 'mean' on deltas, whose",
        ),
        (Strategy(across=st.Across(axis="pipeline")), "across 'pipeline', where each stage knows"),
    ],
)
def test_runs_whose_gradient_is_no_mean_are_refused(strategy, problem):
    with pytest.raises(ValueError) as error:
        Run(model=POINT, data=st.Text(), strategy=strategy, gradient_noise_scale=True)
    assert f"gradient_noise_scale is on, with {problem}" in str(error.value)
