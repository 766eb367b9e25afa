"""Runs on three islands that compute in float32, bfloat16 and float16; args are a folder and a text."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from island_runs import IS_FIRST, ISLANDS, bits, copy_without, gather, make_run, make_train
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.trainer import run_step

FOLDER, TEXT = Path(sys.argv[1]), Path(sys.argv[2])
ME = ISLANDS.placement.island
SECTIONS = {
    "*CPU*": {"compute_dtype": "bfloat16"},
    "0": {"compute_dtype": "float32", "remat": "dots"},
    "2": {"compute_dtype": "float16", "accumulate": 2},
}
STEPS, RATE = 30, 0.01


def large_loss(apply, batch):
    """Gradients of this loss overflow in float16 at the first scale, and not at an eighth of it."""
    total, count = st.next_token_loss(apply, batch)
    return 8 * total, count


RUN = make_run(
    TEXT,
    model=TinyConfig(num_layers=2),
    loss=large_loss,
    optimizer=optax.sgd(RATE),
    strategy=st.Strategy(across=st.Across(shares=(1.0, 1.0, 2.0)), islands=SECTIONS),
    steps=STEPS,
    nonfinite="stop",  # overflows at a scale that is too large do not stop it
    evaluate_every=None,
    checkpoints=st.CheckpointPolicy(every_steps=20, keep=4),
)
run = make_train(RUN, FOLDER)


def resumed_as_never_interrupted(name: str):
    trained, text = run(name)
    copy_without(STEPS, FOLDER / name, FOLDER / f"{name}-again")
    again, told = run(f"{name}-again")
    assert not IS_FIRST or "resumed from step 20" in told, told
    assert bits(again.state) == bits(trained.state), name
    return trained.state, text


def dtypes_of_products(step) -> set[str]:
    """The dtypes that the matrix products of this island's program have."""
    dtypes = ("f32", "bf16", "f16")
    products = [line for line in step.splitlines() if "dot_general" in line]
    assert products
    return {dtype for dtype in dtypes for line in products if f"x{dtype}>" in line}


lowered = []
hashed = run_step.hash_programs


def watched(run, setup, batch, programs):
    """What the run compares between islands, from which the test reads what this one computes in."""
    lowered.append(programs[0].as_text())
    assert len(batch["tokens"]) == (2 if ME == 2 else 1)
    assert run.strategy.remat == (None if ME else "dots")
    return hashed(run, setup, batch, programs)


run_step.hash_programs = watched
state, text = resumed_as_never_interrupted("mean")
assert dtypes_of_products(lowered[0]) == {["f32", "bf16", "f16"][ME]}
# each island has a scale of its own: only that of float16 became smaller, by a factor for each overflow
scale, good_steps = (x.item() for x in jax.device_get(state.loss_scale))
found = gather("scales", [scale, good_steps])
assert found[0] == found[1] == [2.0**15, STEPS]
skipped = int(np.log2(2.0**15 / found[2][0]))
assert skipped > 0
assert 0 <= found[2][1] <= STEPS - skipped
if IS_FIRST:
    assert text.count("gradients in float16 overflowed at their loss scale, now halved") == skipped, text
    # the file has what the user gave, and not what island 0 has of it
    assert st.read_strategy(FOLDER / "mean" / "strategy.toml") == RUN.strategy
# all islands have the same parameters
assert len({str(each) for each in gather("bits", bits(state.params))}) == 1

# with local steps the others go on where one island skips
outer = st.Outer(learning_rate=0.7, momentum=0.5)
local = st.Synchronisation(on="deltas", every=5, outer=outer)
strategy = dataclasses.replace(RUN.strategy, synchronisation=local)
trained, _ = run("deltas", strategy=strategy)
scales = gather("scales of deltas", jax.device_get(trained.state.loss_scale.scale).item())
assert scales[0] == scales[1] == 2.0**15 > scales[2]
sys.stdout.write(json.dumps({"skipped": skipped}))
