"""Runs with batches counted in tokens; args are a folder, weights or "auto", a mesh and the microbatches.

Six steps at once, and on islands four and two.
"""

import dataclasses
import io
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.islands.membership import join
from shardtrain.islands.options import Across
from shardtrain.islands.watchdog.stragglers import StepTimer
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.sync.local_steps import EveryStep
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train

FOLDER, SHARES, DEVICES, MICROBATCHES = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5])
ISLANDS = join()


class Lines:
    """Lines of letters, of 2 to so many tokens each."""

    def __init__(self, first: int, num_samples: int, longest: int) -> None:
        self.first = first
        self.lengths = np.random.default_rng(first).integers(2, longest + 1, num_samples)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng((self.first, index))
        return {"tokens": random.integers(97, 123, self.lengths[index] + 1, np.int32)}


@dataclass(frozen=True)
class LineData:
    """Lines to train on, and held-out ones, of which the longest has another length."""

    def train(self, folder: Path) -> Lines:
        return Lines(1, 60, 16)

    def heldout(self, folder: Path) -> Lines:
        return Lines(2, 10, 12)


AUTO = SHARES == "auto"
RUN = Run(
    model=TinyConfig(num_layers=2, dropout=0.1),
    data=LineData(),
    optimizer=Optimizer(learning_rate=Schedule(name="constant", peak=1e-2, warmup=2)),
    strategy=Strategy(
        layout=Layout(mesh={"data": DEVICES}),
        accumulate=MICROBATCHES,
        across=Across(shares="auto" if AUTO else tuple(map(float, SHARES.split(","))) if ISLANDS else None),
    ),
    batch=120,
    batch_unit="tokens",
    steps=40 if AUTO else 6,
    seed=3,
    log_every=1,
    evaluate_every=None if AUTO else 3,
    checkpoints=CheckpointPolicy(every_steps=None if AUTO else 4, keep=4),
)


def run(name: str):
    console = Console(file=io.StringIO(), width=200)
    trained = train(dataclasses.replace(RUN, run_dir=FOLDER / name), console, ISLANDS)
    return trained, console.file.getvalue()  # type: ignore[attr-defined]


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf.addressable_data(0)).tobytes() for leaf in jax.tree.leaves(tree)]


def barrier(name: str) -> bool:
    """Wait for all islands; return whether this one is the first."""
    if ISLANDS is not None:
        ISLANDS.all_gather_islands(name, None)
    return ISLANDS is None or ISLANDS.is_first


if AUTO:
    # by a clock that only this moves, each token of an island takes a time of its own, those of padding too
    assert ISLANDS is not None
    seconds_per_token = (0.0004, 0.0012)[ISLANDS.placement.island]
    fast, now = EveryStep.__call__, [0.0]
    StepTimer.__init__.__defaults__ = (lambda: now[0],)

    def slowed(self, state, batch):
        now[0] += batch["weights"].size * seconds_per_token
        return fast(self, state, batch)

    EveryStep.__call__ = slowed
whole, printed = run("whole")
if barrier("whole"):
    (FOLDER / "printed.txt").write_text(printed)
# alone it is what the others are compared with, and data/test_bucketed.py resumes it
if not AUTO and ISLANDS is not None:
    if barrier("is there"):
        late = shutil.ignore_patterns("step_00000006*")
        shutil.copytree(FOLDER / "whole", FOLDER / "parts", ignore=late)
    barrier("is copied")
    parts, printed = run("parts")
    assert parts.step == 6
    assert bits(parts.state) == bits(whole.state)
    assert not barrier("again") or "resumed from step 4" in printed, printed
