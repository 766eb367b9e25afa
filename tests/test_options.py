"""Every option that a page or a message names is one that a command has, and what is printed can be run."""

import ast
import contextlib
import re
import shlex
from pathlib import Path

import pytest

from shardtrain import cli
from shardtrain.cli.checkpoint_files import option_words
from shardtrain.cli.inspect import InspectOptions
from shardtrain.cli.run_options import parse_run
from shardtrain.cli.train import TrainOptions
from shardtrain.models.decoder import DecoderConfig

ROOT = Path(__file__).parents[1]
OPTION = re.compile(r"(?<![\w\-/])--[a-z][\w.\-]*")
OTHERS = {
    "uv and pip": "--extra --group --no-build-isolation --no-cache-dir --no-group --no-sync --refresh-package"
    " --reinstall-package --wheel --with",
    "mpiexec": "--bind-to --host --mca --oversubscribe --version",
    "Slurm": "--code --cpu-bind --cpus-per-task --exclusive --gpu-bind --gpus-per-task --gres"
    " --kill-on-bad-exit --mem --ntasks-per-node --open-mode --output --signal",
    "XLA": "--xla-cpu-enable-fast-math --xla-dump-to --xla-force-host-platform-device-count",
    "containers": "--cpus --memory --shm-size",
    "other programs": "--add-source --cpunodebind --format --launcher --membind --query-gpu --usr1 --zone",
    "patterns of ours": "--model --model.NAME --model.no --watch",
}
"""Options of other programs that pages and messages name, and beginnings of ours."""

COMMANDS = (
    ["train", "{run}"],
    ["train", "examples/bert_text.py"],
    ["train", "examples/gpt_text.py"],
    ["inspect", "examples/gpt_text.py"],
    ["launch"],
    ["launch", "mpi"],
    ["launch", "slurm"],
    ["doctor"],
    *(["checkpoint", name] for name in ("ls", "show", "verify", "diff", "prune", "export", "import")),
)
TOKENS_RUN = """
from pathlib import Path
from shardtrain import MaskedTokens, Run, Tokens
from shardtrain.models.decoder import DecoderConfig
TOKENS = Tokens(path=Path("tokens.npy"), vocab=256, seq=8)
MODEL = DecoderConfig(vocab=8, seq=8, embed=16, num_layers=1, num_heads=2, bias=False, dtype="bfloat16")
def run(): return Run(model=MODEL, data=TOKENS)
def masked(): return Run(model=MODEL, data=MaskedTokens(data=TOKENS, mask_token=0))
"""


def options(text):
    """The options in a text, as they are written with hyphens."""
    return {found.rstrip(".-").replace("_", "-") for found in OPTION.findall(text)}


def texts():
    """(where it stands, text) of every page but figures, and of every string of the package."""
    pages = [page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"]
    for page in [*pages, *(ROOT / "docs").rglob("*.md")]:
        if page.parent.name not in ("benchmarks", "decisions"):
            yield page.name, page.read_text()
    for folder in ("shardtrain", "models", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "tokens_run.py"
    path.write_text(TOKENS_RUN)
    return path


def test_every_option_that_is_named_exists(run_file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(ROOT)
    commands = [*COMMANDS, ["train", f"{run_file}:masked"]]
    for words in commands:
        with contextlib.suppress(SystemExit):
            assert cli.main([word.format(run=run_file) for word in words] + ["--help"]) == 0
    known = options(capsys.readouterr().out) | set(" ".join(OTHERS.values()).split())
    assert len(known) > 150
    unknown = {where: found for where, text in texts() if (found := options(text) - known)}
    assert unknown == {}


def test_every_section_that_a_message_names_is_there():
    readme = (ROOT / "README.md").read_text()
    named = {
        (where, section)
        for where, text in texts()
        if ".py" in where
        for section in re.findall(r"README, ([A-Z][\w, ]+)", text)
    }
    assert len(named) >= 3
    assert [found for found in named if f"\n## {found[1]}\n" not in readme] == []


@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(vocab=9, seq=8, embed=16, num_layers=1, num_heads=2, positions="rotary", tied=False),
        DecoderConfig(vocab=9, seq=8, embed=16, num_layers=1, num_heads=2, bias=False, head_dim=4),
    ],
)
def test_the_options_of_an_import_make_its_model_of_any_other(config, run_file):
    run, _ = parse_run("train", [str(run_file), *option_words(config)])
    assert run.model == config


def test_the_options_of_nested_data_need_no_subcommand(run_file):
    run, _ = parse_run("train", [f"{run_file}:masked", "--data.data.path", "mine.npy"])
    assert run.data.data.path == Path("mine.npy")


EXTRA = {"train": TrainOptions, "inspect": InspectOptions}


def shown_commands():
    """The words of every train and inspect that a page shows, alone or behind launch."""
    for page in ("README.md", *(f"docs/{name}.md" for name in ("checkpoints", "islands", "survival"))):
        for line in re.findall(r"^ *(?:uv run )?(shardtrain .*)$", (ROOT / page).read_text(), re.MULTILINE):
            words = shlex.split(line.rstrip("\\"), comments=True)
            words = words[words.index("--") + 1 :] if "--" in words else words[1:]
            if words[:1] in (["train"], ["inspect"]) and len(words) > 1 and "--help" not in words:
                yield words


def test_the_commands_that_are_shown_are_understood(monkeypatch, run_file):
    monkeypatch.chdir(ROOT)
    stand_for = {"RUN": "examples/gpt_text.py", "imported/gpt2/run.py": str(run_file)}
    commands = list(shown_commands())
    assert len(commands) >= 18
    for command, where, *rest in commands:
        if "--cpu-devices" in rest:
            del rest[(at := rest.index("--cpu-devices")) : at + 2]
        parse_run(command, [stand_for.get(where, where), *rest], EXTRA[command])
