"""The benchmarks of the bridge and of Adasum, run as people run them, small. Nothing here looks at a time."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardtrain.system.xla_flags import PRESETS

FOLDER = Path(__file__).parents[2] / "benchmarks"
ABOVE_AN_ARENA = 80 << 20


@pytest.fixture(scope="module")
def launch(tmp_path_factory, warm_python):
    """Run a benchmark on some ranks: what it prints, and its figures. Forked ranks share pages at first."""

    def launch(num_ranks, script, *arguments, python=warm_python):
        path = tmp_path_factory.mktemp("figures") / "figures.json"
        command = shutil.which(
            "mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        )
        assert command is not None
        words = [command, "-n", str(num_ranks), *python, str(FOLDER / script), "--json", str(path)]
        done = subprocess.run(
            [*words, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, json.loads(path.read_text())

    return launch


@pytest.mark.full
def test_every_way_of_summing_stands_beside_mpi_and_takes_no_new_pages(launch, monkeypatch):
    # flags of the tests would be the user's, which the preset leaves as they are
    monkeypatch.delenv("XLA_FLAGS")
    sizes = [4096, ABOVE_AN_ARENA]
    printed, rows = launch(2, "bridge.py", "--rounds", 2, "--num-bytes", *sizes, python=[sys.executable])
    sides = ["MPI", "MPI into new memory", "one jit", "bridge"]
    sides += ["MPI, and a program that reads as much", "bridge, and a program that reads the mean"]
    assert [(row["what"], row["side"]) for row in rows] == [
        (f"{size >> 10:,} KB", side) for size in sizes for side in sides
    ]
    for row in rows:
        assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
        assert row["seconds"] > 0
        # a buffer of new pages would cost 20,000, or 40 huge ones
        assert row["faults"] < 35, row
    assert printed.count("| bridge |") == len(sizes)
    assert f"\nXLA flags of the preset auto: {PRESETS['auto'][0].name}=" in printed


@pytest.mark.full
def test_the_step_alone_and_with_the_bridge(launch):
    sizes = {"embed": 16, "num-layers": 2, "seq": 8, "rows": 2, "steps": 2, "rounds": 2, "bucket-bytes": 4096}
    arguments = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    _, rows = launch(2, "bridge.py", "--part", "step", *arguments)
    bridges = ("gradients in bfloat16", "a first bucket of 1 MB", "bucket after bucket")
    sides = ["alone", "alone, and a barrier", "bridge", *(f"bridge, {each}" for each in bridges)]
    assert sorted(row["side"] for row in rows) == sorted(sides)
    assert all(row["seconds"] > 0 for row in rows)
    _, rows = launch(2, "bridge.py", "--part", "overlap", "--num-parts", 2, *arguments)
    sides = ["alone", *(f"bridge, gradients in {each}" for each in ("1 program", "2 programs"))]
    assert sorted(row["side"] for row in rows) == sorted(sides)


@pytest.mark.full
def test_adasum_sends_what_an_all_reduce_sends_and_scalars(launch):
    _, figures = launch(4, "adasum.py", "--embed", 16, "--blocks", 2, "--rounds", 2)
    assert figures["num_leaves"] == 12
    assert figures["num_parameters"] == 2 * (12 * 16**2 + 5 * 16)
    ring = 2 * 4 * figures["num_parameters"] * 3 / 4
    assert figures["ring_bytes"] == ring
    # 4 bytes a rank and leaf for the exponents, 12 a level and leaf, 8 a leaf at the end
    assert ring < figures["sent_bytes"]["adasum"] < ring + 12 * (4 * 3 + 2 * 12 * 2 + 8 * 2)
    assert ring < figures["sent_bytes"]["mean"] < ring + 100
    assert set(figures["ratios"]) == {"mean", "adasum"}


def test_losses_in_16_bits_stand_beside_those_of_float32(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    text = importlib.import_module("reduce_dtype").table({"float32": [2.0, 4.0], "other": [2.1, 4.0]})
    assert text.splitlines()[2:] == [
        "| float32 | 3.0000 | 1.0000 | 1.0000, 1.0000 |",
        "| other | 3.0500 | 1.0250 | 1.0500, 1.0000 |",
    ]
