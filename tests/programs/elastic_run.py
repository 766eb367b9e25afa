"""A run whose islands come and go: a small GPT with dropout; steps are slow from the one in the file PACE.

With STOP_BEFORE=name or STOP_BEFORE=line it stops itself (SIGSTOP) in step 10, just before the checkpoint
gets its name, or the line of metrics is written.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain import Optimizer, Run, Schedule
from shardtrain.checkpoints.folders import CheckpointFolders
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.elastic.options import Elastic
from shardtrain.models.gpt import GptConfig
from shardtrain.report.sinks.json_lines import JsonLines
from shardtrain.trainer.hooks import Hook

MODEL = GptConfig(vocab=32, seq=8, embed=16, num_layers=2, num_heads=2, dropout=0.1)


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
        time.sleep(0.25)


def stop_before(owner: type, name: str) -> None:
    do = getattr(owner, name)

    def stop(self: Any, step: int, *rest: Any) -> None:
        if step == 10:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)  # other threads may be stopped first
        do(self, step, *rest)

    setattr(owner, name, stop)


def run() -> Run:
    if place := os.environ.get("STOP_BEFORE"):
        stop_before(*{"name": (CheckpointFolders, "finish"), "line": (JsonLines, "write")}[place])
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
