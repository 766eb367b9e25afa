"""Runs that print to a text, and the data of one whose samples are in memory."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.config import Run
from shardtrain.trainer.train import train


class InMemory:
    """Samples to train on, and those held out: samples, sets of them by name, or None."""

    def __init__(self, samples: Any, heldout: Any = None):
        self.samples, self.sets = samples, heldout

    def train(self, folder: Path) -> Any:
        return self.samples

    def heldout(self, folder: Path) -> Any:
        return self.sets


def random_tokens(number: int = 64, seed: int = 0, vocab: int = 32) -> list[dict[str, np.ndarray]]:
    """Return samples of 9 tokens."""
    found = np.random.default_rng(seed).integers(0, vocab, (number, 9)).astype(np.int32)
    return [{"tokens": row} for row in found]


def train_quietly(run: Run, **options: Any) -> tuple[Any, str, list[dict[str, float]]]:
    """Return what `train` returns, what it printed, and the lines of the run's metrics."""
    assert run.run_dir is not None
    printed = io.StringIO()
    trained = train(run, Console(file=printed, width=400), **options)
    return trained, printed.getvalue(), read_jsonl(run.run_dir / "metrics.jsonl")
