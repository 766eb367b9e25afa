"""What only Slurm has: the form of its directives, and its own refusals. The rest is in `test_batch.py`."""

from pathlib import Path

import pytest

from shardtrain.launch.hosts import parse_hosts
from shardtrain.launch.job import Job
from shardtrain.launch.slurm import Slurm, clock, launch, script

SCRIPTS = sorted((Path(__file__).parent / "golden").glob("*.sbatch"))


def job(**changes):
    return Job(**{"islands": 4, "program": ("python",), "arguments": ("train", "run.py"), **changes})


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_number_of_nodes_is_in_one_place(path):
    text = path.read_text()
    assert text.count("--nodes=") == 1
    assert "--ntasks=" not in text


def test_sbatch_submits_the_script():
    submitted = launch(job(logs=Path("a/logs")), Slurm(job_name="gpt"), {})
    assert submitted.command == ("sbatch", "a/logs/gpt.sbatch")
    assert "--output=a/logs/%x-%j.log" in submitted.files[Path("a/logs/gpt.sbatch")]


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({"hosts": parse_hosts("a,b")}, {}, "Slurm chooses them; use --sbatch nodelist=a,b"),
        (
            {"islands": 2, "processes_per_island": (1, 3)},
            {"gpus_per_island": 4},
            "or ask for what each process gets: --sbatch gpus-per-task=N",
        ),
        (
            {},
            {"partition": "gpu\n#SBATCH --uid=0"},
            "partition 'gpu\\n#SBATCH --uid=0' may have letters, digits and",
        ),
        ({}, {"account": "a b"}, "account 'a b' may have letters, digits and"),
        ({}, {"qos": ""}, "qos '' may have letters"),
        ({}, {"mpi": "pmi2; rm -r x"}, "mpi 'pmi2; rm -r x' may have letters"),
        (
            {},
            {"sbatch": ("constraint=a\nrm -r x",)},
            "sbatch option 'constraint=a\\nrm -r x' is more than one line",
        ),
        ({"logs": Path("my logs")}, {}, "logs 'my logs': sbatch takes a path of letters"),
    ],
)
def test_what_slurm_cannot_do_is_refused_with_the_fix(changes, options, text):
    with pytest.raises(ValueError) as error:
        script(job(**changes), Slurm(**options), {})
    assert text in str(error.value)


def test_times_are_written_as_slurm_reads_them():
    assert [clock(n) for n in (59, 3600, 86400)] == ["00:00:59", "01:00:00", "1-00:00:00"]
