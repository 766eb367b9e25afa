"""Every benchmark runs as people run it, at its smallest size. Nothing here looks at a time."""

import doctest
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
COMMANDS = {
    "overhead.py --model tiny --steps 4 --rounds 2": (1, "| whole loop |"),
    "bridge.py --rounds 2": (2, "| 4 KB | bridge |"),
    "bridge.py --part step --rows 2 --steps 2 --rounds 2 --embed 16": (
        2,
        "| bridge, gradients in bfloat16 |",
    ),
    "bridge.py --part overlap --rows 2 --steps 2 --rounds 2 --embed 16": (2, "programs: 2 |"),
    "bridge.py --part buckets --rows 2 --steps 2 --rounds 2 --embed 16": (2, "| buckets of 256 KB |"),
    "bridge.py --part combiners --embed 16 --rounds 2": (2, "| 48 leaves | adasum |"),
    "checkpoint.py --part stall --rows 2 --steps 2 --rounds 2 --embed 16 --num-layers 2 --seq 8": (
        1,
        "| toolkit, fast tier |",
    ),
    "data.py --size tiny --steps 3 --rounds 2 --megabytes 0.1": (1, "| library, 2 |"),
    "waves.py --steps 20 --pause 0.01": (1, "| waves, D = 4 |"),
    "unequal_islands.py --slow 1 --steps 30 --rounds 1": (1, "auto / ideal"),
    "resnet_depth.py --depth 11 --stack 1 --ways one": (1, "largest relative difference"),
    "attention.py --seqs 8 --rounds 2": (1, "| 8 | 4 segments |"),
    "startup.py --starts 1": (1, "of the first step: cold"),
    "house.py": (1, "options of train"),
}


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:3]))
def test_it_runs(command, warm_python, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", re.sub(r"device_count=\d+", "device_count=1", os.environ["XLA_FLAGS"]))
    num_ranks, shown = COMMANDS[command]
    name, *arguments = command.split()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    mpiexec = [str(shutil.which("mpiexec", path=path)), "-n", str(num_ranks)]
    words = [*(mpiexec if num_ranks > 1 else []), *warm_python, str(FOLDER / name), *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shown in done.stdout


@pytest.mark.full
def test_both_loops_compute_the_same_losses(script):
    overhead = script("overhead")
    found = overhead.measure(overhead.MODELS["tiny"], 6, steps=4, rounds=2)
    hand, toolkit = found.losses
    np.testing.assert_allclose(toolkit, hand, rtol=1e-5)
    # and they train: a step that changed nothing would give equal losses too
    assert len(set(hand)) == overhead.COMPARED


@pytest.mark.parametrize("name", ["paired", "house", "waves"])
def test_examples(script, name):
    found = doctest.testmod(script(name))
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.full
def test_steps_to_a_target_are_found_and_runs_that_diverge_given_up(script):
    benchmark = script("steps_to_target")
    setting = benchmark.SETTINGS["adam"]._replace(rates=(-6, 10))
    windows = np.random.default_rng(0).integers(0, 4, (200, 9))
    text, heldout = windows.astype(np.uint8).ravel(), (windows[:, :-1], windows[:, -1])
    task = benchmark.Task(benchmark.jnp.asarray(text), tuple(map(benchmark.jnp.asarray, heldout)))
    rows = []
    for replicas, combiner in ((1, "mean"), (2, "adasum+deltas")):
        trainer = benchmark.Trainer(task, setting, combiner, replicas)
        rows.append(benchmark.Row("s", combiner, replicas, benchmark.search(trainer, setting, None, 5.0, 30)))
    for row in rows:
        assert row.steps[10] == math.inf
        assert row.best == -6
        assert 0 < row.steps[-6] <= 30
    assert benchmark.table(rows).count("| 2^-6 |") == 2
