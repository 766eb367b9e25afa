"""The overhead benchmark, run as people run it with tiny sizes: both sides compute the same losses.

Nothing here looks at a time.
"""

import importlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from shardtrain.models.decoder import gpt2

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
COMPARED = 12


@pytest.fixture(scope="module")
def overhead():
    """The script as a module; it finds its neighbours as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module("overhead")


@pytest.fixture(scope="module")
def printed_and_figures(tmp_path_factory, warm_python):
    """What a GPU runs but for its size and for bfloat16, in which the losses differ by its rounding."""
    path = tmp_path_factory.mktemp("overhead") / "figures.json"
    options = {"model": "tiny", "dtype": "float32", "batch": 6, "seq": 8, "steps": 4, "rounds": 2, "long": 6}
    options |= {"compare": COMPARED, "json": path}
    arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run([*warm_python, str(SCRIPT), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


@pytest.mark.full
def test_both_sides_compute_the_same_losses(printed_and_figures):
    hand, toolkit = printed_and_figures[1]["losses"]
    assert len(hand) == COMPARED
    np.testing.assert_allclose(toolkit, hand, rtol=1e-5)
    # and they train: a step that changed nothing would give equal losses too
    assert len(set(hand)) == COMPARED


@pytest.mark.full
def test_every_pair_has_its_spread_and_the_noise_floor_stands_beside_it(printed_and_figures):
    printed, figures = printed_and_figures
    assert set(figures["spreads"]) == {
        "whole loop",
        "whole loop, long blocks",
        "compiled step alone",
        "noise floor",
    }
    for pair, spreads in figures["spreads"].items():
        assert set(spreads) == {"step_seconds", "wall_seconds", "cpu_seconds"}
        for spread in spreads.values():
            low, high = spread["sure"]
            assert 0 < low <= spread["median"] <= high
            assert spread["low"] <= spread["median"] <= spread["high"]
        assert sum(line.startswith(f"{pair:28}") for line in printed.splitlines()) == 3


@pytest.mark.full
def test_tokens_per_second_are_those_of_the_toolkit_loop(printed_and_figures):
    _, figures = printed_and_figures
    expected = 6 * 8 / figures["step_seconds"]["toolkit loop"]
    assert figures["tokens_per_second"] == pytest.approx(expected)


@pytest.mark.full
def test_no_mfu_is_guessed_for_an_unknown_device(printed_and_figures):
    printed, figures = printed_and_figures
    assert figures["device_kind"] == "cpu"
    assert figures["mfu"] is None
    assert "MFU: unknown device 'cpu'" in printed


def test_on_a_gpu_it_is_gpt2_in_bfloat16(overhead):
    options, config = overhead.filled(overhead.Options(), "gpu")
    assert (options.model, options.dtype, options.batch, options.seq) == ("gpt2", "bfloat16", 16, 1024)
    assert config == gpt2(dtype="bfloat16")
    # what is asked for goes first
    options, config = overhead.filled(overhead.Options(model="tiny", seq=8), "gpu")
    assert (options.model, options.batch, config.seq, config.dtype) == ("tiny", 4, 8, "bfloat16")


def test_mfu_and_its_formula_are_printed_for_a_known_device(overhead):
    figures = overhead.Figures(
        options=overhead.Options(),
        device_kind="NVIDIA H100 80GB HBM3",
        losses=([], []),
        step_seconds={},
        cpu_seconds={},
        spreads={},
        tokens_per_second=123456.7,
        mfu=0.4321,
    )
    text = overhead.speed(figures)
    assert text.startswith("toolkit loop: 123,457 tokens per second; MFU 43.2% (PaLM, appendix B: ")


def test_too_few_steps_are_refused(overhead):
    with pytest.raises(ValueError) as error:
        overhead.Options(steps=2, rounds=1, long=3)
    expected = (
        "this cannot be measured: steps is 2; use 4 or more; rounds is 1; use 2 or more; long is 3; use 4 or"
        " more"
    )
    assert str(error.value) == expected
