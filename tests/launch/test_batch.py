"""What every batch system of the registry does alike: scripts against golden files, submission, refusals.

A new batch system needs an entry in SCRIPTS. Golden files are written anew by
`python tests/launch/test_batch.py`.
"""

import sys
from pathlib import Path

import pytest

from shardtrain.launch.flux import Flux
from shardtrain.launch.job import Job
from shardtrain.launch.registry import LAUNCHERS
from shardtrain.launch.slurm import Slurm

GOLDEN = Path(__file__).parent / "golden"
TRAIN = ("train", "examples/gpt_text.py", "--run-dir", "runs/my run")
SYSTEMS = sorted(name for name, launcher in LAUNCHERS.items() if launcher.restarts is None)


def job(**changes):
    changes = {"islands": 4, "arguments": TRAIN, **changes}
    return Job(program=("python", "-m", "shardtrain"), **changes)


SCRIPTS = {
    "slurm": {
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
        "unequal_nodes": (
            job(processes_per_island=(4, 4, 8, 8), time_seconds=3600),
            Slurm(nodes=4, partition="gpu", sbatch=("exclude=bad",)),
        ),
        "elastic": (
            job(time_seconds=3600, interface="ib0", folder=Path("/begun here"), logs=Path("/scratch/logs")),
            Slurm(partition="gpu", gpus_per_island=4, cpus_per_island=32),
        ),
        "two_kinds": (
            job(islands=3, processes_per_island=(2, 2, 4)),
            Slurm(
                nodes_per_island="1,1,2", gpus_per_island="2,2,8", cpus_per_island="8,8,64",
                sbatch=("0-1:partition=old", "2:partition=new", "2:constraint=h100"),
            ),
        ),
    },
    "flux": {
        "whole_nodes": (job(), Flux()),
        "gpus": (
            job(processes_per_island=2, time_seconds=3600, stop_seconds=300),
            Flux(queue="pbatch", bank="physics", gpus_per_island=4, cpus_per_island=32, job_name="gpt"),
        ),
        "unequal": (
            job(islands=2, processes_per_island=(1, 3)),
            Flux(
                pmi="pmix", requeue=False, flux=("requires=host:a b", "--urgency=20"),
                setup=("module load openmpi",),
            ),
        ),
    },
}  # fmt: skip
"""Batch system -> name of the golden file -> (job, options)."""

NAMES = [(system, name) for system, scripts in SCRIPTS.items() for name in scripts]


def launch(system, job, **options):
    return LAUNCHERS[system].launch(job, LAUNCHERS[system].options(**options), {})


def script(system, job, **options):
    (text,) = launch(system, job, **options).files.values()
    return text


def golden(system, name):
    """The path of a golden file, and its text as it is now."""
    job, options = SCRIPTS[system][name]
    before, sys.executable = sys.executable, "python"
    try:
        launcher = LAUNCHERS[system]
        start_islands = launcher.elastic if name == "elastic" else None
        made = start_islands(job, options, {})[0] if start_islands else launcher.launch(job, options, {})
    finally:
        sys.executable = before
    ((path, text),) = made.files.items()
    return GOLDEN / f"{name}{path.suffix}", text


def test_every_batch_system_has_golden_files():
    assert sorted(SCRIPTS) == SYSTEMS


@pytest.mark.parametrize(("system", "name"), NAMES)
def test_scripts_are_as_they_were(system, name):
    path, text = golden(system, name)
    assert text == path.read_text()


@pytest.mark.parametrize("system", SYSTEMS)
def test_submitting_writes_the_script_into_the_log_folder(system):
    submitted = launch(system, job(logs=Path("a/logs")), job_name="gpt")
    ((path, text),) = submitted.files.items()
    assert (path.parent, path.stem) == (Path("a/logs"), "gpt")
    assert submitted.command[-1] == str(path)
    assert submitted.log == "a/logs/gpt-<job>.log"
    assert "--output=a/logs/" in text


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({}, {"nodes": 3}, "4 ranks cannot be shared evenly by 3 nodes: 4 % 3 = 1. Use 4 or 2 or 1 nodes"),
        ({}, {"nodes": 0}, "nodes is 0; use 1 or more"),
        (
            {"processes_per_island": 4}, {"gpus_per_island": 6},
            "6 GPUs of an island cannot be shared evenly by its 4 processes: 6 % 4 = 2. Use 4 or 8",
        ),
        ({}, {"cpus_per_island": 0}, "CPUs per island is 0; use 1 or more, or leave it out"),
        ({}, {"job_name": "my job"}, "job name 'my job' may have letters, digits"),
        ({"logs": Path("a\n# b")}, {}, "logs 'a\\n# b': "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("system", SYSTEMS)
def test_what_no_batch_system_can_do_is_refused_with_the_fix(system, changes, options, text):
    with pytest.raises(ValueError) as error:
        script(system, job(**changes), **options)
    assert str(error.value).startswith("this batch job cannot be written:\n  - ")
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("processes", "nodes", "straddling"),
    [
        (
            (4, 4, 8, 8),
            4,
            "island 1, 2, 3 would have parts of several nodes. Use --nodes 24 or 12 or 6 or 3 or 1,",
        ),
        ((4, 4, 8, 8), 6, None),
    ],
)
def test_an_island_lies_on_one_node_or_fills_several(processes, nodes, straddling):
    """Slurm would start them as a heterogeneous job: the golden file `unequal_nodes`."""
    unequal = job(islands=len(processes), processes_per_island=processes)
    if straddling is None:
        assert f"--nodes={nodes}\n" in script("flux", unequal, nodes=nodes)
        return
    with pytest.raises(ValueError) as error:
        script("flux", unequal, nodes=nodes)
    assert straddling in str(error.value)


if __name__ == "__main__":
    for made in NAMES:
        found, content = golden(*made)
        found.write_text(content)
