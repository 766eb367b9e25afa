"""Binding: ranks on the same cores, NUMA, quotas of both kinds of cgroup, /dev/shm, ulimits."""

import pytest

from shardtrain.doctor.binding import evaluate, read_numa_nodes
from shardtrain.system.cgroup import limits

GIB = 2**30


def rank(cores, host_cores=4, **changes):
    return {
        "cores": cores,
        "given": cores,
        "host_cores": host_cores,
        "nodes": {"0": list(range(host_cores))},
        "threads": {},
        "limits": {"cores": None, "memory_bytes": None},
        "memory_bytes": 64 * GIB,
        "available_bytes": 32 * GIB,
        "shm_bytes": 32 * GIB,
        "shm_free_bytes": 32 * GIB,
        "memlock": None,
        "nofile": 65536,
        "infiniband": False,
        **changes,
    }


def test_ranks_on_cores_of_their_own_are_well(told, by_what):
    facts = [rank([0, 1], given=[0, 1, 2, 3]), rank([2, 3], given=[0, 1, 2, 3])]
    rows = by_what(evaluate(told(facts, "aa")))
    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["cores"].finding == (
        "rank 0: 2 cores (0-1 of 4), its share of 0-3; rank 1: 2 cores (2-3 of 4), its share of 0-3"
    )


@pytest.mark.parametrize(
    ("cores", "hosts", "verdict", "do"),
    [
        (([0], [0]), "aa", "wrong", "assigns 2 to each; srun --cpus-per-task=2"),
        (([0, 1], [1, 2]), "aa", "wrong", "4 cores are there"),
        (([0, 1, 2, 3], [0, 1, 2, 3]), "aa", "warning", "a share of its own (2 cores)"),
        (([0], [0]), "ab", "ok", ""),
        (([0, 1, 2, 3],) * 5, "aaaaa", "warning", "start 4 ranks there or fewer"),
    ],
)
def test_ranks_of_a_host_on_the_same_cores(told, by_what, cores, hosts, verdict, do):
    row = by_what(evaluate(told([rank(one) for one in cores], hosts)))["cores"]
    assert row.status == verdict
    assert do in row.fix


def test_a_rank_over_several_numa_nodes_is_a_note(told, by_what):
    nodes = {"0": [0, 1], "1": [2, 3]}
    spread = by_what(evaluate(told([rank([0, 1, 2, 3], nodes=nodes)], "a")))["NUMA"]
    assert (spread.status, spread.finding) == ("note", "on node 0, 1: spread over nodes")
    assert "start 2 ranks a host" in spread.fix
    one = by_what(evaluate(told([rank([2, 3], nodes=nodes)], "a")))["NUMA"]
    assert (one.status, one.finding) == ("ok", "on node 1")


def test_more_threads_than_cores_are_a_warning(told, by_what):
    row = by_what(evaluate(told([rank([0, 1], threads={"OMP_NUM_THREADS": "16"})], "a")))["threads"]
    assert (row.status, row.finding) == ("warning", "OMP_NUM_THREADS=16 on 2 cores")
    assert row.fix.endswith("2")


def test_limits_of_the_cgroup_are_compared_with_what_is_seen(told, by_what):
    tight = rank([0, 1, 2, 3], limits={"cores": 1.5, "memory_bytes": 16 * GIB})
    rows = by_what(evaluate(told([tight], "a")))
    assert (rows["CPU quota"].status, rows["CPU quota"].finding) == (
        "warning",
        "1.5 cores of time, 4 are visible",
    )
    assert "taskset -c 0-0" in rows["CPU quota"].fix
    assert rows["memory"].status == "note"
    assert rows["memory"].finding == "32.0 GiB free of 64.0 GiB, limited to 16.0 GiB by the cgroup"


def test_a_small_shm_is_a_warning(told, by_what):
    small = rank([0], shm_bytes=64 * 2**20, shm_free_bytes=60 * 2**20)
    row = by_what(evaluate(told([small, {**small, "cores": [1], "given": [1]}], "aa")))["/dev/shm"]
    assert (row.status, row.finding) == ("warning", "60.0 MiB free of 64.0 MiB")
    assert "128.0 MiB" in row.fix


def test_ulimits(told, by_what):
    low = rank([0], memlock=65536, nofile=256)
    row = by_what(evaluate(told([low], "a")))["ulimits"]
    assert (row.status, row.finding) == ("warning", "memlock 64.0 KiB, open files 256")
    row = by_what(evaluate(told([{**low, "infiniband": True}], "a")))["ulimits"]
    assert row.status == "wrong"
    assert "ulimit -l unlimited" in row.fix


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_tightest_limit_of_the_groups_above_counts_version_2(tmp_path):
    write(
        tmp_path,
        {
            "proc": "0::/job/step\n",
            "sys/cpu.max": "max 100000\n",
            "sys/job/cpu.max": "150000 100000\n",
            "sys/job/step/cpu.max": "400000 100000\n",
            "sys/job/step/memory.max": "max\n",
            "sys/job/memory.max": "1073741824\n",
        },
    )
    assert limits(tmp_path / "proc", tmp_path / "sys") == {"cores": 1.5, "memory_bytes": GIB}


def test_version_1_has_a_tree_for_each_controller(tmp_path):
    write(
        tmp_path,
        {
            "proc": "2:cpu,cpuacct:/a\n4:memory:/host/only\n",
            "sys/cpu/a/cpu.cfs_quota_us": "200000\n",
            "sys/cpu/a/cpu.cfs_period_us": "100000\n",
            "sys/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert limits(tmp_path / "proc", tmp_path / "sys") == {"cores": 2.0, "memory_bytes": None}


def test_numa_nodes_without_cores_are_left_out(tmp_path):
    write(tmp_path, {"node0/cpulist": "0-1,4\n", "node1/cpulist": "\n", "possible": "0-1\n"})
    assert read_numa_nodes(tmp_path) == {"0": [0, 1, 4]}
