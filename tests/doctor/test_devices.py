"""Devices: GPUs that jax does not use, that are not given, that ranks share; nvidia-smi's words."""

import pytest

from shardtrain.doctor.devices import collect_gpus, evaluate, find_uuids, find_visible

GPUS = [
    {"index": str(i), "uuid": f"GPU-{i}", "name": "H100", "memory_bytes": 80 * 2**30, "used_bytes": 0}
    for i in range(4)
]


def rank(seen, visible=None, **changes):
    device = {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "memory_bytes": 60 * 2**30}
    cpu = {"platform": "cpu", "kind": "cpu", "memory_bytes": None}
    facts = {
        "nodes": 4,
        "closed": 0,
        "gpus": GPUS,
        "visible": visible,
        "slurm": None,
        "driver": "580.65",
        "plugin": "jax-cuda13-plugin 0.10.2",
        "cpu_wanted": False,
        "seen": {"devices": [device] * seen or [cpu], "died": None},
        **changes,
    }
    return {**facts, "uuids": find_uuids(facts["gpus"], visible)}


def test_each_rank_with_a_gpu_of_its_own_is_well(told, by_what):
    rows = by_what(evaluate(told([rank(1, ["0"]), rank(1, ["1"])], "aa")))
    assert rows.keys() == {"seen by jax"}
    assert rows["seen by jax"].status == "ok"
    assert rows["seen by jax"].finding == "1 x NVIDIA H100 80GB HBM3 (60.0 GiB usable)"


@pytest.mark.parametrize(
    ("changes", "verdict", "do"),
    [
        ({"plugin": None}, "wrong", 'uv pip install "jax[cuda13]"'),
        ({"plugin": None, "driver": "550.54"}, "wrong", 'uv pip install "jax[cuda12]"'),
        ({}, "wrong", "jax-cuda13-plugin 0.10.2 is installed and does not work"),
        ({"cpu_wanted": True}, "note", "unset it to use the GPUs"),
    ],
)
def test_gpus_that_jax_does_not_use_are_told_with_the_fix(told, by_what, changes, verdict, do):
    row = by_what(evaluate(told([rank(0, **changes)], "a")))["GPUs not used"]
    assert row.status == verdict
    assert do in row.fix
    assert row.finding.startswith("4 GPUs exist")


def test_a_rank_that_was_given_no_gpu_may_use_the_cpu(told, by_what):
    assert by_what(evaluate(told([rank(0, [])], "a"))).keys() == {"seen by jax"}


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (rank(1, ["0", "1"]), "CUDA_VISIBLE_DEVICES names 2 GPUs, jax sees 1"),
        (rank(3), "nvidia-smi names 4 GPUs, jax sees 3"),
        (rank(3, slurm=2), "Slurm names 2 GPUs, jax sees 3"),
    ],
)
def test_the_devices_of_jax_are_the_visible_gpus(told, by_what, facts, found):
    row = by_what(evaluate(told([facts], "a")))["visible GPUs"]
    assert (row.status, row.finding) == ("wrong", found)


def test_ranks_that_share_a_gpu_are_wrong_where_others_idle_and_warned_where_there_are_too_few(told, by_what):
    row = by_what(evaluate(told([rank(1, ["0"]), rank(1, ["0"])], "aa")))["shared GPUs"]
    assert (row.status, row.finding) == ("wrong", "a: 1 of 1 GPUs have several ranks, such as rank 0, rank 1")
    few = [rank(1, ["0"], gpus=GPUS[:1]) for _ in range(2)]
    row = by_what(evaluate(told(few, "aa")))["shared GPUs"]
    assert (row.status, row.fix[-40:]) == ("warning", "its time: start 1 ranks there, one a GPU"[-40:])


def test_memory_that_another_has_taken_is_a_warning(told, by_what):
    taken = [{**GPUS[0], "used_bytes": 40 * 2**30}, *GPUS[1:]]
    row = by_what(evaluate(told([rank(1, ["0"], gpus=taken)], "a")))["memory taken"]
    assert (row.status, row.finding) == ("warning", "GPU 0: 40.0 GiB of 80.0 GiB")
    assert "memory taken" not in by_what(evaluate(told([rank(1, ["1"], gpus=taken)], "a")))


def test_jax_that_does_not_start_is_wrong(told, by_what):
    broken = {**rank(0), "seen": {"died": "it was ended by SIGABRT"}}
    row = by_what(evaluate(told([broken, rank(1, ["0"])], "ab")))["seen by jax"]
    assert (row.status, row.finding) == (
        "wrong",
        "rank 0: jax does not start: it was ended by SIGABRT;"
        " rank 1: 1 x NVIDIA H100 80GB HBM3 (60.0 GiB usable)",
    )


def test_islands_on_different_devices_are_a_note(told, by_what):
    row = by_what(evaluate(told([rank(1, ["0"]), rank(0, [])], "ab")))["seen by jax"]
    assert row.status == "note"
    assert "rank 1: 1 x cpu" in row.finding


def test_gpus_without_the_right_to_open_them_are_told(told, by_what):
    row = by_what(evaluate(told([rank(0, nodes=0, closed=4)], "a")))["rights"]
    assert (row.status, row.finding) == ("warning", "4 GPUs cannot be opened")


def test_cuda_ignores_what_stands_behind_a_word_that_is_not_valid():
    assert find_visible({"CUDA_VISIBLE_DEVICES": "1, -1,0"}) == ["1"]
    assert find_uuids(GPUS, ["2", "GPU-0"]) == ["GPU-2", "GPU-0"]


def test_what_this_process_was_given_is_looked_up():
    facts = collect_gpus({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "2", "JAX_PLATFORMS": "cpu"})
    assert (facts["visible"], facts["slurm"], facts["cpu_wanted"]) == ([], 2, True)
