"""What programs of whole runs on islands share: a tiny run of a text, its bits, a folder as before a save."""

import dataclasses
import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.checkpoints.folders import CheckpointFolders
from shardtrain.train_step.sync.waves import Waves

JOINED = st.join()
ISLANDS: Any = JOINED
"""None of a program that was started alone."""

IS_FIRST = JOINED is None or JOINED.is_first
RATE = st.Schedule(name="constant", peak=1e-2, warmup=2)


def make_run(text: Path, **options: Any) -> st.Run:
    """Return a run of six steps with dropout, which saves its fourth and its last step."""
    given: dict[str, Any] = {
        "model": TinyConfig(num_layers=2, dropout=0.1),
        "data": st.Text(paths=(text,), seq=8, heldout_fraction=0.06),
        "optimizer": st.Optimizer(learning_rate=RATE),
        "batch": 8,
        "seed": 3,
        "steps": 6,
        "evaluate_every": 3,
        "checkpoints": st.CheckpointPolicy(every_steps=4, keep=4),
    }
    return st.Run(log_every=1, **{**given, **options})


def make_train(run: st.Run, folder: Path) -> Callable[..., tuple[Any, str]]:
    """Return (name, fields that differ) -> (what `train` returns, what it printed)."""

    def train_run(name: str, **changes: Any) -> tuple[Any, str]:
        output = io.StringIO()
        given = dataclasses.replace(run, run_dir=folder / name, **changes)
        return st.train(given, Console(file=output, width=400), ISLANDS), output.getvalue()

    return train_run


def bits(tree: Any) -> list[str]:
    return [np.asarray(leaf.addressable_data(0)).tobytes().hex() for leaf in jax.tree.leaves(tree)]


def flatten(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])


def gather(name: str, value: Any = None) -> list[Any]:
    """What each island gave; one alone gets its own."""
    return [value] if ISLANDS is None else ISLANDS.all_gather_islands(name, value)


def copy_without(step: int, source: Path, target: Path) -> None:
    """Copy the folder of a run as it was before it saved a step."""
    gather(f"{source} is there")
    if IS_FIRST:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(f"step_{step:08}*"))
    gather(f"{target} is there")


@contextmanager
def failing_save(failing: int) -> Iterator[None]:
    """Let the first save of a step fail on this island."""
    make_partial, failed = CheckpointFolders.make_partial, []

    def fail_once(self: CheckpointFolders, step: int) -> Path:
        if step != failing or failed:
            return make_partial(self, step)
        failed.append(step)
        raise OSError("the disk is full")

    CheckpointFolders.make_partial = fail_once
    try:
        yield
    finally:
        CheckpointFolders.make_partial = make_partial
    assert failed


def find_refusal(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    try:
        function(*arguments, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError(options)


def record_pushes(train_run: Callable[[], Any]) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return what a run in waves returns, its first parameters, and the sum of all that it pushed."""
    pushed, starts, end_wave = [], [], Waves._end_wave

    def recorded(self, state, number):
        if not pushed:
            starts.append(flatten(state.params))
        pushed.append(flatten(state.local.drift) * np.float32(self.worker.share()))
        return end_wave(self, state, number)

    Waves._end_wave = recorded
    try:
        return train_run(), starts[0], np.sum(pushed, 0)
    finally:
        Waves._end_wave = end_wave
