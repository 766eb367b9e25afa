"""What only Slurm has: the form of its directives, and its own refusals. The rest is in `test_batch.py`."""

from pathlib import Path

import pytest

from shardtrain.islands.cluster import read_cluster
from shardtrain.launch.hosts import parse_hosts
from shardtrain.launch.job import Job
from shardtrain.launch.slurm import Slurm, add_cluster, write_script

SCRIPTS = sorted((Path(__file__).parent / "golden").glob("*.sbatch"))
EQUAL = [path for path in SCRIPTS if "hetjob" not in path.read_text()]
CLUSTER = Path(__file__).parents[2] / "meshes/two_kinds_of_islands.toml"


def job(**changes):
    return Job(**{"islands": 4, "program": ("python",), "arguments": ("train", "run.py"), **changes})


@pytest.mark.parametrize("path", EQUAL, ids=lambda path: path.stem)
def test_the_number_of_nodes_is_in_one_place(path):
    text = path.read_text()
    assert text.count("--nodes=") == 1
    assert "--ntasks=" not in text


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({"hosts": parse_hosts("a,b")}, {}, "Slurm chooses them; use --sbatch nodelist=a,b"),
        (
            {"islands": 2, "processes_per_island": (1, 3)},
            {"gpus_per_island": 4},
            "4 GPUs of island 1 cannot be shared evenly by its 3 processes: 4 % 3 = 1. Use 3 or 6; or one"
            " number for each island, --gpus-per-island 4,8",
        ),
        (
            {},
            {"partition": "gpu\n#SBATCH --uid=0"},
            "partition 'gpu\\n#SBATCH --uid=0' may have letters, digits and",
        ),
        ({}, {"qos": ""}, "qos '' may have letters"),
        ({}, {"mpi": "pmi2; rm -r x"}, "mpi 'pmi2; rm -r x' may have letters"),
        (
            {},
            {"sbatch": ("constraint=a\nrm -r x",)},
            "sbatch option 'constraint=a\\nrm -r x' is more than one line",
        ),
        ({}, {"sbatch": ("constraint=a --uid=0",)}, "'constraint=a --uid=0' contains another option"),
        ({}, {"nodes_per_island": "1" + "0" * 30}, "nodes per island is 1000000"),
        (
            {"processes_per_island": (4, 4, 8, 8)},
            {"nodes": 2},
            "or islands that fill nodes; unequal nodes: launch --hosts a:4,b:8 in an allocation of your own;"
            " give the number of nodes of each island: --nodes-per-island 1,1,1,1",
        ),
        (
            {"processes_per_island": (4, 4, 8, 9)},
            {"nodes_per_island": "1,1,1,2"},
            "island 3 has 9 processes and 2 nodes: 9 % 2 = 1. Give it 1 or 3 or 9",
        ),
        ({}, {"nodes_per_island": "1,2"}, "nodes per island 1,2 is for 2 islands, and there are 4; give one"),
        ({}, {"nodes_per_island": "2", "nodes": 4}, "nodes is 4, and islands of 2,2,2,2 nodes have 8; leave"),
        ({}, {"gpus_per_island": "2,x,0,2"}, "GPUs per island is x, 0; use 1 or more"),
        (
            {},
            {"sbatch": ("3-4:partition=a",)},
            "'3-4:partition=a' is for islands 3-4, and there are 0-3; give",
        ),
        (
            {},
            {"sbatch": ("0:partition=a",), "nodes": 2},
            "2 nodes for 4 islands that differ: each needs nodes of its own; use --nodes 4, or",
        ),
        ({"logs": Path("my logs")}, {}, "logs 'my logs': sbatch takes a path of letters"),
    ],
)
def test_what_slurm_cannot_do_is_refused_with_the_fix(changes, options, text):
    with pytest.raises(ValueError) as error:
        write_script(job(**changes), Slurm(**options), {})
    assert text in str(error.value)


def test_a_cluster_file_is_what_its_options_are():
    cluster = read_cluster(CLUSTER)
    unequal = job(processes_per_island=(4, 4, 8, 8))
    own = ("0-1:partition=old", "0-1:constraint=v100", "2-3:partition=new", "2-3:constraint=h100")
    written = Slurm(nodes_per_island="1,1,1,1", gpus_per_island="4,4,8,8", sbatch=own)
    assert add_cluster(Slurm(), cluster) == written
    assert "#SBATCH --constraint=h100\n" in write_script(unequal, written, {}).split("#SBATCH hetjob")[1]
    with pytest.raises(ValueError, match="--nodes and --cluster are both given; the cluster file says it"):
        add_cluster(Slurm(nodes=4), cluster)
