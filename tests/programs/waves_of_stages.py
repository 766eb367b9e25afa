"""Waves of two pipelines of two stages each. Args: the text, a folder, how many batches are in flight.

Island 0 prints figures as JSON.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from island_runs import ISLANDS, RATE, find_refusal, flatten, gather, make_run, make_train, record_pushes
from tiny_language_model import TinyConfig

import shardtrain as st

TEXT, FOLDER, IN_FLIGHT = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
ISLAND = ISLANDS.placement.island
STAGE, WORKER = ISLAND % 2, ISLAND // 2
seconds, steps_to_signal = [0.0, 0.0], [0]


def slow_loss(apply, batch):
    def sleep():
        time.sleep(seconds[WORKER])
        steps_to_signal[0] -= 1
        if steps_to_signal[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    jax.debug.callback(sleep)
    return st.next_token_loss(apply, batch)


WAVES = st.Synchronisation(on="deltas", every=2, distance=1)
STRATEGY = st.Strategy(
    layout=st.Layout(mesh={"data": 1}),
    synchronisation=WAVES,
    across=st.Across(axis="pipeline", partitions=2, shares=(2.0, 1.0)),
    pipeline=st.Pipeline(in_flight=IN_FLIGHT),
)
RUN = make_run(
    TEXT,
    # the table of the first stage is borrowed by the last one
    model=TinyConfig(num_layers=2),
    loss=slow_loss,
    # the gradient is longer than this: its norm is that of all stages of a pipeline
    optimizer=st.Optimizer(learning_rate=RATE, clip=0.5),
    batch=6,
    steps=8,
    evaluate_every=None,
    strategy=STRATEGY,
    checkpoints=st.CheckpointPolicy(every_steps=None, keep=4),
)


def run(name, sleeps=(0.0, 0.0), **changes):
    """Train; return the result, what was printed, and this stage's parameters."""
    seconds[:] = sleeps
    trained, text = make_train(RUN, FOLDER)(name, **changes)
    return trained, text, flatten(trained.state.params)


# 0. batches in flight are steps of a pipeline's own optimizer
if IN_FLIGHT > 1:
    local = dataclasses.replace(STRATEGY, synchronisation=st.Synchronisation(on="deltas", every=2))
    assert "there are no waves; use --synchronisation wsp --local-steps 2" in find_refusal(
        run, "refused", strategy=local
    )

# 1. the first pipeline runs ahead; what both push adds up to what both end with, stage by stage
(_, text, ahead), start, pushed = record_pushes(lambda: run("ahead", (0.0, 0.3)))
kept = "without a flush; stages keep 2, 1 versions of their weights, and 1, 2 gradients"
assert ISLAND or (kept in text) == (IN_FLIGHT > 1), text
sums = gather("pushed", pushed.tolist())
np.testing.assert_allclose(ahead, start + np.sum(sums[STAGE::2], 0), rtol=1e-4, atol=1e-5)
ends = gather("ends", ahead.tolist())
assert ends[STAGE] == ends[STAGE + 2]

# 2. the last stage of the slow pipeline is asked to stop: all stages save at a common wave, and resume there
steps_to_signal[0] = 3 if ISLAND == 3 else 0
stopped, text, _ = run("stopped", (0.0, 0.1), steps=40)
assert stopped.stopped_by == signal.SIGTERM
assert 3 <= stopped.step < 40, stopped.step
assert stopped.step % WAVES.every == 0
assert len(set(gather("stopped", stopped.step))) == 1
resumed, text, after = run("stopped", steps=stopped.step + 4)
assert ISLAND or f"resumed from step {stopped.step}" in text, text
assert resumed.step == stopped.step + 4

# 3. a replay of what was stopped and resumed, on pipelines of other speeds
_, _, again = run("replay", (0.1, 0.0), steps=stopped.step + 4, replay=FOLDER / "stopped")
assert again.tobytes() == after.tobytes()

if ISLAND == 0:
    sys.stdout.write(json.dumps({"num_parameters": ahead.size, "stopped": stopped.step}))
