"""`shardtrain launch`: what it prints and refuses, one launch as a whole; `--cpu-devices` by island."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from shardtrain import cli
from shardtrain.cli import set_cpu_devices
from shardtrain.elastic.command_file import write_command
from shardtrain.elastic.epoch import Epoch, Peer
from shardtrain.elastic.messages import to_json
from shardtrain.elastic.run_files import RunFiles
from shardtrain.launch.registry import LAUNCHERS

ROOT = Path(__file__).parents[2]
GPT = str(ROOT / "examples/gpt_text.py")
BEHIND = ["--", "train", "run.py", "--cpu-devices", "4"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def printed(words, capsys):
    assert cli.main(["launch", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", [[], ["local"], ["mpi"]])
def test_a_dry_run_prints_one_command_and_runs_nothing(kind, capsys, tmp_path):
    text = printed([*kind, "--islands", "3", "--dry-run", *BEHIND], capsys)
    words = shlex.split(text.replace("\\\n", ""))
    assert words[words.index("-n") + 1] == "3"
    keeper = [sys.executable, "-m", "shardtrain.launch.rank"]
    at = words.index("shardtrain.launch.rank") - 2
    assert words[at : at + 3] == keeper
    assert re.fullmatch(r"logs/\d{8}-\d{6}", words[at + 3])
    program = [sys.executable, "-m", "shardtrain", "train", "run.py", "--cpu-devices", "4"]
    assert words[words.index("--") + 1 :] == program
    assert list(tmp_path.iterdir()) == []


def dry_runs(text):
    """The words of each command that a dry run of elastic islands prints."""
    return [shlex.split(each) for each in text.replace("\\\n", "").split(" &\n")]


def test_elastic_islands_are_processes_without_mpi(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    words = ["--elastic", "2..5", "--dry-run", *BEHIND[:-1], "2,1"]
    for number, command in zip(("2", "1"), dry_runs(printed(words, capsys)), strict=True):
        at = command.index(sys.executable)
        program = ["-m", "shardtrain", "train", "run.py", "--cpu-devices", number, "--elastic", "2..5"]
        assert command[at + 1 :] == program
        assert "SHARDTRAIN_ADDRESS=127.0.0.1" in command[:at]
        assert command[:3] == ["env", "-u", "PMI_RANK"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7"])
def test_islands_join_by_the_command_in_the_folder_of_the_run(address, capsys, tmp_path, monkeypatch):
    begun, run = tmp_path / "begun here", tmp_path / "runs/x"
    begun.mkdir()
    monkeypatch.chdir(begun)
    files = RunFiles(run / "elastic")
    words = ["run.py", "--run_dir=../runs/y", "--elastic", "2..5", "--run-dir", "../runs/x"]
    write_command(run / "elastic", words)
    member = Peer(name="a", address=f"tcp://{address}:5555")
    first = Epoch(number=1, step=0, members=(member,), slots=((0,),), why="founded")
    files.propose(1, json.dumps(to_json(first)).encode())
    monkeypatch.chdir(tmp_path)
    join = ["--join", "runs/x", "--islands", "2", "--dry-run"]
    for command in dry_runs(printed([*join, "--", "--log-every", "3"], capsys)):
        assert command[:3] == ["cd", str(begun), "&&"]
        assert command[command.index("train") :] == [
            *("train", "run.py", "--elastic", "2..5", "--log-every", "3", "--run-dir", str(run)),
        ]
        # whoever listens on loopback is reached from there alone
        assert ("SHARDTRAIN_ADDRESS=127.0.0.1" in command) == (address == "127.0.0.1")
    files.describe_member("a", {"processes": 2, "started": 1.0})
    for number, command in enumerate(dry_runs(printed([*join, "--mpiexec", "mpirun"], capsys))):
        logs = Path(command[command.index("--logs") + 1])
        assert logs.is_relative_to(tmp_path / "logs")
        assert command[command.index("launch") :] == [
            *("launch", "--islands", "1", "--processes-per-island", "2", "--logs", str(logs)),
            *("--mpiexec", "mpirun", "--", "train", "run.py", "--elastic", "2..5", "--run-dir", str(run)),
        ]
        assert logs.name == f"island-{number}"
    for command in dry_runs(printed([*join, "--processes-per-island", "1"], capsys)):
        assert "launch" not in command
    files.describe_member("b", {"processes": 1, "started": 2.0})
    text = printed(["slurm", *join], capsys)
    assert f"cd '{begun}'\nsrun --mpi=none " in text
    assert f"#SBATCH --output={tmp_path}/logs/%x-%A_%a.log\n" in text
    assert "SHARDTRAIN_ADDRESS" not in text
    for words, problem in (
        ([*join, "--islands", "6"], "--islands is 6, and at most 5 train together"),
        ([*join, "--", "train", "run.py"], "after -- come further options of train, and 'train' is none"),
    ):
        assert cli.main(["launch", *words]) == 2
        assert problem in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        assert cli.main(["launch", *join]) == 2
        assert (
            f"command.json is of user {os.getuid()}, and its command would run as user 12345"
            in capsys.readouterr().err
        )
    begun.rmdir()
    assert cli.main(["launch", *join]) == 0
    shown = capsys.readouterr()
    assert "launch: the folder in which the run was begun is not here: started in this one\n" in shown.err
    assert "cd " not in shown.out


def test_slurm_writes_the_script_and_submits_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "$@" > submitted\nexit 3\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cli.main(["launch", "slurm", "--islands", "2", "--logs", "mine", *BEHIND]) == 3
    assert (tmp_path / "submitted").read_text() == "mine/shardtrain.sbatch\n"
    assert "#SBATCH --nodes=2\n" in (tmp_path / "mine/shardtrain.sbatch").read_text()
    assert "wrote mine/shardtrain.sbatch; logs will be mine/shardtrain-<job>.log" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert cli.main(["launch", "slurm", *BEHIND]) == 2
    assert "there is no sbatch on PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            [],
            "the command to launch is missing; it goes after --, as in: shardtrain launch --islands 2 --",
        ),
        (
            ["--islands", "2", "train", "run.py"],
            "the command to launch goes after --, as in: shardtrain launch --islands 2 -- train run.py",
        ),
        (["--islands", "2", "--"], "there is nothing after --; write the command there"),
        (["--", "trian", "run.py"], "a command of shardtrain, not 'trian' (did you mean 'train'?)"),
        (["--", "launch"], "a command of shardtrain, not 'launch' (did you mean 'plan'?)"),
        (["slrum", "--", "train"], "there is no launch 'slrum' (did you mean 'slurm'?)"),
        (["--islands", "3", "--hosts", "a,b", "--", "train"], "3 % 2 = 1. Use 2 or 4 ranks, or give the"),
        (["--hosts", "a", "--hostfile", "b", "--", "train"], "--hosts and --hostfile are both given"),
        (["--hostfile", "nope", "--", "train"], "there is no hostfile nope"),
        (["local", "--hosts", "a", "--", "train"], "launch local is for this machine"),
        (["--processes-per-island", "1,x", "--", "train"], "'x' is no number from 1"),
        (["--time", "soon", "--", "train"], "time 'soon': write hours:minutes:seconds"),
        (["--mpiexec", "nope", "--", "train"], "there is no 'nope' that can be run"),
        (["--elastic", "2", "--", "train"], "islands is '2'; give the fewest and the most, such as 1..4"),
        (
            ["--elastic", "1..1", "--islands", "2", "--processes-per-island", "1,2", "--", "train", "run.py"],
            "  - --islands is 2, and at most 1 train together; use --islands 1, or --elastic 1..2\n"
            "  - --processes-per-island is 1,2, and elastic islands that are started together have as many",
        ),
        (
            ["--elastic", "2..5", "--hosts", "a,b", "--", "train", "run.py"],
            "hosts are a,b; start the islands on each host: shardtrain launch --join RUN_FOLDER",
        ),
        (
            ["flux", "--elastic", "2..5", "--", "train", "run.py"],
            "launch flux starts ranks of MPI; use launch slurm, or start the islands on each host",
        ),
        (
            ["slurm", "--elastic", "2..5", "--nodes", "2", "--", "train", "run.py"],
            "1 ranks cannot be shared evenly by 2 nodes: 1 % 2 = 1. Use 1 nodes",
        ),
        (["--elastic", "2..5", "--", "doctor"], "--elastic is for `train`, and after -- is doctor; leave it"),
        (["--elastic", "2..5", "--", "train", "--elastic=1..2"], "--elastic 1..2 is given after -- too"),
        (["--elastic", "2..5", "--cluster", "a", "--", "train"], "--elastic and --cluster are both given"),
        (
            ["--", "train", "--elastic", "1..2"],
            "--elastic goes before --: launch --elastic 1..2 ... -- train",
        ),
        (["--join", ".", "--elastic", "2..5"], "--elastic and --join are given; the run has its own"),
        (["--join", "."], ". is no run that can be joined: it has no elastic/command.json, which `train"),
    ],
)
def test_mistakes_are_told(words, text, capsys, tmp_path):
    assert cli.main(["launch", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.startswith("shardtrain launch: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [[], *([kind] for kind in LAUNCHERS)])
def test_help_names_all_launchers_and_the_options_of_one(kind, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["launch", *kind, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in LAUNCHERS)
    named = LAUNCHERS[kind[0] if kind else "local"]
    for launcher in LAUNCHERS.values():
        for each in fields(launcher.options):
            shown = re.search(rf"(?m)^\W+--{each.name.replace('_', '-')}[ ,]", text) is not None
            assert shown == (each.name in {own.name for own in fields(named.options)}), each.name


def test_one_command_runs_on_two_islands(tmp_path):
    """`inspect` needs no device: what each of two ranks prints comes in one view and in a log of its own."""
    words = [sys.executable, "-m", "shardtrain", "launch", "--islands", "2", "--logs", "mine", "--"]
    words += ["inspect", GPT, "--mesh", "tensor=4"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert re.search(r"launch: 2 islands by .*mpiexec; a log for each rank in mine\n", done.stderr)
    logs = [(tmp_path / f"mine/rank-{rank}.log").read_text() for rank in (0, 1)]
    assert logs[0] == logs[1]
    assert "mesh: tensor=4 (4 devices)" in logs[0]
    lines = done.stdout.splitlines()
    first = [line for line in lines if not line.startswith("[island 1] ")]
    second = [line.removeprefix("[island 1] ") for line in lines if line.startswith("[island 1] ")]
    assert first == second == logs[0].splitlines()


def test_a_mistake_behind_the_dashes_is_the_code_of_the_launch(warm_shardtrain):
    words = [*warm_shardtrain, "launch", "--islands", "2", "--", "inspect", "nope.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 2
    assert re.search(r"=== island [01] failed first: rank [01] on .*, exit code 2, ", done.stderr)
    assert "shardtrain inspect: there is no run file nope.py" in done.stderr


@pytest.fixture
def flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--kept --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.delenv("PJRT_NPROC")

    def place(rank, size, processes):
        monkeypatch.setenv("PMI_RANK", str(rank))
        monkeypatch.setenv("PMI_SIZE", str(size))
        monkeypatch.setenv("SHARDTRAIN_ISLAND_PROCESSES", processes)

    return place


def count():
    return os.environ["XLA_FLAGS"].split("=")[-1]


def test_devices_behind_the_dashes_are_another_programs(flags):
    words = ["--islands", "2", *BEHIND]
    set_cpu_devices(words)
    assert words == ["--islands", "2", *BEHIND]
    assert count() == "8"
    words = ["--cpu-devices", "2", *BEHIND]
    set_cpu_devices(words)
    assert words == BEHIND
    assert os.environ["XLA_FLAGS"] == "--kept --xla_force_host_platform_device_count=2"
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert "PJRT_NPROC" not in os.environ


@pytest.mark.parametrize(
    ("number", "given", "found"), [("8", None, "64"), ("2", None, None), ("1", None, None), ("8", "9", "9")]
)
def test_more_than_two_devices_have_threads_to_wait_in(number, given, found, flags, monkeypatch):
    if given:
        monkeypatch.setenv("PJRT_NPROC", given)
    set_cpu_devices(["run.py", "--cpu-devices", number])
    assert os.environ.get("PJRT_NPROC") == found


THREADS = """
from pathlib import Path
from shardtrain.cli import set_cpu_devices
set_cpu_devices(["--cpu-devices", "3"])
import jax
assert jax.device_count() == 3
names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print(names.count("tf_XLAEigen"))
"""


def test_jax_starts_as_many_threads_as_were_set(flags, monkeypatch):
    """XLA's default is one thread a device, or one a core of the machine, if these are more."""
    monkeypatch.setenv("XLA_FLAGS", "")
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert done.stdout == "24\n", done.stderr


@pytest.mark.parametrize(("rank", "number"), [(0, "2"), (1, "1"), (3, "1")])
def test_each_island_has_its_own_number_of_devices(rank, number, flags):
    flags(rank, 4, "1,3")
    words = ["run.py", "--cpu-devices", "8", "--cpu-devices=2,1", "--steps", "3"]
    set_cpu_devices(words)
    assert words == ["run.py", "--steps", "3"]
    assert count() == number


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--cpu-devices", "2,1,1"],
            "2,1,1 is for 3 islands, and there are 2; give 2 numbers, or one for all",
        ),
        (["--cpu-devices", "2,x"], "(or one an island, --cpu-devices 2,1); got '2,x'"),
        (["--cpu-devices", "0"], "needs a number of devices from 1, as in --cpu-devices 8"),
        (["--cpu-devices", "--", "3"], "got ''"),
    ],
)
def test_devices_that_are_no_numbers_are_refused(words, text, flags):
    flags(0, 2, "1")
    with pytest.raises(ValueError) as error:
        set_cpu_devices(words)
    assert text in str(error.value)
