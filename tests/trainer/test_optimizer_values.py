"""Values in the state of an optax optimizer: a new one is used at resume, or a line says which is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from quiet_training import InMemory, random_tokens, train_quietly
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.trainer.config import Run
from shardtrain.trainer.restore_state import VALUES, apply_new_values, compute_initial_values

DATA = InMemory(random_tokens())
RUN = Run(model=TinyConfig(vocab=32), data=DATA, batch=8, checkpoints=CheckpointPolicy(every_steps=1))


def sgd(rate):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.5)


def trained(folder, rate, steps):
    run = dataclasses.replace(RUN, run_dir=folder, optimizer=sgd(rate), steps=steps)
    found, printed, _ = train_quietly(run)
    return found.state.opt_state.hyperparams, printed


def test_a_new_value_is_used_at_resume(tmp_path, one_device):
    trained(tmp_path, 0.125, 1)
    found, text = trained(tmp_path, 0.25, 2)
    name = "opt_state/hyperparams/learning_rate"
    assert f"{name} is 0.25, and was 0.125 in the checkpoint: the new value is used" in text
    assert (float(found["learning_rate"]), float(found["momentum"])) == (0.25, 0.5)
    assert name not in trained(tmp_path, 0.25, 3)[1].replace("changed since then", "")


PARAMS = {"w": jnp.ones(())}


def test_numbers_of_parameters_and_of_schedules_are_no_values():
    """Schedules are computed anew in each step, whatever the state holds."""
    assert compute_initial_values(sgd(lambda step: 0.1 * step), PARAMS) == {
        "opt_state/count": 0.0,
        "opt_state/hyperparams/momentum": 0.5,
        "opt_state/hyperparams_states/learning_rate/count": 0.0,
    }
    noisy = optax.add_noise(0.1, 0.5, key=jax.random.key(0))
    assert compute_initial_values(noisy, PARAMS) == {"opt_state/count": 0.0}  # beside a random key


@pytest.mark.parametrize("old", [{VALUES: {"opt_state/scale": 2.0}}, {}])
def test_a_value_that_steps_have_changed_is_kept(old):
    notes: list[str] = []
    state = {"opt_state": {"scale": jax.device_put(jnp.float32(3))}}
    found: Any = apply_new_values(state, old, {VALUES: {"opt_state/scale": 4.0}}, notes.append)  # type: ignore[arg-type]
    assert float(found["opt_state"]["scale"]) == 3
    assert notes == [
        "WARNING: opt_state/scale is 4 in the code, and was 2;"
        " steps have changed it to 3 since, which is used"
    ] * len(old)
