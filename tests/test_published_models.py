"""Models built as published ones are train unchanged, with the losses and gradients of a plain loop."""

import functools
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from shardtrain.checks.row_draws import find_draws
from shardtrain.cli import main
from shardtrain.cli.run_file import load_run
from shardtrain.data import Batches, place
from shardtrain.functional.nnx_model import convert_model
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.step import make_step

PROGRAMS = Path(__file__).parent / "programs"
FILE = PROGRAMS / "published_models.py"
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module")
def published():
    """The module of the cases, loaded as the command line loads it."""
    load_run(f"{FILE}:plain")
    return sys.modules["published_models"]


def batches_of(run):
    batches = Batches(source=run.data, batch=run.batch, seed=run.seed).iterate()
    return [batch for batch, _ in itertools.islice(batches, run.steps)]


@functools.cache
def plain_numbers(published, name, groups=1):
    case = published.CASES[name]()
    return jax.device_get(published.plain_steps(case, batches_of(case.run), groups))


def trained(run, sizes, microbatches=1):
    """Losses, the sum of all gradients and the model's state after a run, on a mesh of these sizes."""
    layout = Layout(**{**vars(run.strategy.layout), "mesh": sizes})
    mesh = make_mesh(layout, jax.devices()[: np.prod(list(sizes.values()))])
    model = convert_model(run.model, run.names)
    draws = find_draws(model, run.loss, batches_of(run)[0])
    assert draws.problems == ()
    model = replace(model, draws=draws.draws)
    placement = make_placement(model, run.optimizer, layout, mesh)
    state = init_state(model, run.optimizer, placement, run.seed)
    step = make_step(model, run.loss, run.optimizer, placement)
    losses = []
    for batch in batches_of(run):
        state, metrics = step(state, place(batch, mesh, layout.batch_axes, microbatches))
        losses.append(float(metrics["loss_sum"] / metrics["count"]))
    return jax.device_get((losses, state.opt_state[0].trace, state.model_state)), placement


NUM_SHARDED = {"gemma": 10, "lm1b": 17, "resnet": 0, "plain": 3}
"""Parameters that are not whole on every device of the mesh."""


# one with statistics; test_central.py has decoders of nnx and of Linen, the fuzzer names from outside
CASES = [
    *(
        pytest.param(name, MESH, id=f"{name}-mesh", marks=[pytest.mark.full] * (name != "resnet"))
        for name in NUM_SHARDED
    ),
    *(
        pytest.param(name, {"data": 1}, id=f"{name}-one device", marks=pytest.mark.full)
        for name in NUM_SHARDED
    ),
]


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_gradients_are_those_of_a_plain_loop(name, sizes, published, assert_same):
    # replicas of the mesh have batch statistics of their own
    groups = 2 if name == "resnet" and sizes == MESH else 1
    found, placement = trained(load_run(f"{FILE}:{name}"), sizes)
    assert_same(found, plain_numbers(published, name, groups))
    if sizes == MESH:
        specs = jax.tree.leaves(placement.state.params)
        assert sum(not sharding.is_fully_replicated for sharding in specs) == NUM_SHARDED[name]


@pytest.mark.parametrize(("options", "microbatches"), [({"sync": True}, 1), ({"axis_name": "batch"}, 2)])
def test_synchronised_batch_norm(options, microbatches, published, assert_same):
    """Its statistics are those of a microbatch over all replicas."""
    run = published.resnet_case(**options).run
    (losses, gradients, state), _ = trained(run, MESH, microbatches)
    expected = plain_numbers(published, "resnet", microbatches)
    assert_same((losses, gradients), expected[:2])
    if microbatches == 1:
        assert_same(state, expected[2])


@pytest.mark.full
def test_two_islands(mpiexec, tmp_path):
    # its statistics are those of each island
    names = ["resnet", "plain", "gemma", "lm1b"]
    texts = mpiexec(2, PROGRAMS / "published_islands.py", tmp_path, *names)
    assert texts == [" ".join(names) + "\n"] * 2


def test_the_command_line_trains_a_model_without_names(tmp_path, capfd):
    """On a mesh by its option, and refused without it, with what to write."""
    command = [
        "train",
        f"{FILE}:unnamed",
        "--run-dir",
        str(tmp_path),
        "--mesh",
        "fsdp=2,data=4",
        "--steps",
        "1",
    ]
    assert main(command) == 2
    assert "--unnamed replicate" in capfd.readouterr().err
    assert main([*command, "--unnamed", "replicate"]) == 0
    text = capfd.readouterr().out
    assert "no names for the dims of attention/key/bias, attention/key/kernel, attention/out/bias and" in text
