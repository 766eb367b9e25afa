"""The command line: options, errors by value, a run in a process of its own that is stopped and goes on."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardtrain import cli
from shardtrain.cli.run_file import load_run
from shardtrain.cli.run_options import parse_run, run_options
from shardtrain.cli.train import TrainOptions, compute_process_seconds
from shardtrain.optim.optimizer import Optimizer
from shardtrain.trainer.config import describe

ROOT = Path(__file__).parents[2]
GPT = str(ROOT / "examples/gpt_text.py")


SMALL = """
from shardtrain import Run, Text
from tiny_language_model import TinyConfig

def run():
    model, data = TinyConfig(), Text(seq=8)
    return Run(model=model, data=data, batch=8, evaluate_batches=1, sample=lambda apply: "a sample")
"""


@pytest.fixture
def small(tmp_path):
    """A run file whose run starts quickly."""
    (tmp_path / "small.py").write_text(SMALL)
    return str(tmp_path / "small.py")


def test_options_change_the_run():
    words = ["--mesh", "fsdp=2,tensor=2", "--zero", "2", "--accumulate", "4", "--steps", "7"]
    words += ["--optimizer.name", "lion", "--optimizer.learning-rate.peak", "0.5", "--model.num-layers", "6"]
    words += ["--data", "a.txt", "b", "--checkpoints.every-steps", "3", "--sequence-sharded", "True"]
    run, _ = parse_run("train", [GPT, *words])
    assert run.strategy.layout.mesh == {"fsdp": 2, "tensor": 2}
    assert (run.strategy.layout.zero, run.strategy.layout.sequence_sharded) == (2, True)
    assert (run.strategy.accumulate, run.steps, run.model.num_layers) == (4, 7, 6)
    assert isinstance(run.optimizer, Optimizer)
    assert (run.optimizer.name, run.optimizer.learning_rate.peak) == ("lion", 0.5)
    assert run.data.paths == (Path("a.txt"), Path("b"))
    assert run.checkpoints.every_steps == 3
    assert run.run_dir == Path("runs/gpt_text")
    assert run.sample is not None


def test_a_list_option_that_is_given_again_adds_up(small, capsys):
    words = ["--data", "a.txt", "b", "--freeze=tokens", "--data.paths", "c", "--steps", "7", "--data=d", "e"]
    run, _ = parse_run("train", [GPT, *words, "--freeze", "blocks/*", "--steps", "8"])
    assert run.data.paths == tuple(map(Path, ["a.txt", "b", "c", "d", "e"]))
    assert (run.freeze, run.steps) == (("tokens", "blocks/*"), 8)
    script = "--sbatch constraint=a --setup ls --sbatch=0:mem=2 --sbatch 1:mem=3 --setup=date --dry-run"
    assert cli.main(["launch", "slurm", "--islands", "2", *script.split(), "--", "train", small]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("--constraint=a", "ls\n", "--mem=2", "--mem=3", "date\n")), shown
    assert cli.main(["launch", "slurm", "--sbatch=a=1", "--sbatch=--b", "--", "train", small]) == 2
    assert "--sbatch is given twice, and '--b' begins with a hyphen" in capsys.readouterr().err


FULL_NAMES = """
--mesh fsdp=2 --strategy.layout.mesh fsdp=2
--combine-on=deltas --strategy.synchronisation.on=deltas
--combine int8+adasum --strategy.synchronisation.by int8+adasum
--reduce-dtype bfloat16 --strategy.across.reduce_dtype bfloat16
--learning-rate 0.5 --optimizer.learning_rate.peak 0.5
--data a.txt b --data.paths a.txt b
--start-from runs/a --start-from.checkpoint runs/a
--sequence-sharded --sequence-sharded True
--gradient-noise-scale --gradient-noise-scale True
"""


@pytest.mark.parametrize("line", FULL_NAMES.strip().splitlines())
def test_short_full_and_old_spellings_mean_the_same(line):
    second = line.index(" --") + 1
    (short, _), (full, _) = (parse_run("train", [GPT, *w.split()]) for w in (line[:second], line[second:]))
    run, _ = parse_run("train", [GPT])
    assert describe(short) == describe(full) != describe(run)


def test_defaults_are_those_of_the_run_and_of_a_mesh_file():
    run = load_run(GPT)
    shown = {option.path: option.default for option in run_options(run)}
    assert (shown["batch"], shown["strategy.layout.mesh"]) == (16, "data=-1")
    assert shown["optimizer.learning_rate.peak"] == 2e-3
    # an option that repeats the run's own value still changes what the mesh file says
    words = [GPT, "--mesh", str(ROOT / "meshes/one_host_8_zero1.toml")]
    assert parse_run("train", words)[0].strategy.layout.zero == 1
    assert parse_run("train", [*words, "--zero", "3"])[0].strategy.layout.zero == 3


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["trian"], 2, "unknown command 'trian' (did you mean 'train'?)"),
        (["train"], 2, "RUN is missing"),
        (["train", "nope.py"], 2, "there is no run file nope.py"),
        (["train", f"{GPT}:rnu"], 2, "has no 'rnu' (did you mean 'run'?)"),
        (["train", GPT, "--mesh", "dta=8"], 2, "axis 'dta' (did you mean 'data'?)"),
        (["train", GPT, "--mesh", "data=3"], 2, "mesh 'data=3' needs 3 devices, and there are 8"),
        (
            ["train", GPT, "--mesh", "expert=8"],
            2,
            "the mesh has expert=8, and the model has no experts to shard",
        ),
        (["train", GPT, "--mesh", "pipeline=8"], 2, "4 blocks cannot be cut into 8 parts"),
        (["train", GPT, "--batch", "30"], 2, "30 % 8 = 6. Use 24 or 32."),
        (["train", GPT, "--steps", "0"], 2, "steps is 0; use 1 or more"),
        (
            ["train", GPT, "--shares", "2,1"],
            2,
            "shares has 2 weights, and this run has one island: leave --shares",
        ),
        (["train", GPT, "--cpu-devices", "none"], 2, "--cpu-devices needs a number of devices from 1"),
        (["inspect", GPT, "--devices", "0"], 2, "--devices is 0; use 1 to 16777216"),
        (["train", "nosuch:run"], 2, "there is no module 'nosuch'"),
        (["train", f"{GPT}:sample"], 2, "is a function with arguments"),
        (["train", GPT, "--mesh", "missing.toml"], 2, "there is no layout file missing.toml to read"),
        (["train", GPT, "--run-dir", GPT], 2, "is a file; give a folder"),
        (["train", GPT, "--run-dir", "/proc/x"], 2, "run_dir /proc/x cannot be made: no folders can be made"),
        (
            ["train", GPT, "--run-dir", "/dev/null/x"],
            2,
            "/dev/null/x cannot be made: Not a directory",
        ),
        (["inspect", GPT, "--mesh", "tensor=3"], 2, "dim 'kv_heads' of size 8 cannot be split"),
    ],
)
def test_mistakes_are_told_without_a_traceback(words, code, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == code
    printed = capsys.readouterr()
    assert text in printed.err
    assert "Traceback" not in printed.err
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def test_an_unknown_option_is_refused_with_a_suggestion(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", GPT, "--stepz", "3"])
    assert stop.value.code == 2
    assert "--steps" in capsys.readouterr().err


def code_of(words):
    """The exit code, returned or raised: a --help deep inside the parser ends the process."""
    try:
        return cli.main(words)
    except SystemExit as stop:
        return stop.code


HELP = [["--help"], ["train", "--help"], *([command, GPT, "--help"] for command in cli.COMMANDS)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--time-limit", "1"], "the time limit of 60 s leaves nothing before the margin of 120 s"),
        (["--time-limit", "soon"], "time 'soon': write hours:minutes:seconds"),
        (["--time-margin", "-1"], "time margin is -1 s; use 0 or more"),
        (["--watch.silence-seconds", "1"], "silence_seconds is 1.0; use 0 to disable it, or 2 or more"),
    ],
)
def test_impossible_limits_are_refused(options, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", GPT, *options]) == cli.USER_ERROR
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_time_is_that_of_the_process():
    options = TrainOptions(time_limit="01:00:00", time_margin=100)
    until = options.compute_deadline()
    assert until is not None
    left = until - time.monotonic()
    assert left == pytest.approx(3600 - 100 - compute_process_seconds(), abs=5)
    assert 0 < compute_process_seconds() < 7200
    assert TrainOptions().compute_deadline() is None


@pytest.mark.parametrize("words", HELP)
def test_help_is_there(words, capsys):
    assert code_of(words) == 0
    assert "usage" in capsys.readouterr().out.lower()


def test_a_module_and_a_name_give_a_run(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        "from shardtrain import Run, Text\n"
        "def small():\n"
        "    return Run(model=lambda rngs: None, data=Text(), steps=5)\n"
        "def wrong():\n"
        "    return 5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_run("mine:small").steps == 5
    with pytest.raises(ValueError, match="gave int 5; it must return a shardtrain"):
        load_run("mine:wrong")


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path, small, warm_python):
    """In a process of its own, with another number of devices than this one."""
    command = [*warm_python, "-m", "shardtrain", "train", small, "--data", str(ROOT / "shardtrain")]
    command += ["--cpu-devices", "4", "--mesh", "data=2,tensor=2", "--run-dir", str(tmp_path / "run")]
    command += ["--log-every", "5", "--steps"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    seen = []
    words = [*command, "100000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as first:
        assert first.stdout is not None
        for line in first.stdout:
            seen.append(line)
            if line.startswith("step 5"):
                first.send_signal(signal.SIGINT)
    assert first.returncode == 128 + signal.SIGINT, "".join(seen)
    stopped = re.search(r"stopped by SIGINT after step (\d+), which is saved", "".join(seen))
    assert stopped, "".join(seen)
    steps = str(int(stopped[1]) + 5)
    words = [*command, steps]
    second = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert f"resumed from step {stopped[1]}" in second.stdout
    assert f"step {steps}/{steps}" in second.stdout
    assert "\na sample\n" in second.stdout
    assert "Traceback" not in second.stderr


@pytest.mark.full
def test_a_run_file_imports_what_lies_beside_it(tmp_path):
    """Through the console script, which does not put the working directory on the path by itself."""
    (tmp_path / "sizes.py").write_text("VOCAB = 64\n")
    (tmp_path / "mine.py").write_text(
        "from sizes import VOCAB\n"
        "from shardtrain import Run, Text\n"
        "from shardtrain.models.decoder import DecoderConfig\n"
        "def run():\n"
        "    model = DecoderConfig(vocab=VOCAB, seq=8, embed=8, num_layers=1, num_heads=1)\n"
        "    return Run(model=model, data=Text())\n"
    )
    script = Path(sys.executable).parent / "shardtrain"
    for where in ("mine.py", "mine:run"):
        words = [script, "inspect", where, "--mesh", "data=1"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "64 x 8" in done.stdout, done.stderr


@pytest.mark.full
def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path, small, warm_python):
    command = [*warm_python, "-m", "shardtrain", "train", small, "--data", str(ROOT / "shardtrain")]
    command += ["--run-dir", str(tmp_path / "run"), "--steps", "12", "--log-every", "1", "--cpu-devices", "1"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mesh: 1 device\n"
        process.stdout.close()
        assert process.wait(900) == 0
    assert (tmp_path / "run/checkpoints/step_00000012").is_dir()
