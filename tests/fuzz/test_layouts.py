"""Random models on random layouts give the step of one device, or are refused before it.

`fuzz.py` runs any number of them; here are some, and the smallest case of each fault.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from case import Case, read_case
from drawing import KINDS, draw_case
from shrinking import shrink

KNOWN = dict(
    line.split(": ", 1)
    for line in (HERE / "known_cases.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


@pytest.fixture
def fuzz(warm_python):
    """Run `fuzz.py` with some words, and return its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str]:
        command = [*warm_python, str(HERE / "fuzz.py"), *words]
        environment = {**os.environ, "PYTHONWARNINGS": "default"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.returncode, done.stdout + done.stderr

    return run


def test_random_layouts_give_the_step_of_one_device(fuzz, pytestconfig):
    number = "1500" if pytestconfig.getoption("--full") else "1"
    code, text = fuzz("--cases", number, "--seed", "2297")
    assert code == 0, text


def test_random_shardings_of_operators_give_the_step_of_one_device(fuzz, pytestconfig):
    words = ("--cases", "200") if pytestconfig.getoption("--full") else ("--cases", "1", "--kinds", "stack")
    code, text = fuzz("--operators", "--seed", "2", *words)
    assert code == 0, text
    assert " right" in text


# tests of models have these on a mesh: test_packed_rows.py, test_collective_matmul.py, test_resnet.py; and
# test_pipeline.py has stages of few rows, test_per_device.py transposed convolutions; most with --full alone
ELSEWHERE = ("packed", "experts with", "ResNet", "transposed convolutions", "sequence-sharded stages")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * name.startswith(ELSEWHERE)) for name in KNOWN]
)
def test_what_was_wrong_once(name, fuzz):
    _, text = fuzz("--case", KNOWN[name])
    assert '"end": "right"' in text, text


def test_a_case_is_read_as_it_was_written():
    for number in range(300):
        case = draw_case(5, number, options=bool(number % 2))
        assert read_case(str(case)) == case


def test_every_kind_of_model_and_number_of_devices_is_drawn():
    cases = [draw_case(6, number) for number in range(600)]
    assert {case.kind for case in cases} == set(KINDS)
    assert {case.num_devices for case in cases} >= {2, 3, 4, 6, 8, 9, 12}
    assert max(case.num_devices for case in cases) == 12


def test_a_failing_case_shrinks_to_what_fails():
    def run(case: Case) -> dict[str, str]:
        layers = case.model["layers"]
        failed = "tensor" in case.mesh and any(word.startswith("conv") and "g4" in word for word in layers)
        return {"end": "wrong" if failed else "right"}

    case = read_case(
        "kind=stack model=shape:4+4+8,layers:dense.8+silu+conv.8.3x3.s2.g4+silu,head:mean"
        " mesh=data:2,fsdp:2,tensor:2 names=mlp layout=zero:1 remat=full accumulate=4 rows=16 samples=9"
    )
    small, found = shrink(case, "wrong", run)
    assert found["end"] == "wrong"
    assert small.mesh == {"tensor": 2}
    assert [word.split(".")[0] for word in small.model["layers"]] == ["conv"]
    assert (small.layout, small.remat, small.accumulate, small.samples) == ({}, None, 1, 0)
