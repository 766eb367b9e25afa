"""Whole runs on islands. Args: the text, a folder, and the numbers of processes of the islands."""

import dataclasses
import io
import json
import os
import shutil
import sys
from pathlib import Path

os.environ["SHARDTRAIN_ISLAND_PROCESSES"] = sys.argv[3]

import jax
import numpy as np
from rich.console import Console
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.combine.synchronisation import Outer, Synchronisation
from shardtrain.data import Text
from shardtrain.islands.membership import join
from shardtrain.islands.options import Across
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.sharding.layout import Layout
from shardtrain.trainer import prepared_run
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train

TEXT, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
ISLANDS = join()
SEQ = 8
RUN = Run(
    model=TinyConfig(num_layers=2, dropout=0.1),
    data=Text(paths=(TEXT,), seq=SEQ, heldout_fraction=0.06),
    optimizer=Optimizer(learning_rate=Schedule(name="constant", peak=1e-2, warmup=2)),
    strategy=Strategy(layout=Layout(mesh={"data": -1}), accumulate=2, across=Across(bucket_bytes=3000)),
    batch=8,
    batch_growth="4:2",
    steps=6,
    seed=3,
    log_every=1,
    evaluate_every=3,
    checkpoints=CheckpointPolicy(every_steps=4, keep=4),
)


def run(name: str, **changes: object):
    console = Console(file=io.StringIO(), width=200)
    trained = train(dataclasses.replace(RUN, run_dir=FOLDER / name, **changes), console, ISLANDS)
    return trained, console.file.getvalue()  # type: ignore[attr-defined]


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf.addressable_data(0)).tobytes() for leaf in jax.tree.leaves(tree)]


def lose_the_last(name: str, other: str) -> None:
    """Copy the folder of a run as it was before its last checkpoint."""
    assert ISLANDS is not None
    ISLANDS.all_gather_islands(f"{name} is there", None)
    if ISLANDS.is_first:
        shutil.copytree(FOLDER / name, FOLDER / other, ignore=shutil.ignore_patterns("step_00000006*"))
    ISLANDS.all_gather_islands(f"{other} is there", None)


def interrupted(name: str, synchronisation: Synchronisation):
    """Six steps at once, and four and two: the same bits in everything that an island has."""
    strategy = dataclasses.replace(RUN.strategy, synchronisation=synchronisation)
    changes = {"strategy": strategy, "batch_growth": "", "evaluate_every": None}
    whole, _ = run(f"{name}-whole", **changes)
    lose_the_last(f"{name}-whole", f"{name}-parts")
    parts, text = run(f"{name}-parts", **changes)
    assert parts.step == 6
    assert bits(parts.state) == bits(whole.state), name
    if ISLANDS is None or ISLANDS.is_first:
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
if ISLANDS is None or ISLANDS.is_first:
    (FOLDER / "mean.txt").write_text(printed)
# gradients that are rounded to 16 bits where they are computed, by two programs
narrow = Across(bucket_bytes=3000, reduce_dtype="bfloat16", gradient_parts=2)
if ISLANDS is not None:
    strategy = dataclasses.replace(RUN.strategy, across=narrow)
    _, printed = run("narrow", strategy=strategy, steps=4, evaluate_every=None)
    if ISLANDS.is_first:
        (FOLDER / "narrow.txt").write_text(printed)
    # saved at step 4, between two merges: what was sent after step 3 is under way until step 5
    outer = Outer(learning_rate=0.7, momentum=0.9, nesterov=True)
    own = Synchronisation(by="int8+adasum", on="deltas", every=3, overlap=2, outer=outer, synchronous_steps=1)
    state = interrupted("own", own)
    # each island has an optimizer of its own, and all have the same parameters
    digest = [[x.hex() for x in bits(tree)] for tree in (state.params, state.opt_state)]
    shared = ISLANDS.all_gather_islands("digests", digest)
    assert all(params == shared[0][0] for params, _ in shared)
    assert all(opt != shared[0][1] for _, opt in shared[1:])
parts = (FOLDER / "own-whole" / "checkpoints").glob("step_00000006.*")
sys.stdout.write(json.dumps(sorted(path.suffix.removeprefix(".") for path in parts)))
