"""Runs on three islands that compute in float32, bfloat16 and float16; args are a folder and a text."""

import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from rich.console import Console
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.combine.synchronisation import Outer, Synchronisation
from shardtrain.data import Text
from shardtrain.functional.loss import next_token_loss
from shardtrain.islands.membership import join
from shardtrain.islands.options import Across
from shardtrain.trainer import run_step
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy, read_strategy
from shardtrain.trainer.train import train

FOLDER, TEXT = Path(sys.argv[1]), Path(sys.argv[2])
ISLANDS = join()
assert ISLANDS is not None
ME = ISLANDS.placement.island
SECTIONS = {
    "*CPU*": {"compute_dtype": "bfloat16"},
    "0": {"compute_dtype": "float32", "remat": "dots"},
    "2": {"compute_dtype": "float16", "accumulate": 2},
}
STEPS, RATE = 30, 0.01


def large_loss(apply, batch):
    """Gradients of this loss overflow in float16 at the first scale, and not at an eighth of it."""
    total, count = next_token_loss(apply, batch)
    return 8 * total, count


RUN = Run(
    model=TinyConfig(num_layers=2),
    data=Text(paths=(TEXT,), seq=8, heldout_fraction=0.06),
    loss=large_loss,
    optimizer=optax.sgd(RATE),
    strategy=Strategy(across=Across(shares=(1.0, 1.0, 2.0)), islands=SECTIONS),
    batch=8,
    steps=STEPS,
    seed=3,
    nonfinite="stop",  # overflows at a scale that is too large do not stop it
    log_every=1,
    evaluate_every=None,
    checkpoints=CheckpointPolicy(every_steps=20, keep=4),
)


def run(name: str, **changes: object):
    console = Console(file=io.StringIO(), width=200)
    state = train(dataclasses.replace(RUN, run_dir=FOLDER / name, **changes), console, ISLANDS).state
    return state, console.file.getvalue()  # type: ignore[attr-defined]


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf.addressable_data(0)).tobytes() for leaf in jax.tree.leaves(tree)]


def resumed_as_never_interrupted(name: str):
    state, text = run(name)
    assert ISLANDS is not None
    ISLANDS.all_gather_islands(f"{name} is there", None)
    if ISLANDS.is_first:
        late = shutil.ignore_patterns(f"step_{STEPS:08}*")
        shutil.copytree(FOLDER / name, FOLDER / f"{name}-again", ignore=late)
    ISLANDS.all_gather_islands(f"{name} is copied", None)
    again, told = run(f"{name}-again")
    if ISLANDS.is_first:
        assert "resumed from step 20" in told, told
    assert bits(again) == bits(state), name
    return state, text


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
found = ISLANDS.all_gather_islands("scales", [scale, good_steps])
assert found[0] == found[1] == [2.0**15, STEPS]
skipped = int(np.log2(2.0**15 / found[2][0]))
assert skipped > 0
assert 0 <= found[2][1] <= STEPS - skipped
if ISLANDS.is_first:
    assert text.count("gradients in float16 overflowed at their loss scale, now halved") == skipped, text
    # the file has what the user gave, and not what island 0 has of it
    assert read_strategy(FOLDER / "mean" / "strategy.toml") == RUN.strategy
# all islands have the same parameters
assert (
    len({str(each) for each in ISLANDS.all_gather_islands("bits", [x.hex() for x in bits(state.params)])})
    == 1
)

# with local steps the others go on where one island skips
outer = Outer(learning_rate=0.7, momentum=0.5)
local = Synchronisation(on="deltas", every=5, outer=outer)
strategy = dataclasses.replace(RUN.strategy, synchronisation=local)
state, _ = run("deltas", strategy=strategy)
scales = ISLANDS.all_gather_islands("scales of deltas", jax.device_get(state.loss_scale.scale).item())
assert scales[0] == scales[1] == 2.0**15 > scales[2]
sys.stdout.write(json.dumps({"skipped": skipped}))
