"""Runs in waves on islands of unequal speed. Args: the text, a folder. Island 0 prints figures as JSON."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from island_runs import ISLANDS, flatten, gather, make_run, make_train, record_pushes
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.train_step.sync.waves import Waves
from shardtrain.trainer.metric_log import MetricLog
from shardtrain.trainer.recovery import RollBack
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.waves import skips_file

TEXT, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
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
SAVES_LAST = CheckpointPolicy(every_steps=None, keep=4)
RUN = make_run(TEXT, model=TinyConfig(), batch=9, steps=12, evaluate_every=None, checkpoints=SAVES_LAST)
WAVES = Synchronisation(on="deltas", every=2, distance=2)


def run(name, synchronisation, sleeps=(), **changes):
    """Train; return the result, what was printed, and the parameters."""
    seconds[:] = sleeps or [0.0] * len(seconds)
    strategy = Strategy(synchronisation=synchronisation)
    trained, text = make_train(RUN, FOLDER)(name, strategy=strategy, **changes)
    return trained, text, flatten(trained.state.params)


# 1. nobody may be ahead: local SGD with a merge at the end of each wave, the last one short
_, _, local = run("local", Synchronisation(on="deltas", every=5), steps=7)
_, _, together = run("together", Synchronisation(on="deltas", every=5, distance=0), steps=7)
np.testing.assert_allclose(together, local, rtol=1e-5, atol=1e-6)

# 2. fast islands run ahead; what they push adds up to what all end with
SLOW = [0.0, 0.02, 0.1]
(_, _, ahead), start, pushed = record_pushes(lambda: run("ahead", WAVES, SLOW))
sums = np.sum(gather("pushed", pushed.tolist()), 0)
np.testing.assert_allclose(ahead, start + sums, rtol=1e-4, atol=1e-5)
assert len({tuple(each) for each in gather("ends", [float(x) for x in ahead[:50]])}) == 1

# 3. an island is asked to stop: all save at a common wave, and go on from there
steps_to_signal[0] = 4 if ISLAND == 2 else 0
saves = CheckpointPolicy(every_steps=4, keep=4)
stopped, text, _ = run("stopped", WAVES, SLOW, steps=40, checkpoints=saves)
assert stopped.stopped_by == signal.SIGTERM
assert 4 <= stopped.step < 40, stopped.step
assert stopped.step % WAVES.every == 0
steps = gather("stopped", stopped.step)
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
