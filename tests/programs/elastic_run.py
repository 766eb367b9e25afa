"""A run whose islands come and go: a tiny model with dropout; steps are slow from the one in the file PACE.

The process that finds the file `stop-name`, `stop-line` or `stop-values` beside PACE takes it away and stops
itself (SIGSTOP), just before a checkpoint gets its name, or a line of metrics or the evaluations are written;
`stopped` has the step of the first two. The file `heldout` there has the losses of some evaluations.
"""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from quiet_training import InMemory, random_tokens
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.checkpoints.evaluations import Evaluations
from shardtrain.checkpoints.folders import CheckpointFolders
from shardtrain.report.sinks.json_lines import JsonLines
from shardtrain.trainer import session
from shardtrain.trainer.evaluation import make_evaluation

MODEL = TinyConfig(vocab=32, num_layers=2, dropout=0.1)


def wait(step: int) -> None:
    if step >= int(Path(os.environ["PACE"]).read_text()):
        # where the start of an island takes long, the run has steps left for it
        time.sleep(0.25 if step < 60 else 2)


def stop_before(owner: type, name: str, file: str) -> None:
    do = getattr(owner, name)

    def stop(self: Any, step: Any, *rest: Any) -> None:
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
stop_before(Evaluations, "_replace", "stop-values")


def make_given_evaluation(*parts: Any) -> Any:
    """The losses of the file `heldout`, 2 where it has none."""
    computed, path = make_evaluation(*parts), Path(os.environ["PACE"]).with_name("heldout")

    def evaluate(state: Any) -> dict[str, float]:
        if not path.exists():
            return computed(state)
        return {"heldout/loss": json.loads(path.read_text()).get(str(int(state.step)), 2.0)}

    return evaluate


session.make_evaluation = make_given_evaluation


def run() -> st.Run:
    return st.Run(
        model=MODEL,
        data=InMemory(random_tokens(), random_tokens(8, 1)),
        optimizer=st.Optimizer(learning_rate=st.Schedule(peak=1e-2)),
        batch=10,
        steps=120,
        log_every=1,
        evaluate_every=20,
        checkpoints=st.CheckpointPolicy(every_steps=10, keep=99),
        elastic=st.Elastic(patience_seconds=2.0),
        hooks=(st.Hook(on_step=wait),),
        sinks=("jsonl",),
        sample=lambda apply: f"sampled {float(apply(jnp.zeros((2, 8), int)).sum()):.3f}",
    )
