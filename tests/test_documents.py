"""What README and examples say is true: their code runs, their tree is the house, links lead somewhere."""

import dataclasses
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from shardtrain.cli.run_options import load_run
from shardtrain.trainer import train

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RUNS = sorted(path.name for path in (ROOT / "examples").glob("*.py") if "def run()" in path.read_text())


def test_the_loop_of_the_readme_is_the_example_and_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    example = (ROOT / "examples/own_loop.py").read_text()
    assert example.endswith(code[1])
    script = tmp_path / "loop.py"
    script.write_text(code[1])
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert losses[-1] < losses[0] < 5.6


@pytest.mark.parametrize("name", RUNS)
def test_every_example_trains(name, tmp_path):
    run = dataclasses.replace(load_run(str(ROOT / "examples" / name)), run_dir=tmp_path, steps=4, log_every=2)
    run = dataclasses.replace(run, evaluate_batches=1, sample=None)
    trained = train(run, Console(file=io.StringIO()))
    assert trained.step == 4


def test_own_model_is_short():
    assert len((ROOT / "examples/own_model.py").read_text().splitlines()) < 60


def test_the_tree_is_the_house_in_import_order():
    tree = re.search(r"```\nshardtrain/\n(.*?)\nmodels/", README, re.DOTALL)
    assert tree is not None
    rooms = [m[1].removesuffix(".py") for m in re.finditer(r"^  (\w+(?:\.py|/))", tree[1], re.MULTILINE)]
    rooms = [room.rstrip("/").removesuffix(".py") for room in rooms if not room.startswith("__init__")]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    assert rooms == [layer for layer in reversed(layers) if layer != "__main__"]


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_ci_runs_the_readmes_test_command():
    command = re.search(r"^(pip install uv && uv run pytest)", README, re.MULTILINE)
    assert command is not None
    assert (ROOT / ".ci/run").read_text().splitlines()[-1].replace("-q ", "") == command[1]


def test_the_readme_shows_real_output():
    shown = README.split("```")[3]
    for line in (
        "mesh: 1 device",
        "parameters: 842,496",
        "step 300/300  loss",
        "sample:",
        "run folder: runs/gpt_text",
    ):
        assert line in shown
