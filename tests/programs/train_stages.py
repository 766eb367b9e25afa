"""Whole runs of a pipeline across islands: args are the text, a folder, and islands of a pipeline."""

import dataclasses
import io
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import Text
from shardtrain.islands.membership import join
from shardtrain.islands.options import Across
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.pipeline.options import Pipeline
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train

TEXT, FOLDER, NUM_STAGES = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
ISLANDS = join()
SEQ = 8
SHARES = (1.0,) if ISLANDS is None or ISLANDS.placement.num_islands == NUM_STAGES else (3.0, 1.0)
# two pipelines cut the model differently: the second block has other stages in each
STAGES = "params" if SHARES == (1.0,) else "1,2;2,1"
RUN = Run(
    model=TinyConfig(num_layers=3, dropout=0.1),
    data=Text(paths=(TEXT,), seq=SEQ, heldout_fraction=0.06),
    # the gradient is longer than this: its norm is that of all stages
    optimizer=Optimizer(learning_rate=Schedule(name="constant", peak=1e-2, warmup=2), clip=0.5),
    strategy=Strategy(layout=Layout(mesh={"data": -1}), accumulate=2),
    batch=8,
    steps=6,
    seed=3,
    log_every=1,
    evaluate_every=3,
    checkpoints=CheckpointPolicy(every_steps=4, keep=4),
    sample=lambda apply: "a sample",
)
if ISLANDS is not None:
    across = Across(axis="pipeline", partitions=NUM_STAGES, shares=SHARES)
    RUN = dataclasses.replace(
        RUN, strategy=dataclasses.replace(RUN.strategy, across=across, pipeline=Pipeline(stages=STAGES))
    )


def run(name: str, **changes: object):
    console = Console(file=io.StringIO(), width=200)
    trained = train(dataclasses.replace(RUN, run_dir=FOLDER / name, **changes), console, ISLANDS)
    return trained, console.file.getvalue()  # type: ignore[attr-defined]


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf.addressable_data(0)).tobytes() for leaf in jax.tree.leaves(tree)]


def lose_the_last(other: str) -> None:
    """Copy the folder of the whole run as it was before its last checkpoint."""
    assert ISLANDS is not None
    ISLANDS.all_gather_islands("the whole is there", None)
    if ISLANDS.is_first:
        shutil.copytree(FOLDER / "whole", FOLDER / other, ignore=shutil.ignore_patterns("step_00000006*"))
    ISLANDS.all_gather_islands(f"{other} is there", None)


def refused(name: str = "whole", **changes: object) -> str:
    try:
        run(name, **changes)
    except ValueError as error:
        return str(error)
    raise AssertionError(changes)


whole, text = run("whole")
if ISLANDS is not None:
    assert not ISLANDS.is_first or "no sample: the model is distributed over islands" in text, text
    assert not ISLANDS.is_first or "blocks 1,2; 2,1\n" in text or SHARES == (1.0,), text
    if SHARES == (1.0,):
        lose_the_last("parts")
        parts, text = run("parts")
        assert bits(parts.state) == bits(whole.state)
        assert not ISLANDS.is_first or "resumed from step 4" in text, text
    inside = dataclasses.replace(RUN.strategy, layout=Layout(mesh={"pipeline": -1}))
    if jax.device_count() > 1:
        assert "use pipeline=1 inside each island" in refused(strategy=inside)
    lose_the_last("otherwise")
    if SHARES == (1.0,):  # "params" cut it into 1,2
        other = dataclasses.replace(RUN.strategy, pipeline=Pipeline(stages="time", stage_speeds="9,1"))
    else:  # no stages any more
        other = dataclasses.replace(RUN.strategy, across=Across())
    _, text = run("otherwise", strategy=other)
    if SHARES == (1.0,):
        by_time = "stages cut by time, by the speeds that were given" in text and "blocks 2,1" in text
        assert by_time or not ISLANDS.is_first, text
    if SHARES != (1.0,):
        three = dataclasses.replace(RUN.strategy, pipeline=Pipeline(stages="1,2;2,1;1,2"))
        assert "has 3 cuts, and there are 2 pipelines; give one for all; 2, one each" in refused(
            strategy=three
        )
        # islands that differ in what decides the communicators are told so, and make none
        own = STAGES if ISLANDS.placement.island == 0 else "1,2"
        told = refused(strategy=dataclasses.replace(RUN.strategy, pipeline=Pipeline(stages=own)))
        assert "islands do not agree" in told, told
        assert "strategy.pipeline.stages: 1,2 on island 1" in told, told
        moved = Synchronisation(on="deltas", by="adasum")
        told = refused(strategy=dataclasses.replace(RUN.strategy, synchronisation=moved))
        assert "cannot be cut differently (1,2;2,1)" in told, told
        assert "combine deltas; use --combine-on gradients, or one cut for all" in told, told
        assert "combine is 'adasum'; use mean or sum, or one cut for all" in told, told
    odd = dataclasses.replace(RUN.strategy, across=Across(axis="pipeline", partitions=3))
    assert "do not make whole pipelines" in refused(strategy=odd)
    sys.stdout.write(" ".join(sorted(path.name for path in (FOLDER / "whole" / "checkpoints").glob("*6*"))))
