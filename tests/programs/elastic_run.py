"""A run whose islands come and go: a tiny model with dropout; steps are slow from the one in the file PACE.

The process that finds the file `stop-name` or `stop-line` beside PACE takes it away and stops itself
(SIGSTOP), just before a checkpoint gets its name, or a line of metrics is written; `stopped` has its step.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tiny_language_model import TinyConfig

from shardtrain import Optimizer, Run, Schedule
from shardtrain.checkpoints.folders import CheckpointFolders
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.elastic.options import Elastic
from shardtrain.report.sinks.json_lines import JsonLines
from shardtrain.trainer.hooks import Hook

MODEL = TinyConfig(vocab=32, num_layers=2, dropout=0.1)


@dataclass(frozen=True)
class Tokens:
    def train(self, folder: Path) -> Any:
        return self._draw(0, 64)

    def heldout(self, folder: Path) -> Any:
        return self._draw(1, 8)

    def _draw(self, seed: int, number: int) -> Any:
        tokens = np.random.default_rng(seed).integers(0, 32, (number, 9), np.int32)
        return [{"tokens": row} for row in tokens]


def wait(step: int) -> None:
    if step >= int(Path(os.environ["PACE"]).read_text()):
        # where the start of an island takes long, the run has steps left for it
        time.sleep(0.25 if step < 60 else 2)


def stop_before(owner: type, name: str, file: str) -> None:
    do = getattr(owner, name)

    def stop(self: Any, step: int, *rest: Any) -> None:
        with suppress(FileNotFoundError):
            path = Path(os.environ["PACE"]).with_name(file)
            path.unlink()
            path.with_name("stopped").write_text(str(step))
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)  # other threads may be stopped first
        do(self, step, *rest)

    setattr(owner, name, stop)


stop_before(CheckpointFolders, "finish", "stop-name")
stop_before(JsonLines, "write", "stop-line")


def run() -> Run:
    return Run(
        model=MODEL,
        data=Tokens(),
        optimizer=Optimizer(learning_rate=Schedule(peak=1e-2)),
        batch=10,
        steps=120,
        log_every=1,
        evaluate_every=20,
        checkpoints=CheckpointPolicy(every_steps=10, keep=99),
        elastic=Elastic(patience_seconds=2.0),
        hooks=(Hook(on_step=wait),),
        sinks=("jsonl",),
    )
