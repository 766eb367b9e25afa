"""The run that `gpu.py` starts: a model of published size, named by GPU_MODEL, on the bytes of real text."""

import os

from gpu import CASES, here

from shardtrain import Optimizer, Run, Schedule, Text


def run() -> Run:
    case = CASES[os.environ["GPU_MODEL"]]
    config = here(case)
    return Run(
        model=config,
        data=Text(seq=config.seq, heldout_fraction=0),
        optimizer=Optimizer(learning_rate=Schedule(peak=3e-4)),
        batch=case.rows_here,
        steps=60,
    )
