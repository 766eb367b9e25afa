"""What README, pages and examples say is true: their code runs, their tree is the house, links lead on."""

import dataclasses
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from shardtrain import cli
from shardtrain.cli.inspect import InspectOptions
from shardtrain.cli.run_file import load_run
from shardtrain.cli.run_options import parse_run
from shardtrain.pipeline.schedule import SCHEDULES, make_table
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.train import train

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
INSTALLING = (ROOT / "docs/install.md").read_text()
PIPELINES = (ROOT / "docs/pipeline.md").read_text()
RUNS = sorted(path.name for path in (ROOT / "examples").glob("*.py") if "def run()" in path.read_text())


def test_the_loop_of_the_readme_is_the_example_and_runs(tmp_path, warm_python):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    example = (ROOT / "examples/own_loop.py").read_text()
    assert example.endswith(code[1])
    script = tmp_path / "loop.py"
    script.write_text(code[1])
    # on one device, as on a laptop
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    done = subprocess.run(
        [*warm_python, script], cwd=tmp_path, env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert losses[-1] < losses[0] < 5.6


OF_THE_PAGE = ("gpt_text", "linen_text")


@pytest.fixture
def trained_example(one_device):
    """(name, folder): train an example for four steps, on one device as on a laptop."""

    def trained_example(name, folder):
        run = load_run(str(ROOT / "examples" / name))
        run = dataclasses.replace(run, run_dir=folder, steps=4, log_every=2)
        # the page of trained models evaluates 32 held-out rows
        batch = 8 if run.batch_unit == "examples" else 64
        run = dataclasses.replace(run, batch=batch, evaluate_batches=4)
        # what is traced and compiled stays the same
        small = {"embed": 16, "mlp": 32, "num_heads": 2, "depth": 11, "filters": 4}
        changes = {key: value for key, value in small.items() if hasattr(run.model, key)}
        if Path(name).stem != "gpt_text":
            run = dataclasses.replace(run, sample=None)
        if changes and Path(name).stem not in OF_THE_PAGE:
            run = dataclasses.replace(run, model=dataclasses.replace(run.model, **changes))
        shown = io.StringIO()
        trained = train(run, Console(file=shown))
        assert trained.step == 4
        assert ("sample:" in shown.getvalue()) == (run.sample is not None)

    return trained_example


ELSEWHERE = (
    "digits_vgg",
    "translation_text",
    "image_folder_vit",
    "corpus_pretraining",
    "own_blocks",
    "skip_edges",
)
"""Those that `test_presets.py` trains, as launched, a test of each in `data`, and the pipelines below."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name in ("bert_text.py", "digits_resnet.py")))
        for name in RUNS
        if Path(name).stem not in OF_THE_PAGE + ELSEWHERE
    ],
)
def test_every_example_trains(name, tmp_path, trained_example):
    trained_example(name, tmp_path)


@pytest.mark.full
def test_two_examples_train_and_the_page_of_trained_models_uses_them(
    tmp_path, monkeypatch, capsys, trained_example
):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in OF_THE_PAGE:
        trained_example(f"{name}.py", Path("runs") / name)
    page = (ROOT / "docs/trained_model.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 6
    found: dict[str, Any] = {}
    for block in blocks:
        exec(block, found)
    assert "def " in capsys.readouterr().out
    # what the run itself told of the same batches
    told = read_jsonl(tmp_path / "runs/gpt_text/metrics.jsonl")[-1]["heldout/loss"]
    np.testing.assert_allclose(found["total"] / found["count"], told, rtol=1e-5)
    with np.load("gpt_text.npz") as arrays:
        assert sum(array.size for array in arrays.values()) == 842_496
    (words,) = commands(page)
    assert cli.main(words[1:]) == 0
    assert (tmp_path / "out/gpt_text/model.safetensors").is_file()


def test_own_model_is_short():
    assert len((ROOT / "examples/own_model.py").read_text().splitlines()) < 60


def test_the_tree_is_the_house_in_import_order():
    tree = re.search(r"```\nshardtrain/\n(.*?)\nmodels/", README, re.DOTALL)
    assert tree is not None
    listed = re.findall(r"^  (\w+)(?:\.py|/)", tree[1], re.MULTILINE)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    packages = [package for layer in reversed(layers) for package in layer.split(" | ")]
    assert listed == ["__init__", *packages[:-1]]
    assert packages[-1] == "__main__"


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_files_and_names_of_the_recipes_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Recipes")[2]
    recipes = dict(re.findall(r"^### ([^\n]*)\n(.*?)(?=^### |\Z)", text, re.MULTILINE | re.DOTALL))
    kinds = (
        "combiner",
        "way to synchronise",
        "sync trigger",
        "schedule",
        "launcher",
        "attention",
        "metric sink",
        "format of data",
        "evaluation metric",
        "mesh axis",
    )
    assert [heading.split(maxsplit=1)[1] for heading in recipes] == list(kinds)
    for heading, recipe in recipes.items():
        paths = re.findall(r"`((?:shardtrain|models|tests|docs)/[\w/.]+)`", recipe)
        assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == [], heading
        assert any(path.startswith("tests/") for path in paths), heading
        # a registry stands in the file that is named behind it
        for name, path in re.findall(
            r"`([A-Z_]{4,})`[^`]*? (?:of|in) `((?:shardtrain|models)/[\w/]+\.py)`", recipe
        ):
            assert re.search(rf"^{name}\b", (ROOT / path).read_text(), re.MULTILINE), (heading, name, path)


def test_ci_runs_the_readmes_test_command():
    command = re.search(r"^(pip install uv && uv run pytest)", README, re.MULTILINE)
    assert command is not None
    assert (ROOT / ".ci/run").read_text().splitlines()[-1].replace("-q ", "") == command[1]


def test_the_release_check_installs_as_the_page_says():
    section = re.search(r"^# Installing\n(.*?)^### ", INSTALLING, re.MULTILINE | re.DOTALL)
    assert section is not None
    script = (ROOT / ".ci/release").read_text()
    unquoted = script.replace('"', "").replace("--quiet ", "")
    pip = [line.partition("  #")[0].strip() for line in section[1].splitlines() if "pip install" in line]
    assert len(pip) == 3
    for line in pip:
        assert line.replace('"', "").replace("path/to/shardtrain", "$wheel") in unquoted
    settings = re.search(r"```toml\n(.*?)```", section[1], re.DOTALL)
    assert settings is not None
    assert settings[1] in script


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


@pytest.fixture
def in_pages_folder(tmp_path, monkeypatch):
    """A folder with the examples, and the table that docs/pipeline.md writes."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    writes_table = re.search(r"```python\n(from shardtrain\.pipeline.*?)```", PIPELINES, re.DOTALL)
    assert writes_table is not None
    exec(writes_table[1], {})


def commands(text: str) -> list[list[str]]:
    """The words of every command that a page shows."""
    lines = re.findall(r"^(?:    |uv run )((?:shardtrain|mpiexec).*(?:\n {6,}:.*)?)", text, re.MULTILINE)
    return [shlex.split(part.replace("\\\n", " ")) for line in lines for part in line.split(" : ")]


@pytest.mark.usefixtures("in_pages_folder")
def test_the_commands_for_pipelines_are_understood():
    found = commands(PIPELINES)
    assert len(found) > 14
    for words in found:
        name = "inspect" if "inspect" in words else "train"
        options = words[words.index(name) + 1 :]
        if "--cpu-devices" in options:
            del options[(at := options.index("--cpu-devices")) : at + 2]
        run, _ = parse_run(name, options, InspectOptions if name == "inspect" else None)
        strategy = run.strategy
        assert name == "inspect" or strategy.accumulate > 1 or strategy.pipeline.in_flight > 1
        assert name == "inspect" or "pipeline" in (strategy.across.axis, *strategy.layout.mesh)


SAME = ("step", "train/loss", "heldout/loss", "grad_norm")


@pytest.mark.usefixtures("in_pages_folder")
@pytest.mark.parametrize(
    ("name", "num_ranks", "devices"),
    [
        ("examples/own_blocks.py", 1, 4),
        pytest.param("examples/skip_edges.py", 2, 1, marks=pytest.mark.full),
    ],
)
def test_the_models_of_the_pipeline_page_train_in_their_pipeline_as_without(
    name, num_ranks, devices, mpiexec, tmp_path
):
    """By the command that stands below each."""
    program = "import sys\nfrom shardtrain import cli\nassert cli.main(sys.argv[1:]) == 0\n"
    words = next(words for words in commands(PIPELINES) if name in words)
    few = ["--batch", 16, "--steps", 2, "--log-every", 1, "--evaluate-batches", 1]
    words = [*words[words.index("train") :], *few]
    if "--cpu-devices" in words:
        del words[(at := words.index("--cpu-devices")) : at + 2]
    mpiexec(num_ranks, program, *words, "--run-dir", "cut", devices=devices)
    mpiexec(1, program, "train", name, "--accumulate", 4, *few, "--run-dir", "whole")
    cut, whole = (read_jsonl(tmp_path / folder / "metrics.jsonl") for folder in ("cut", "whole"))
    assert len(cut) == len(whole) == 2
    for mine, expected in zip(cut, whole, strict=True):
        for key in set(SAME) & expected.keys():
            np.testing.assert_allclose(mine[key], expected[key], rtol=2e-5, err_msg=key)


def test_the_pipeline_page_has_the_figures_of_the_tables():
    rows = re.findall(r"^\| `(\w+)`([^|]*) \| ([\d ]+) \| ([\d ]+) \|", PIPELINES, re.MULTILINE)
    assert [name for name, *_ in rows] == list(SCHEDULES)
    for name, options, *cells in rows:
        num_chunks = 2 if "virtual" in options else 1
        tables = (make_table(name, 4, 8, num_chunks, lockstep) for lockstep in (False, True))
        assert cells == [" ".join(str(table.live(stage)) for stage in range(4)) for table in tables], name


def test_every_promise_of_the_security_page_names_a_test_that_is_there():
    page = (ROOT / "SECURITY.md").read_text().partition("## Promises")[2].partition("## Not promised")[0]
    promises = re.split(r"\n(?=- |\*\*Every)", page)[1:]
    assert len(promises) >= 15
    for promise in promises:
        assert re.search(r"`tests/\S+\.py", promise), promise
    file = ""
    for path, name in re.findall(r"`(?:(tests/\S+?\.py)(?:::\w+(?=::))?(?:::)?)?(test_\w+)?`", page):
        file = path or file
        text = (ROOT / file).read_text()
        assert not name or f"def {name}(" in text, (file, name)
