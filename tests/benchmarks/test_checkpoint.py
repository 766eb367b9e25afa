"""The benchmark of checkpoints, small: every side saves or restores, and its figures are whole."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SIZES = {"embed": 64, "layers": 6, "vocab": 64}


@pytest.fixture(scope="module")
def modules():
    """The scripts as modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("checkpoint"), importlib.import_module("checkpoint_child")


@pytest.mark.full
def test_every_side_saves_and_has_its_stall(modules, tmp_path):
    benchmark, _ = modules
    options = benchmark.Options(embed=64, vocab=64, seq=8, rows=2, steps=2, rounds=2, fast=tmp_path)
    ratios, step_seconds, num_bytes = benchmark.stalls(options, tmp_path)
    assert set(ratios) == {"nothing", "toolkit", "toolkit, fast tier", "Orbax by hand"}
    assert step_seconds > 0
    assert num_bytes > 3 * 4 * 6 * 12 * 64**2  # parameters of the blocks, and two moments
    assert all(ratios[side]["blocked"].high > 0 for side in set(ratios) - {"nothing"})
    assert benchmark.stall_report(ratios, step_seconds, num_bytes).count("| toolkit") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "case", ["1 device -> fsdp 8", "a third of the blocks", "blocks of two stages -> in order"]
)
def test_every_way_restores_what_is_asked_for(modules, tmp_path, case):
    benchmark, child = modules
    saved, cut, devices, third = benchmark.CASES[case]
    told = {**SIZES, "folder": str(tmp_path), "rows": cut, "third": third}
    child.save({**told, "devices": saved})
    ways = ["toolkit", "verified"] + ["orbax"] * (not cut and not third)
    runs = {way: child.restore({**told, "how": way, "devices": devices}) for way in ways}
    whole = 3 * 4 * (64 * 64 + 6 * 12 * 64**2 + 6 * 64)
    expected = whole // 3 - 4 * 64 * 64 if third else whole
    assert {run["array_bytes"] for run in runs.values()} == {expected}
    assert all(run["read"] > 0 for run in runs.values())
    assert runs["verified"]["read"] > runs["toolkit"]["read"]


def test_sizes_that_cannot_be_measured_are_refused(modules):
    with pytest.raises(ValueError) as error:
        modules[0].Options(rounds=1, num_layers=4)
    expected = "this cannot be measured: rounds is 1; use 2 or more; num_layers is 4; use 6 or 12"
    assert str(error.value) == expected
