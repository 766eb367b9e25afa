"""Batch scripts against golden files, and what cannot be asked of Slurm.

Golden files are written anew by `python tests/launch/test_slurm.py`.
"""

import sys
from pathlib import Path

import pytest

from shardtrain.launch.hosts import parse_hosts
from shardtrain.launch.job import Job
from shardtrain.launch.slurm import Slurm, clock, launch, script

GOLDEN = Path(__file__).parent / "golden"
TRAIN = ("train", "examples/gpt_text.py", "--run-dir", "runs/my run")


def job(**changes):
    changes = {"islands": 4, "arguments": TRAIN, **changes}
    return Job(program=("python", "-m", "shardtrain"), **changes)


SCRIPTS = {
    "whole_nodes": (job(), Slurm()),
    "gpus": (
        job(time_seconds=3600),
        Slurm(partition="gpu", account="physics", gpus_per_island=4, cpus_per_island=32, job_name="gpt"),
    ),
    "processes": (
        job(islands=3, processes_per_island=2, time_seconds=86400 * 2, stop_seconds=300),
        Slurm(
            nodes=3, gpus_per_island=8, cpus_per_island=64, mpi="pmix", requeue=False,
            sbatch=("constraint=a100", "--reservation=x"),
            setup=("module load openmpi", "ulimit -l unlimited"),
        ),
    ),
    "unequal": (job(islands=2, processes_per_island=(1, 3)), Slurm(qos="long")),
}  # fmt: skip


def text_of(name):
    before, sys.executable = sys.executable, "python"
    try:
        return script(*SCRIPTS[name], {})
    finally:
        sys.executable = before


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_as_they_were(name):
    assert text_of(name) == (GOLDEN / f"{name}.sbatch").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_number_of_nodes_is_in_one_place(name):
    text = text_of(name)
    assert text.count("--nodes=") == 1
    assert "--ntasks=" not in text


def test_submitting_writes_the_script_into_the_log_folder():
    submitted = launch(job(logs=Path("a/logs")), Slurm(job_name="gpt"), {})
    assert submitted.command == ("sbatch", "a/logs/gpt.sbatch")
    assert list(submitted.files) == [Path("a/logs/gpt.sbatch")]
    assert "--output=a/logs/%x-%j.log" in submitted.files[Path("a/logs/gpt.sbatch")]


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({}, {"nodes": 3}, "4 ranks cannot be shared evenly by 3 nodes: 4 % 3 = 1. Use 4 or 2 or 1 nodes"),
        ({}, {"nodes": 0}, "nodes is 0; use 1 or more"),
        ({"hosts": parse_hosts("a,b")}, {}, "Slurm chooses them; use --sbatch nodelist=a,b"),
        (
            {"processes_per_island": 4}, {"gpus_per_island": 6},
            "6 GPUs of an island cannot be shared evenly by its 4 processes: 6 % 4 = 2. Use 4 or 8",
        ),
        ({}, {"cpus_per_island": 0}, "CPUs per island is 0; use 1 or more, or leave it out"),
        (
            {"islands": 2, "processes_per_island": (1, 3)}, {"gpus_per_island": 4},
            "islands have 1,3 processes; give islands the same number, or ask for what each process gets:"
            " --sbatch gpus-per-task=N",
        ),
        ({}, {"job_name": "my job"}, "job name 'my job' may have letters, digits"),
    ],
)  # fmt: skip
def test_what_slurm_cannot_do_is_refused_with_the_fix(changes, options, text):
    with pytest.raises(ValueError) as error:
        script(job(**changes), Slurm(**options), {})
    assert str(error.value).startswith("this batch job cannot be written:\n  - ")
    assert text in str(error.value)


def test_times_are_written_as_slurm_reads_them():
    assert [clock(n) for n in (59, 3600, 86400)] == ["00:00:59", "01:00:00", "1-00:00:00"]


@pytest.mark.parametrize(
    ("slurm", "changes", "text"),
    [
        (Slurm(partition="gpu\n#SBATCH --uid=0"), {}, "partition 'gpu\\n#SBATCH --uid=0' may have letters"),
        (Slurm(account="a b"), {}, "account 'a b' may have letters, digits and"),
        (Slurm(qos=""), {}, "qos '' may have letters"),
        (Slurm(mpi="pmi2; rm -r x"), {}, "mpi 'pmi2; rm -r x' may have letters"),
        (Slurm(sbatch=("constraint=a\nrm -r x",)), {}, "sbatch option 'constraint=a\\nrm -r x' is more than"),
        (Slurm(), {"logs": Path("my logs")}, "logs 'my logs': sbatch takes a path of letters"),
        (Slurm(), {"logs": Path("a\n#SBATCH b")}, "logs 'a\\n#SBATCH b': sbatch takes"),
    ],
)
def test_no_option_writes_another_line_of_the_script(slurm, changes, text):
    with pytest.raises(ValueError) as error:
        script(job(**changes), slurm, {})
    assert text in str(error.value)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ValueError) as error:
        script(job(), Slurm(partition="a b", account="c d"), {})
    assert "partition 'a b'" in str(error.value)
    assert "account 'c d'" in str(error.value)


@pytest.mark.parametrize(
    ("processes", "nodes", "straddling"),
    [
        (
            (4, 4, 8, 8),
            4,
            "island 1, 2, 3 would have parts of several nodes. Use --nodes 24 or 12 or 6 or 3 or 1,",
        ),
        ((4, 4, 8, 8), 2, "island 2 would"),
        ((4, 4, 8, 8), 6, None),
        ((4, 4, 8, 8), 3, None),
        ((1, 3), 2, "island 1 would have parts of several nodes. Use --nodes 4 or 1,"),
        ((1, 3), 4, None),
        ((2, 4), 3, None),
        ((4, 4, 4), 2, "island 1 would"),
        ((4, 4, 4), 6, None),
    ],
)
def test_an_island_lies_on_one_node_or_fills_several(processes, nodes, straddling):
    unequal = job(islands=len(processes), processes_per_island=processes)
    if straddling is None:
        assert f"--nodes={nodes}\n" in script(unequal, Slurm(nodes=nodes), {})
        return
    with pytest.raises(ValueError) as error:
        script(unequal, Slurm(nodes=nodes), {})
    assert straddling in str(error.value)


if __name__ == "__main__":
    for golden in SCRIPTS:
        (GOLDEN / f"{golden}.sbatch").write_text(text_of(golden))
