"""Whole runs on islands. Args: the text, a folder, and the numbers of processes of the islands."""

import dataclasses
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

os.environ["SHARDTRAIN_ISLAND_PROCESSES"] = sys.argv[3]

import jax
from island_runs import IS_FIRST, ISLANDS, bits, copy_without, failing_save, gather, make_run, make_train

from shardtrain.combine.synchronisation import Outer, Synchronisation
from shardtrain.islands.options import Across
from shardtrain.sharding.layout import Layout
from shardtrain.trainer import prepared_run
from shardtrain.trainer.strategy import Strategy

TEXT, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
STRATEGY = Strategy(layout=Layout(mesh={"data": -1}), accumulate=2, across=Across(bucket_bytes=3000))
run = make_train(make_run(TEXT, strategy=STRATEGY, batch_growth="4:2"), FOLDER)


def interrupted(name: str, synchronisation: Synchronisation):
    """Six steps at once, and four and two: the same bits in everything that an island has."""
    strategy = dataclasses.replace(STRATEGY, synchronisation=synchronisation)
    changes = {"strategy": strategy, "batch_growth": "", "evaluate_every": None}
    whole, _ = run(f"{name}-whole", **changes)
    copy_without(6, FOLDER / f"{name}-whole", FOLDER / f"{name}-parts")
    parts, text = run(f"{name}-parts", **changes)
    assert parts.step == 6
    assert bits(parts.state) == bits(whole.state), name
    if IS_FIRST:
        assert "resumed from step 4" in text, text
        assert "found no checkpoint" not in text, text
    return whole.state


if ISLANDS is not None and ISLANDS.placement.island:
    # islands that begin with other parameters are made equal to island 0 by the broadcast at the start
    same_everywhere = prepared_run.init_state

    def other_parameters(*arguments):
        state = same_everywhere(*arguments)
        return state._replace(params=jax.tree.map(lambda x: x + 1, state.params))

    prepared_run.init_state = other_parameters
_, printed = run("mean")
if IS_FIRST:
    (FOLDER / "mean.txt").write_text(printed)
if ISLANDS is not None:
    # gradients that are rounded to 16 bits where they are computed, by two programs
    narrow = Across(bucket_bytes=3000, reduce_dtype="bfloat16", gradient_parts=2)
    strategy = dataclasses.replace(STRATEGY, across=narrow)
    # the island that saves alone repeats a last save that failed
    with failing_save(4) if ISLANDS.placement.island == 0 else nullcontext():
        _, printed = run("narrow", strategy=strategy, steps=4, evaluate_every=None)
    assert (FOLDER / "narrow" / "checkpoints" / "step_00000004").exists()
    if IS_FIRST:
        (FOLDER / "narrow.txt").write_text(printed)
    # saved at step 4, between two merges: what was sent after step 3 is under way until step 5
    outer = Outer(learning_rate=0.7, momentum=0.9, nesterov=True)
    own = Synchronisation(by="int8+adasum", on="deltas", every=3, overlap=2, outer=outer, synchronous_steps=1)
    state = interrupted("own", own)
    # each island has an optimizer of its own, and all have the same parameters
    shared = gather("digests", [bits(state.params), bits(state.opt_state)])
    assert all(params == shared[0][0] for params, _ in shared)
    assert all(opt != shared[0][1] for _, opt in shared[1:])
parts = (FOLDER / "own-whole" / "checkpoints").glob("step_00000006.*")
sys.stdout.write(json.dumps(sorted(path.suffix.removeprefix(".") for path in parts)))
