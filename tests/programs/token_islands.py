"""Runs with batches counted in tokens; args are a folder, weights or "auto", a mesh and the microbatches.

Six steps at once, and on islands four and two.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from island_runs import IS_FIRST, ISLANDS, bits, copy_without, gather, make_run, make_train

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.islands.options import Across
from shardtrain.islands.watchdog.stragglers import StepTimer
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.sync.local_steps import EveryStep
from shardtrain.trainer.strategy import Strategy

FOLDER, SHARES, DEVICES, MICROBATCHES = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5])


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
RUN = make_run(
    FOLDER,
    data=LineData(),
    strategy=Strategy(
        layout=Layout(mesh={"data": DEVICES}),
        accumulate=MICROBATCHES,
        across=Across(shares="auto" if AUTO else tuple(map(float, SHARES.split(","))) if ISLANDS else None),
    ),
    batch=120,
    batch_unit="tokens",
    steps=40 if AUTO else 6,
    evaluate_every=None if AUTO else 3,
    checkpoints=CheckpointPolicy(every_steps=None if AUTO else 4, keep=4),
)
run = make_train(RUN, FOLDER)
if AUTO:
    # by a clock that only this moves, each token of an island takes a time of its own, those of padding too
    seconds_per_token = (0.0004, 0.0012)[ISLANDS.placement.island]
    fast, now = EveryStep.__call__, [0.0]
    StepTimer.__init__.__defaults__ = (lambda: now[0],)

    def slowed(self, state, batch):
        now[0] += batch["weights"].size * seconds_per_token
        return fast(self, state, batch)

    EveryStep.__call__ = slowed
whole, printed = run("whole")
gather("whole")
if IS_FIRST:
    (FOLDER / "printed.txt").write_text(printed)
# alone it is what the others are compared with, and data/test_bucketed.py resumes it
if not AUTO and ISLANDS is not None:
    copy_without(6, FOLDER / "whole", FOLDER / "parts")
    parts, printed = run("parts")
    assert parts.step == 6
    assert bits(parts.state) == bits(whole.state)
    assert not IS_FIRST or "resumed from step 4" in printed, printed
