"""Waves of two pipelines of two stages each. Args: the text, a folder, how many batches are in flight.

Island 0 prints figures as JSON.
"""

import dataclasses
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import Text
from shardtrain.functional.loss import next_token_loss
from shardtrain.islands.membership import join
from shardtrain.islands.options import Across
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.pipeline.options import Pipeline
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.sync.waves import Waves
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train

TEXT, FOLDER, IN_FLIGHT = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
ISLANDS = join()
assert ISLANDS is not None
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
    return next_token_loss(apply, batch)


WAVES = Synchronisation(on="deltas", every=2, distance=1)
STRATEGY = Strategy(
    layout=Layout(mesh={"data": 1}),
    synchronisation=WAVES,
    across=Across(axis="pipeline", partitions=2, shares=(2.0, 1.0)),
    pipeline=Pipeline(in_flight=IN_FLIGHT),
)
RUN = Run(
    # the table of the first stage is borrowed by the last one
    model=TinyConfig(num_layers=2),
    data=Text(paths=(TEXT,), seq=8, heldout_fraction=0.06),
    loss=slow_loss,
    # the gradient is longer than this: its norm is that of all stages of a pipeline
    optimizer=Optimizer(learning_rate=Schedule(name="constant", peak=1e-2, warmup=2), clip=0.5),
    batch=6,
    steps=8,
    seed=3,
    log_every=1,
    evaluate_every=None,
    strategy=STRATEGY,
    checkpoints=CheckpointPolicy(every_steps=None, keep=4),
)


def run(name, sleeps=(0.0, 0.0), **changes):
    """Train; return the result, what was printed, and the bits of this stage's parameters."""
    seconds[:] = sleeps
    output = io.StringIO()
    given = dataclasses.replace(RUN, run_dir=FOLDER / name, **changes)
    trained = train(given, Console(file=output, width=200), ISLANDS)
    return trained, output.getvalue(), params(trained.state)


def params(state):
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(state.params)])


def refused(**changes):
    try:
        run("refused", **changes)
    except ValueError as error:
        return str(error)
    raise AssertionError(changes)


# 0. batches in flight are steps of a pipeline's own optimizer
if IN_FLIGHT > 1:
    local = dataclasses.replace(STRATEGY, synchronisation=Synchronisation(on="deltas", every=2))
    assert "there are no waves; use --synchronisation wsp --local-steps 2" in refused(strategy=local)

# 1. the first pipeline runs ahead; what both push adds up to what both end with, stage by stage
pushed, starts, end_wave = [], [], Waves._end_wave


def recorded(self, state, number):
    update = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(state.local.drift)])
    if not pushed:
        starts.append(params(state))
    pushed.append(update * np.float32(self.worker.share()))
    return end_wave(self, state, number)


Waves._end_wave = recorded
_, text, ahead = run("ahead", (0.0, 0.3))
kept = "without a flush; stages keep 2, 1 versions of their weights, and 1, 2 gradients"
assert ISLAND or (kept in text) == (IN_FLIGHT > 1), text
Waves._end_wave = end_wave
sums = ISLANDS.all_gather_islands("pushed", np.sum(pushed, 0).tolist())
np.testing.assert_allclose(ahead, starts[0] + np.sum(sums[STAGE::2], 0), rtol=1e-4, atol=1e-5)
ends = ISLANDS.all_gather_islands("ends", ahead.tolist())
assert ends[STAGE] == ends[STAGE + 2]

# 2. the last stage of the slow pipeline is asked to stop: all stages save at a common wave, and resume there
steps_to_signal[0] = 3 if ISLAND == 3 else 0
stopped, text, _ = run("stopped", (0.0, 0.1), steps=40)
assert stopped.stopped_by == signal.SIGTERM
assert 3 <= stopped.step < 40, stopped.step
assert stopped.step % WAVES.every == 0
assert len(set(ISLANDS.all_gather_islands("stopped", stopped.step))) == 1
resumed, text, after = run("stopped", steps=stopped.step + 4)
assert ISLAND or f"resumed from step {stopped.step}" in text, text
assert resumed.step == stopped.step + 4

# 3. a replay of what was stopped and resumed, on pipelines of other speeds
_, _, again = run("replay", (0.1, 0.0), steps=stopped.step + 4, replay=FOLDER / "stopped")
assert again.tobytes() == after.tobytes()

if ISLAND == 0:
    sys.stdout.write(json.dumps({"num_parameters": ahead.size, "stopped": stopped.step}))
