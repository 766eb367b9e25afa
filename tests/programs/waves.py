"""Runs in waves on islands of unequal speed. Args: the text, a folder. Island 0 prints figures as JSON."""

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
from shardtrain.islands.membership import join
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.train_step.sync.waves import Waves
from shardtrain.trainer.config import Run
from shardtrain.trainer.metric_log import MetricLog
from shardtrain.trainer.recovery import RollBack
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train
from shardtrain.trainer.waves import skips_file

TEXT, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
ISLANDS = join()
assert ISLANDS is not None
ISLAND = ISLANDS.placement.island
seconds, steps_to_signal = [0.0] * ISLANDS.placement.num_islands, [0]


merge = Waves.merge


def merge_slowly(self, state, number):
    """Take time as a slow step does; a callback in the step would be compiled anew by each run."""
    time.sleep(seconds[ISLAND])
    steps_to_signal[0] -= 1
    if steps_to_signal[0] == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return merge(self, state, number)


Waves.merge = merge_slowly
RUN = Run(
    model=TinyConfig(),
    data=Text(paths=(TEXT,), seq=8, heldout_fraction=0.06),
    optimizer=Optimizer(learning_rate=Schedule(name="constant", peak=1e-2, warmup=2)),
    batch=9,
    steps=12,
    seed=3,
    log_every=1,
    evaluate_every=None,
    checkpoints=CheckpointPolicy(every_steps=None, keep=4),
)
WAVES = Synchronisation(on="deltas", every=2, distance=2)


def run(name, synchronisation, sleeps=(), **changes):
    """Train; return the result, what was printed, and the bits of the parameters."""
    seconds[:] = sleeps or [0.0] * len(seconds)
    strategy = Strategy(synchronisation=synchronisation)
    output = io.StringIO()
    console = Console(file=output, width=200)
    given = dataclasses.replace(RUN, run_dir=FOLDER / name, strategy=strategy, **changes)
    trained = train(given, console, ISLANDS)
    return trained, output.getvalue(), params(trained.state)


def params(state):
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(state.params)])


# 1. nobody may be ahead: local SGD with a merge at the end of each wave, the last one short
_, _, local = run("local", Synchronisation(on="deltas", every=5), steps=7)
_, _, together = run("together", Synchronisation(on="deltas", every=5, distance=0), steps=7)
np.testing.assert_allclose(together, local, rtol=1e-5, atol=1e-6)

# 2. fast islands run ahead; what they push adds up to what all end with
pushed, starts, end_wave = [], [], Waves._end_wave


def recorded(self, state, number):
    update = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(state.local.drift)])
    if not pushed:
        starts.append(params(state))
    pushed.append(update * np.float32(self.worker.share()))
    return end_wave(self, state, number)


Waves._end_wave = recorded
SLOW = [0.0, 0.02, 0.1]
first, _, ahead = run("ahead", WAVES, SLOW)
Waves._end_wave = end_wave
sums = np.sum(ISLANDS.all_gather_islands("pushed", np.sum(pushed, 0).tolist()), 0)
np.testing.assert_allclose(ahead, starts[0] + sums, rtol=1e-4, atol=1e-5)
assert len({tuple(each) for each in ISLANDS.all_gather_islands("ends", [float(x) for x in ahead[:50]])}) == 1

# 3. an island is asked to stop: all save at a common wave, and go on from there
steps_to_signal[0] = 4 if ISLAND == 2 else 0
saves = CheckpointPolicy(every_steps=4, keep=4)
stopped, text, _ = run("stopped", WAVES, SLOW, steps=40, checkpoints=saves)
assert stopped.stopped_by == signal.SIGTERM
assert 4 <= stopped.step < 40, stopped.step
assert stopped.step % WAVES.every == 0
steps = ISLANDS.all_gather_islands("stopped", stopped.step)
assert len(set(steps)) == 1, steps

# 4. one of the islands finds a fault later: all roll back, and skip data
until = stopped.step + 8
faulty, add = [stopped.step + 4 if ISLAND == 1 else 0], MetricLog.add


def add_fault(self, step, metrics):
    add(self, step, metrics)
    if step == faulty[0]:
        faulty[0], self.fault = 0, RollBack(step, "a made-up fault")


MetricLog.add = add_fault
resumed, text, after = run("stopped", WAVES, SLOW, steps=until, checkpoints=saves)
assert ISLAND or f"resumed from step {stopped.step}" in text, text
back = f"rolling back to step {stopped.step + 3} or before, and continuing with later data"
assert ISLAND or back in text, text
assert resumed.step == until

# 5. a replay of what was stopped, resumed and rolled back, on islands of other speeds without a fault
_, text, again = run("replay", WAVES, SLOW[::-1], steps=until, checkpoints=saves, replay=FOLDER / "stopped")
assert again.tobytes() == after.tobytes()
assert "WARNING" not in text, text
# the same data was skipped, after the same step
skips = [skips_file(FOLDER / name, ISLAND).read_text() for name in ("stopped", "replay")]
assert skips[0] == skips[1]
(skipped,) = map(json.loads, skips[0].splitlines())
assert stopped.step <= skipped["step"] <= stopped.step + 3, skips

if ISLAND == 0:
    sys.stdout.write(json.dumps({"num_parameters": ahead.size, "stopped": stopped.step}))
