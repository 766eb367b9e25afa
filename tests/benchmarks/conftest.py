"""The scripts of benchmarks/ as modules, which find their neighbours as when they are run."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Import a script by name."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module
