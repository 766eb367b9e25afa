"""The scale of the loss: when it changes, and that it changes no number of a step in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_language_model import TinyConfig

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import place
from shardtrain.functional.compute_dtype import set_compute_dtype
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.state import (
    FIRST,
    GOOD_STEPS,
    LARGEST,
    SMALLEST,
    LossScale,
    adjust_loss_scale,
)
from shardtrain.train_step.step import make_step


def after(scale, good_steps, finite):
    found = adjust_loss_scale(LossScale(jnp.float32(scale), jnp.int32(good_steps)), jnp.bool(finite))
    return found.scale.item(), found.good_steps.item()


def test_it_is_halved_by_an_overflow_and_doubled_after_many_good_steps():
    assert after(8, 5, False) == (4, 0)
    assert after(8, 5, True) == (8, 6)
    assert after(8, GOOD_STEPS - 1, True) == (16, 0)
    assert after(LARGEST, GOOD_STEPS - 1, True) == (LARGEST, 0)
    assert after(SMALLEST, 0, False) == (SMALLEST, 0)
    assert adjust_loss_scale((), jnp.bool(False)) == ()


def test_gradients_that_vanish_in_float16_are_those_of_float32():
    config, layout = TinyConfig(num_layers=1), Layout(mesh={"data": 1})
    mesh = make_mesh(layout, jax.devices()[:1])
    tokens = np.random.default_rng(0).integers(0, 256, (4, 9), np.int32)
    batch = place({"tokens": tokens, "weights": np.ones(4, np.float32)}, mesh, layout.batch_axes, 1)

    def small_loss(apply, batch):
        total, count = next_token_loss(apply, batch)
        return 1e-7 * total, count

    def gradient(dtype, scale):
        model = set_compute_dtype(config, dtype)
        placement = make_placement(model, optax.identity(), layout, mesh)
        params = init_state(model, optax.identity(), placement).params
        gradients = jax.jit(make_gradients(model, small_loss, placement))
        found = gradients(params, {}, jax.random.key(0), batch, 0, scale).grads
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(found)])

    def error(scale):
        return np.linalg.norm(gradient("float16", scale) - expected) / np.linalg.norm(expected)

    expected = gradient("float32", 1)
    assert error(FIRST) < 0.01
    assert error(1) > 0.1


@pytest.mark.parametrize(
    "synchronisation",
    [Synchronisation(), Synchronisation(by="adasum", on="deltas", every=2)],
)
def test_a_step_in_float32_has_the_same_numbers_and_skips_what_is_not_finite(synchronisation):
    model, optimizer = from_nnx(TinyConfig(num_layers=1)), optax.adam(1e-2)
    layout = Layout(mesh={"data": 2})
    mesh = make_mesh(layout, jax.devices()[:2])
    tokens = np.random.default_rng(0).integers(0, 256, (3, 4, 9), np.int32)
    states = []
    for scales_loss in (False, True):
        placement = make_placement(
            model, optimizer, layout, mesh, synchronisation=synchronisation, scales_loss=scales_loss
        )
        step = make_step(model, next_token_loss, optimizer, placement)
        state = init_state(model, optimizer, placement)
        for number, rows in enumerate(tokens):
            weights = np.full(4, np.inf if number == 2 else 1.0, np.float32)
            state, metrics = step(
                state, place({"tokens": rows, "weights": weights}, mesh, layout.batch_axes, 2)
            )
        assert metrics["skipped"] == 1
        states.append(jax.device_get(state))
    plain, scaled = states
    assert plain.loss_scale == ()
    assert (scaled.loss_scale.scale, scaled.loss_scale.good_steps) == (FIRST / 2, 0)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(scaled._replace(loss_scale=())), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-7)
