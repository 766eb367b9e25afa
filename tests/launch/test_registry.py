"""The contract of every launcher of the registry: its commands and files, run by stand-ins for the programs.

The command of each launcher is run as it stands, with programs of the same name on PATH that start the ranks
as the real ones do: they read the number of ranks from their own options, set the variables that the launcher
sets, and give each rank the command that stands behind. A new launcher needs nothing here if `mpiexec -n`
starts its ranks; otherwise it is one more entry in STAND_INS.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from shardtrain.islands import launcher_variables
from shardtrain.islands.rank_environment import find_rank_environment
from shardtrain.launch.job import Job
from shardtrain.launch.registry import DEFAULT, LAUNCHERS, WITH_HOSTS

ROOT = Path(__file__).parents[2]
SUBMITS = sorted(name for name, launcher in LAUNCHERS.items() if launcher.restarts is None)

# starts the words behind its own options as so many ranks, and ends with the largest of their codes
STAND_IN = """#!{python}
import json, os, subprocess, sys
words, size, own = sys.argv[1:], 0, dict(os.environ)
{read}
at = next(i for i, word in enumerate(words) if word == {python!r})
ranks = [subprocess.Popen(words[at:], env=own | {variables}) for rank in range(size)]
sys.exit(max(rank.wait() for rank in ranks))
"""
MPIEXEC = """
if words == ["--version"]:
    print("HYDRA"), sys.exit()
size = int(words[words.index("-n") + 1])
own |= {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "-genv"}
"""
SRUN = """
import re
script = open(os.environ["SCRIPT"]).read()
nodes, each = (int(re.search(name + r"=(\\d+)", script)[1]) for name in ("--nodes", "--ntasks-per-node"))
size = nodes * each
"""
HYDRA_RANK = (
    '{"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": str(rank),'
    ' "MPI_LOCALNRANKS": str(size)}'
)
SLURM_RANK = (
    '{"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_ID": "0",'
    ' "SLURM_LOCALID": str(rank % each), "SLURM_NODEID": str(rank // each),'
    ' "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})"}'
)
FLUX = """
if words[0] != "run":
    if "batch" in words:
        open("called", "w").write(open(words[-1]).read())
    print("77"), sys.exit()
given = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
nodes, each = int(given["--nodes"]), int(given["--tasks-per-node"])
size = nodes * each
"""
FLUX_RANK = (
    '{"FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": str(size), "FLUX_TASK_LOCAL_ID": str(rank % each),'
    ' "FLUX_JOB_NNODES": str(nodes), "PMI_RANK": str(rank), "PMI_SIZE": str(size), "PMI_FD": "9"}'
)
STAND_INS = {
    "local": {"mpiexec": (MPIEXEC, HYDRA_RANK)},
    "mpi": {"mpiexec": (MPIEXEC, HYDRA_RANK)},
    "slurm": {"srun": (SRUN, SLURM_RANK), "scontrol": None},
    "flux": {"flux": (FLUX, FLUX_RANK)},
}
"""Launcher -> program -> (how it finds the number of ranks, the variables of a rank); None: it only logs."""


def stand_ins(name):
    """The programs of a launcher: without an entry `mpiexec`, and the command that submits."""
    if name in STAND_INS:
        return STAND_INS[name]
    submit = LAUNCHERS[name].launch(job_of((1,)), LAUNCHERS[name].options(), {}).command[0]
    return {**({submit: None} if name in SUBMITS else {}), "mpiexec": (MPIEXEC, HYDRA_RANK)}


def options_of(name, folder):
    """The options of a launcher, with the stand-in as `mpiexec` where one can be named."""
    named = any(field.name == "mpiexec" for field in fields(LAUNCHERS[name].options))
    return LAUNCHERS[name].options(**({"mpiexec": str(folder / "mpiexec")} if named else {}))


JOB_VARIABLES = {"slurm": {"SLURM_JOB_ID": "77"}, "flux": {}}
"""Launcher -> what its scheduler sets for the batch script."""


# what a rank does: writes its arguments and environment, and ends as told
PROGRAM = """
import json, os, sys
from pathlib import Path
from shardtrain.islands.rank_environment import find_rank_environment
rank = find_rank_environment(os.environ).rank
Path(f"seen-{rank}.json").write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
code, at = json.loads(Path("ends.json").read_text())
sys.exit(code if rank == at else 0)
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A function that puts the stand-ins of a launcher on PATH."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(launcher_variables.SET_BY_LAUNCHERS)]:
        monkeypatch.delenv(name)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "program.py").write_text(PROGRAM)

    def install(launcher):
        for name, parts in stand_ins(launcher).items():
            text = f'#!/bin/sh\necho "$0 $@" >> {tmp_path}/called\n'
            if parts is not None:
                text = STAND_IN.replace("{python}", sys.executable).replace(
                    "{python!r}", repr(sys.executable)
                )
                text = text.replace("{read}", parts[0]).replace("{variables}", parts[1])
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        return folder

    return install


def job_of(processes, **changes):
    changes = {"logs": Path("logs"), "arguments": ("program.py", "a b", "it's", "--x=$HOME"), **changes}
    return Job(
        islands=len(processes), processes_per_island=processes if len(set(processes)) > 1 else processes[0],
        program=(sys.executable,), **changes,
    )  # fmt: skip


def run(name, job, folder, ends=(0, 0)):
    """Run what a launcher makes of a job; (exit code, what each rank saw)."""
    Path("ends.json").write_text(json.dumps(ends))
    launcher = LAUNCHERS[name]
    launch = launcher.launch(job, options_of(name, folder), os.environ)
    environ = launch.full_environment(os.environ)
    words = list(launch.command)
    for path, text in launch.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if name in SUBMITS:
        script = words[-1]
        environ |= {**JOB_VARIABLES.get(name, {}), "SCRIPT": script}
        words = ["bash", script]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300, check=False)
    seen = [json.loads(path.read_text()) for path in sorted(Path().glob("seen-*.json"))]
    assert seen, done.stdout + done.stderr
    return done.returncode, seen


def test_every_launcher_is_held_to_the_contract():
    assert set(STAND_INS) <= set(LAUNCHERS)
    assert {DEFAULT, WITH_HOSTS} <= set(LAUNCHERS)
    assert set(JOB_VARIABLES) <= set(SUBMITS)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_option_of_a_launcher_has_a_help_text_and_a_default(name):
    launcher = LAUNCHERS[name]
    assert is_dataclass(launcher.options)
    assert launcher.options() == launcher.options()
    documented = re.findall(r"^      (\w+): ", launcher.options.__doc__ or "", re.MULTILINE)
    assert documented == [field.name for field in fields(launcher.options)]
    assert launcher.summary == launcher.summary.strip()
    assert launcher.summary


# islands of equal numbers: the test of codes
@pytest.mark.parametrize("name", LAUNCHERS)
def test_ranks_find_themselves_and_get_their_words_unchanged(name, programs):
    processes = (1, 3)
    job = job_of(processes)
    code, seen = run(name, job, programs(name))
    assert code == 0
    assert len(seen) == job.num_ranks == sum(processes)
    for rank, (words, environ) in enumerate(seen):
        assert words == list(job.arguments[1:])
        found = find_rank_environment(environ)
        assert (found.rank, found.size) == (rank, job.num_ranks)
        assert environ["SHARDTRAIN_ISLAND_PROCESSES"] == job.processes_text
    [logs] = {path.parent for path in Path("logs").rglob("rank-*.log")}
    assert sorted(path.name for path in logs.glob("rank-*.json")) == sorted(
        f"rank-{rank}.json" for rank in range(job.num_ranks)
    )


@pytest.mark.parametrize(("code", "again"), [(3, False), (75, True)])
@pytest.mark.parametrize("name", SUBMITS)
def test_a_batch_job_ends_with_the_code_of_a_rank_and_is_requeued_where_that_helps(
    name, code, again, programs
):
    found, _ = run(name, job_of((1, 1)), programs(name), ends=(code, 1))
    assert (found, Path("called").exists()) == (code, again)


@pytest.mark.parametrize("name", SUBMITS)
def test_no_requeue_is_an_option_of_every_batch_system(name, programs):
    programs(name)
    launcher = LAUNCHERS[name]
    texts = [
        next(iter(launcher.launch(job_of((1,)), launcher.options(requeue=requeue), {}).files.values()))
        for requeue in (True, False)
    ]
    assert ["-eq 75" in text for text in texts] == [True, False]


@pytest.mark.parametrize("name", SUBMITS)
def test_the_time_limit_and_the_number_of_islands_are_in_the_script_of_a_batch_job(name):
    def directives(islands, **changes):
        launcher = LAUNCHERS[name]
        launch = launcher.launch(job_of((1,) * islands, **changes), launcher.options(), {})
        return [line for line in next(iter(launch.files.values())).splitlines() if line.startswith("#")]

    plain = directives(2)
    assert directives(2, time_seconds=86_399) != plain
    # the first comment describes the job; what the scheduler reads must differ too
    assert directives(5)[2:] != plain[2:]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launch_neither_writes_nor_starts_anything(name, programs, tmp_path):
    folder = programs(name)
    before = sorted(tmp_path.rglob("*"))
    launcher = LAUNCHERS[name]
    options = options_of(name, folder)
    first, second = (launcher.launch(job_of((1, 2)), options, {}) for _ in range(2))
    assert first == second
    assert sorted(tmp_path.rglob("*")) == before


VARIABLE = re.compile(r"(SLURMD?|PMIX?|OMPI_COMM_WORLD|MV2_COMM_WORLD|FLUX_(TASK|JOB)|PALS|HYDI|PBS)_[A-Z_]+")


def test_variables_of_launchers_stand_in_one_list():
    """No other module reads one by its name: quotes around nothing but a variable, outside of docstrings.

    But for the allow list of those that are written to files, from which nothing is decided.
    """
    quoted = re.compile(rf"[\"']{VARIABLE.pattern}[\"']")
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "shardtrain").rglob("*.py")
        for line in path.read_text().splitlines()
        if quoted.search(line) and ">>>" not in line
    }
    assert found == {"shardtrain/islands/launcher_variables.py", "shardtrain/system/shown_variables.py"}
