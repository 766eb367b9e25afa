"""A test that fails beside others is run once more alone: a whole run of pytest, of tests made here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, pytest
BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ

def test_passes(): pass

@pytest.mark.parametrize("text", ["a::b [c]"])
def test_flaky(text): assert not BESIDE_OTHERS, "too slow"

@pytest.fixture
def flaky():
    yield
    assert not BESIDE_OTHERS

def test_flaky_teardown(flaky): pass

def test_crashes_the_process():
    if BESIDE_OTHERS: os.abort()
"""
FLAKY = {"test_flaky[a::b [c]]", "test_flaky_teardown", "test_crashes_the_process"}


def run(folder: Path, program: str) -> tuple[int, str, set[str]]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(program)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "retry_alone", "-n1"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, set(re.findall(r"^flaky: test_it.py::(.*)$", done.stdout, re.M))


def test_what_passes_alone_is_named_and_fails_no_run(tmp_path):
    code, output, flaky = run(tmp_path, PROGRAM)
    assert (code, flaky) == (0, FLAKY), output
    assert "AssertionError: too slow" in output
    assert re.search(r"\b3 flaky\b", output.splitlines()[-1])


FEW = """
import os
BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
def test_flaky(): assert not BESIDE_OTHERS
"""


@pytest.mark.full
def test_what_fails_twice_fails_the_run(tmp_path):
    code, output, flaky = run(tmp_path, FEW + "def test_wrong(): assert 1 == 2\n")
    assert (code, flaky) == (1, {"test_flaky"}), output
    assert "FAILED test_it.py::test_wrong" in output
    assert "1 failed, 1 flaky" in output.splitlines()[-1]


def test_what_could_not_be_collected_fails_the_run(tmp_path):
    (tmp_path / "test_no_module.py").write_text("import no_such_module\n")
    code, output, flaky = run(tmp_path, FEW)
    assert (code, flaky) == (1, {"test_flaky"}), output


@pytest.mark.full
def test_more_than_ten_failures_are_not_run_again(tmp_path):
    many = "import pytest\n@pytest.mark.parametrize('n', range(11))\ndef test_many(n): test_flaky()\n"
    code, output, flaky = run(tmp_path, FEW + many)
    assert (code, flaky) == (1, set()), output
    assert "12 tests failed, more than 10: none is run again" in output
