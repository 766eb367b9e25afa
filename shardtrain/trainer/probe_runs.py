"""Run a few steps of a run in some other way, to measure them: nothing is saved.

Next: `plan/calibration.py`, which fits a machine to what they take.
"""

import statistics
import time
from dataclasses import replace
from typing import Any

import jax

from shardtrain.data import place
from shardtrain.plan.prediction import Choice
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.step import make_step
from shardtrain.trainer.config import Run
from shardtrain.trainer.planned import with_choice
from shardtrain.trainer.setup import FIRST_POSITION, make_setup, microbatch_of
from shardtrain.trainer.sources import make_batches

STEPS = 7
"""Steps that are measured, after one that compiles and one that warms up."""


def probe_seconds(run: Run, source: Any, choice: Choice) -> float:
    """Return the seconds of a step on this machine's devices, the median of `STEPS`.

    Args:
      run: the run; its layout, microbatches, recomputation and pipeline are replaced.
      source: its training samples.
      choice: the way to run it.

    Raises:
      ValueError: the run refuses it.
    """
    run = replace(run, strategy=with_choice(run.strategy, choice))
    setup = make_setup(run, microbatch=microbatch_of(run, source))
    batch = make_batches(run, source).load(FIRST_POSITION)
    placed = place(batch, setup.mesh, run.strategy.layout.batch_axes, choice.accumulate)
    state: Any = init_state(setup.model, setup.optimizer, setup.placement, run.seed)
    step = make_step(setup.model, run.loss, setup.optimizer, setup.placement, setup.learning_rate)
    seconds = []
    for _ in range(STEPS + 2):
        began = time.perf_counter()
        state, metrics = step(state, placed)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])
