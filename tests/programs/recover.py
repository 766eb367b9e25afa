"""Two islands, one of which meets what is not finite: both go back, and end with the same parameters."""

import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from island_runs import bits, make_run, make_train
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.data.order import epoch_order

FOLDER = Path(sys.argv[1])
SEQ, BATCH, SAMPLES, BAD = 8, 8, 400, 31
DAMAGED_BATCH = 12
"""Counted from 1: of its rows, those of the second island."""


class Numbers:
    def train(self, folder: Path) -> Any:
        tokens = np.random.default_rng(0).integers(0, BAD, (SAMPLES, SEQ + 1))
        first = (DAMAGED_BATCH - 1) * BATCH
        order = epoch_order(SAMPLES, 0, 0)
        tokens[[order(position) for position in range(first + BATCH // 2, first + BATCH)]] = BAD
        return [{"tokens": row.astype(np.int32)} for row in tokens]

    def heldout(self, folder: Path) -> None:
        return None


def infinite(apply: Any, batch: Any) -> Any:
    total, count = st.next_token_loss(apply, batch)
    return jnp.where((batch["tokens"] == BAD).any(), jnp.inf, total), count


RUN = make_run(
    FOLDER,
    model=TinyConfig(vocab=BAD + 1),
    data=Numbers(),
    loss=infinite,
    optimizer=st.Optimizer(learning_rate=st.Schedule(name="constant", peak=1e-3)),
    steps=20,
    seed=0,
    evaluate_every=None,
    nonfinite="roll_back",
    recovery=st.Recovery(fingerprint_every=4),
    checkpoints=st.CheckpointPolicy(every_steps=4, keep=3),
)

found = {}
for name, synchronisation in (
    ("mean", st.Synchronisation()),
    ("local_steps", st.Synchronisation(by="adasum", on="deltas", every=2)),
):
    strategy = st.Strategy(layout=st.Layout(mesh={"data": -1}), synchronisation=synchronisation)
    trained, printed = make_train(RUN, FOLDER)(name, strategy=strategy)
    found[name] = [trained.step, bits(trained.state.params), printed]
sys.stdout.write(json.dumps(found))
