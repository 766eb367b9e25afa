"""Files of clusters: what they say, and what is refused, by file and key."""

import re
from pathlib import Path

import pytest

from shardtrain.cli.launch import main
from shardtrain.cli.run_options import parse_run
from shardtrain.islands.cluster import read_cluster
from shardtrain.launch.hosts import hosts_of_cluster, parse_hosts

ROOT = Path(__file__).parents[2]
FILE = ROOT / "meshes/two_kinds_of_islands.toml"


def test_a_run_takes_the_sections_of_a_cluster_and_its_own_win(tmp_path):
    own = tmp_path / "strategy.toml"
    own.write_text('[islands."0-1"]\naccumulate = 8\n[islands."3"]\ncompute_dtype = "float32"\n')
    words = [str(ROOT / "examples/own_model.py"), "--cluster", str(FILE), "--strategy", str(own)]
    run, _ = parse_run("inspect", words)
    of = [run.strategy.select_island(island, "cpu") for island in range(4)]
    assert [each.compute_dtype for each in of] == ["float16", "float16", "bfloat16", "float32"]
    assert [each.accumulate for each in of] == [8, 8, 1, 1]


def test_launch_starts_the_processes_of_a_cluster_and_passes_its_strategy_on(capsys):
    assert main(["slurm", "--cluster", str(FILE), "--dry-run", "--", "train", "run.py"]) == 0
    text = capsys.readouterr().out
    assert "export SHARDTRAIN_ISLAND_PROCESSES=4,4,8,8\n" in text
    assert f" train run.py --cluster {FILE}\n" in text
    assert main(["slurm", "--cluster", str(FILE), "--dry-run", "--", "doctor"]) == 0
    assert capsys.readouterr().out.count("--cluster") == 0
    with pytest.raises(ValueError, match="--islands and --cluster are given; the cluster file sets both"):
        main(["slurm", "--cluster", str(FILE), "--islands", "4", "--dry-run", "--", "train", "run.py"])


def test_hosts_get_the_ranks_of_their_islands():
    cluster = read_cluster(FILE)
    slots = [(host.name, host.slots) for host in hosts_of_cluster(parse_hosts("a,b,c,d"), cluster)]
    assert slots == [("a", 4), ("b", 4), ("c", 8), ("d", 8)]
    with pytest.raises(
        ValueError, match="2 hosts are named, and the islands of the cluster file have 4 nodes"
    ):
        hosts_of_cluster(parse_hosts("a,b"), cluster)


def test_options_for_a_launcher_that_takes_none_are_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[[islands]]\nkind = 'a'\nlaunch.flux = { queue = 'x' }\n")
    text = (
        "kind a: launch.flux does not name a launcher that takes options from a cluster file: 'flux' (known:"
        " slurm)"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        main(["slurm", "--cluster", str(path), "--dry-run", "--", "train", "run.py"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[mesh]\nfsdp = 8\n", "is no cluster file: it has no [[islands]]; a layout is given to --mesh"),
        ("[islands]\n", "write a table for each kind of islands: [[islands]]"),
        ("islands = []\n", "there are no islands; give at least one kind"),
        (
            "[[islands]]\ncuont = 1\nkind = 'a'\n",
            "[[islands]] 0 (kind 'a'): this kind of islands cannot be read:",
        ),
        ("[[islands]]\ncuont = 1\nkind = 'a'\n", "unknown key 'cuont' (did you mean 'count'?)"),
        ("[[islands]]\ncount = 1\n", "kind is missing; give these islands a name"),
        ("[[islands]]\nkind = 'a'\ncount = 0\n", "islands of kind 'a':\n  - count is 0; use 1 to 2147483648"),
        (
            "[[islands]]\nkind = 'a'\nprocesses = 4\nnodes = 3\n",
            "processes is 4, on nodes = 3: 4 % 3 = 1; use nodes = 1 or 2 or 4",
        ),
        (
            "[[islands]]\nkind = 'a'\nprocesses = 4\ndevices = 6\n",
            "devices is 6, of processes = 4: 6 % 4 = 2; each process has the same number",
        ),
        ("[[islands]]\nkind = 'a'\nstrategy.steps = 3\n", "strategy has 'steps' (known: layout, accumulate"),
        ("[[islands]]\nkind = 'a'\nlaunch.slurm.x = []\n", "launch.slurm.x is []; use a text, a number, or"),
        ("[[islands]]\nkind = 'a'\n[[islands]]\nkind = 'a'\n", "kind 'a' is there 2 times; give each"),
        (
            "[[islands]]\nkind = 'a'\ndevices = 1\n[[islands]]\nkind = 'b'\n",
            "kind b has no devices, and others have; give them for all or for none",
        ),
        (
            "[[islands]]\nkind = 'a'\ndevice = { teraflops = 0 }\n",
            "[[islands]] 0 (kind 'a'): this device cannot be planned for:\n  - teraflops is 0; use a number"
            " above 0, such as 300, or leave it out for that of the named device",
        ),
        (
            "[[islands]]\nkind = 'a'\ndevice = { name = 'b', memory_gb = -1 }\n",
            "memory_gb is -1; use a number above 0, such as 80, or leave it out",
        ),
        ("x = [", "is not a cluster in TOML"),
        ("[[islands]]\nkind = 'a'\ncount = " + "9" * 4000, "islands.0.count is an integer of about 4,0"),
        ("[[islands]]\nkind = 'a'\nprocesses = 1152921504606846976\nnodes = 7\n", "use 1 to 2147483648"),
        (
            "[[islands]]\nkind = 'a'\nlaunch.slurm.constraint = 'x --uid=0'\n",
            "launch.slurm.constraint is 'x --uid=0', which contains another option",
        ),
        (
            "[[islands]]\nkind = 'a'\nlaunch.slurm.constraint = \"x\\n#SBATCH --uid=0\"\n",
            "launch.slurm.constraint is 'x\\n#SBATCH --uid=0', which is more than one line",
        ),
    ],
)
def test_what_is_no_cluster_is_refused_with_file_and_key(text, problem, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_cluster(path)
    assert problem in str(error.value)
    assert str(path) in str(error.value)
