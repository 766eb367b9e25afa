"""Every option that a page or a message names is one that a command has, and what is printed can be run."""

import ast
import contextlib
import importlib
import io
import re
import shlex
from dataclasses import fields
from pathlib import Path
from pkgutil import iter_modules

import pytest

from shardtrain import cli, models
from shardtrain.cli.advise import QUESTIONS
from shardtrain.cli.field_options import field_helps
from shardtrain.cli.help_pages import SECTIONS
from shardtrain.cli.inspect import InspectOptions
from shardtrain.cli.run_options import parse_run
from shardtrain.cli.train import TrainOptions
from shardtrain.launch.registry import LAUNCHERS
from shardtrain.trainer.strategy import Strategy, strategy_text

ROOT = Path(__file__).parents[1]
OPTION = re.compile(r"(?<![\w\-/])--[a-z][\w.\-]*")
OTHERS = {
    "uv and pip": "--extra --group --no-build-isolation --no-cache-dir --no-group --no-sync --refresh-package"
    " --reinstall-package --wheel --with",
    "mpiexec": "--bind-to --host --mca --oversubscribe --version",
    "Slurm": "--array --code --cpu-bind --cpus-per-task --exclusive --gpu-bind --gpus-per-task --gres"
    " --het-group --kill-on-bad-exit --mem --ntasks-per-node --open-mode --output --signal",
    "Flux": "--cores-per-slot --cores-per-task --exclusive --gpus-per-slot --gpus-per-task --nslots --ntasks"
    " --output --parent --setattr --signal --tasks-per-node",
    "XLA": "--xla-cpu-enable-fast-math --xla-dump-to --xla-force-host-platform-device-count",
    "MLflow": "--backend-store-uri",
    "containers": "--cpus --memory --shm-size",
    "the tests": "--events --full --kind --minutes --processes --seeds",
    "the fuzzer": "--cases --jobs --log --seed --shrink",
    "benchmarks": "--goodput-minutes --kills --measured",
    "other programs": "--add-source --cpunodebind --format --launcher --membind --query-gpu --usr1 --zone",
    "patterns of ours": "--help-all --model --model.NAME --model.no --watch",
    "examples whose help is not asked here": "--model.num-groups",
    "of earlier versions, refused with a successor": "--layers --meet-when --proposals --sweep",
    "rejected in a decision": "--distribution --placement",
}
"""Options of other programs that pages and messages name, and beginnings of ours."""

COMMANDS = (
    ["train", "{run}"],
    ["train", "examples/bert_text.py"],
    ["train", "examples/image_folder_vit.py"],
    ["train", "examples/gpt_text.py"],
    ["inspect", "examples/gpt_text.py"],
    ["plan", "examples/gpt_text.py"],
    *(["advise", name] for name in QUESTIONS),
    ["generate"],
    ["evaluate"],
    ["calibrate"],
    ["calibrate", "{run}"],
    ["launch"],
    *(["launch", name] for name in LAUNCHERS),
    ["leave"],
    ["doctor"],
    ["report"],
    ["replay"],
    *(["checkpoint", name] for name in ("ls", "show", "verify", "diff", "prune", "export", "import")),
    *(["data", name] for name in ("tokenize", "train-tokenizer", "ls", "show", "stats", "check")),
)
TOKENS_RUN = """
from pathlib import Path
from shardtrain import Chat, Corpus, ImageFiles, MaskedTokens, Mixture, Run, TokenPairs, Tokens
from shardtrain.launch.registry import LAUNCHERS
from shardtrain.models.decoder import DecoderConfig
TOKENS = Tokens(path=Path("tokens.npy"), vocab=256, seq=8)
MODEL = DecoderConfig(vocab=8, seq=8, embed=16, num_layers=1, num_heads=2, bias=False, dtype="bfloat16")
def run(): return Run(model=MODEL, data=TOKENS)
def corpus(): return Run(model=MODEL, data=Corpus())
def chat(): return Run(model=MODEL, data=Chat())
def pairs(): return Run(model=MODEL, data=TokenPairs(source=Path("a"), target=Path("b"), vocab=8))
def images(): return Run(model=MODEL, data=ImageFiles(classes=2))
def mixture():
    parts = {"web": Corpus(), "code": Corpus()}
    return Run(model=MODEL, data=Mixture(parts=parts, weights={"web": 3, "code": 1}))
def masked(): return Run(model=MODEL, data=MaskedTokens(data=TOKENS, mask_token=0))
"""


def options(text):
    """The options in a text, as they are written with hyphens."""
    return {found.rstrip(".-").replace("_", "-") for found in OPTION.findall(text)}


def texts():
    """(where it stands, text) of every page but benchmarks', and of every string of the package."""
    pages = [page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"]
    for page in [*pages, *(ROOT / "docs").rglob("*.md")]:
        # those name the options of the benchmarks' own programs
        if page.parent.name != "benchmarks":
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


@pytest.fixture(scope="module")
def helps(run_file):
    """Command -> the text of its --help, a paragraph on one line."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        patch.chdir(ROOT)
        for words in (
            *COMMANDS,
            *(
                ["train", f"{run_file}:{name}"]
                for name in ("masked", "corpus", "chat", "images", "pairs", "mixture")
            ),
        ):
            text = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
            of_run = len(words) > 1 and words[0] in ("train", "inspect", "plan", "calibrate")
            asked = [*(word.format(run=run_file) for word in words), "--help-all" if of_run else "--help"]
            with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
                assert cli.main(asked) == 0
            text.seek(0)
            found[" ".join(words)] = text.read()
    return found


def entries(text):
    """(option with its kind, help text, default) of each option in a --help."""
    lines = [line.strip("│").rstrip() for line in text.splitlines() if line.startswith(("│ ", "  "))]
    # an option starts its line; the lines of its text stand further right, beside it or below
    for entry in re.split(r"^ {1,2}(?=\S)", "\n".join(lines), flags=re.MULTILINE):
        if entry.startswith("--"):
            option, _, about = re.sub("\n", "  ", entry).partition("  ")
            about = " ".join(about.split())
            default = re.search(r"\((?:default|required|fixed)[^()]*\)$|\[[^\[\]]*\]$", about)
            yield " ".join(option.split()), about[: default and default.start()], default and default[0]


def test_every_option_has_a_help_text_in_plain_words(helps):
    found = [(command, *entry) for command, text in helps.items() for entry in entries(text)]
    assert len(found) > 400
    assert [(command, option) for command, option, text, _ in found if len(text) < 5] == []
    ours = re.compile(r"shardtrain\.\w|\b[A-Z]\w+\(|`[a-z_.]+\.[A-Za-z_]\w*`|\b[A-Z]+_[A-Z_]+\b")
    allowed = ("jax.lax.scan", "model.dropout")
    symbols = {
        (command, option, symbol)
        for command, option, text, _ in found
        for symbol in ours.findall(text)
        if symbol.strip("`") not in allowed
    }
    assert symbols == set()


def test_every_field_of_a_model_has_a_help_text():
    modules = [
        importlib.import_module(f"shardtrain.models.{info.name}") for info in iter_modules(models.__path__)
    ]
    configs = {
        kind
        for module in modules
        for name, kind in vars(module).items()
        if name.endswith("Config") and kind.__module__ == module.__name__
    }
    assert len(configs) >= 6
    lacking = {
        (kind.__name__, f.name) for kind in configs for f in fields(kind) if f.name not in field_helps(kind)
    }
    assert lacking == set()


def page(monkeypatch, capsys, *words):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        cli.main(["train", "examples/gpt_text.py", *words])
    return capsys.readouterr().out


def test_the_help_is_a_page_of_at_most_60_options(helps, monkeypatch, capsys):
    found = [option.split()[0] for option, *_ in entries(page(monkeypatch, capsys, "--help"))]
    common = "--mesh --cpu-devices --data --steps --batch --accumulate --learning-rate --seed --run-dir"
    assert set(common.split()) < set(found)
    assert 30 < len(found) <= 60
    assert len(list(entries(helps["train examples/gpt_text.py"]))) <= 110


def test_a_section_of_the_help_has_all_its_options(helps, monkeypatch, capsys):
    every = {option for option, *_ in entries(helps["train examples/gpt_text.py"])}
    pages = [
        list(entries(page(monkeypatch, capsys, "--help", name))) for name in SECTIONS if name != "command"
    ]
    assert {option for each in pages for option, *_ in each} == every
    assert sum(map(len, pages)) == len(every)
    assert cli.main(["train", str(ROOT / "examples/gpt_text.py"), "--help", "pipelin"]) == 2
    assert "did you mean 'pipeline'?" in capsys.readouterr().err


def test_a_field_without_an_option_is_refused_with_where_to_set_it(capsys):
    words = [
        "--bridge-memory",
        "host",
        "--optimizer.learning_rate.power=2",
        "--no-outer-nesterov",
        "--meet-when=moved:1",
    ]
    assert cli.main(["train", str(ROOT / "examples/gpt_text.py"), *words]) == 2
    assert capsys.readouterr().err.startswith(
        "shardtrain train: these options do not exist:\n"
        "  - --bridge-memory: set strategy.across.memory in the run file, or memory in [across] of a strategy"
        " file\n  - --optimizer.learning_rate.power: set optimizer.learning_rate.power in the run file\n"
        "  - --no-outer-nesterov: set strategy.synchronisation.outer.nesterov in the run file, or nesterov in"
        " [synchronisation.outer] of a strategy file\n"
        "  - --meet-when: its name is --sync-when now\n"
    )


def test_commands_and_options_are_those_committed(helps, assert_snapshot):
    lines = [
        f"{command}  {option}  {default}"
        for command, text in helps.items()
        if "_run.py" not in command and "{run}" not in command
        for option, _, default in entries(text)
    ]
    assert len(lines) > 200
    assert_snapshot("cli.txt", "\n".join(lines) + "\n")


def test_every_option_that_is_named_exists(helps):
    texts_of_help = "".join(helps.values())
    paths = {
        f"--{path.replace('_', '-')}" for path in re.findall(r"[\[ ]([a-z_.]+\.[a-z_]+)\]", texts_of_help)
    }
    known = options(texts_of_help) | paths | set(" ".join(OTHERS.values()).split())
    assert len(known) > 150
    unknown = {where: found for where, text in texts() if (found := options(text) - known)}
    assert unknown == {}


def test_every_section_of_the_readme_that_is_named_is_there():
    headings = re.findall(r"^##+ (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    named = {
        (where, section)
        for where, text in texts()
        for section in re.findall(r"README, ([A-Z][\w, ]+?)(?=[^\w ,]|,? (?:and|or) |$)", text)
    }
    assert len(named) >= 3
    assert [found for found in named if found[1].strip() not in headings] == []


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


def test_the_commands_that_are_shown_are_understood(monkeypatch, run_file, tmp_path):
    monkeypatch.chdir(ROOT)
    stand_for = {"RUN": "examples/gpt_text.py", "imported/gpt2/run.py": str(run_file)}
    stand_for["my_run.py"] = f"{run_file}:corpus"
    # what `plan --output` writes
    planned = tmp_path / "strategy.toml"
    planned.write_text(strategy_text(Strategy()))
    commands = list(shown_commands())
    assert len(commands) >= 18
    for command, where, *rest in commands:
        if "--cpu-devices" in rest:
            del rest[(at := rest.index("--cpu-devices")) : at + 2]
        rest = [str(planned) if word == planned.name else word for word in rest]
        parse_run(command, [stand_for.get(where, where), *rest], EXTRA[command])
