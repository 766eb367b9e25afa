"""MPI: libraries that do not fit, ranks that are alone, children that die."""

import os

import pytest

from shardtrain.doctor.mpi import evaluate
from shardtrain.doctor.start import launch_problem, run_child
from shardtrain.islands.rank_environment import RankEnvironment

CHILD = {
    "library": "MPICH Version:      5.0.2\nMPICH ABI: 18:2:6",
    "standard": "5.0",
    "threads": 3,
    "mpi4py_libraries": ["/env/libmpi.so.12"],
    "libraries": ["/env/libmpi.so.12"],
    "mpi4jax": "0.9.1",
    "warnings": [],
    "moved": True,
    "died": None,
}
MPIEXEC = {"path": "/env/mpiexec", "flavour": "hydra", "version": "5.0.2"}


def facts(child=None, **changes):
    child = {name: value for name, value in {**CHILD, **(child or {})}.items() if value != "missing"}
    start = {"launcher": "hydra", "told": [0, 2], "problem": None, "placement_problem": None, "pmi": "PMI"}
    return {**start, "strange": [], "tasks_of_job": 1, "child": child, "mpiexec": MPIEXEC, **changes}


def test_what_fits_is_well(told, by_what):
    rows = by_what(evaluate(told([facts(), facts()], "aa")))
    assert {what: row.status for what, row in rows.items()} == dict.fromkeys(
        ("launcher", "library", "mpi4jax", "mpiexec"), "ok"
    )
    assert rows["launcher"].finding == "started by hydra, PMI; MPI agrees on 2 ranks"
    assert rows["library"].finding == "MPICH Version: 5.0.2, MPI 5.0, /env/libmpi.so.12"


ALONE = "the launcher (openmpi) says rank 0 of 2, but MPI says rank 0 of 1"


@pytest.mark.parametrize(
    ("changes", "what", "verdict", "found", "do"),
    [
        ({"problem": ALONE}, "launcher", "wrong", ALONE, "use the mpiexec installed beside this Python"),
        (
            {"placement_problem": "3 ranks cannot"},
            "islands",
            "wrong",
            "3 ranks cannot",
            "start as many ranks",
        ),
        (
            {"launcher": "none", "strange": ["FLUX_TASK_RANK"]},
            "launcher",
            "warning",
            "does not know set FLUX_TASK_RANK",
            "PMI_RANK and PMI_SIZE",
        ),
        ({"launcher": "none", "tasks_of_job": 4}, "launcher", "note", "in a job of 4 tasks", "srun -n 4"),
        (
            {"mpiexec": {**MPIEXEC, "flavour": "openmpi"}},
            "mpiexec",
            "warning",
            "/env/mpiexec (openmpi",
            "each rank would be alone",
        ),
        ({"mpiexec": {"error": "no mpiexec"}}, "mpiexec", "warning", "no mpiexec", "install shardtrain[mpi]"),
        ({"cuda_aware": False}, "CUDA-aware", "note", "does not accept device memory", "would save a copy"),
        ({"cuda_aware": True}, "CUDA-aware", "ok", "accepts device memory", ""),
    ],
)
def test_what_is_wrong_with_the_start_is_told(told, by_what, changes, what, verdict, found, do):
    row = by_what(evaluate(told([facts(**changes)], "a")))[what]
    assert row.status == verdict
    assert found in row.finding
    assert do in row.fix


NOTHING = {"mpi4jax": "missing", "moved": "missing"}


@pytest.mark.parametrize(
    ("child", "what", "found"),
    [
        (
            dict.fromkeys(("library", "mpi4jax", "moved"), "missing") | {"died": "no libmpi.so"},
            "library",
            "no libmpi",
        ),
        (
            {"mpi4jax": "missing", "moved": "missing", "died": "undefined symbol"},
            "mpi4jax",
            "does not load: undefined",
        ),
        (
            {"moved": "missing", "died": "it was ended by SIGSEGV"},
            "mpi4jax",
            "itself: it was ended by SIGSEGV",
        ),
        ({"moved": False}, "mpi4jax", "an array sent to itself: it came back modified"),
        ({"libraries": ["/a/libmpi.so.12", "/b/libmpi.so.40"]}, "mpi4jax", "load different MPIs: /a/libmpi"),
        ({"threads": 1}, "threads", "funneled"),
    ],
)
def test_libraries_that_do_not_work_together_are_wrong(told, by_what, child, what, found):
    row = by_what(evaluate(told([facts(child)], "a")))[what]
    assert row.status == "wrong"
    assert found in row.finding


@pytest.mark.parametrize(
    ("size", "verdict", "do"),
    [(1, "note", "nothing for a single process"), (2, "wrong", "install shardtrain[mpi]")],
)
def test_without_mpi_one_process_lacks_nothing(told, by_what, size, verdict, do):
    absent = {name: value for name, value in facts().items() if name not in ("child", "mpiexec")}
    absent |= {"absent": ["mpi4py", "mpi4jax"], "told": [0, size]}
    rows = by_what(evaluate(told([absent] * size, "a" * size)))
    assert set(rows) == {"launcher", "library"}
    assert rows["library"].finding == "not installed: mpi4py, mpi4jax"
    assert rows["library"].status == verdict
    assert rows["library"].fix.startswith(do)


def test_hosts_with_different_mpis_are_named(told, by_what):
    row = by_what(evaluate(told([facts(), facts({"library": "Open MPI v5.0.3"})], "ab")))["library"]
    assert row.status == "wrong"
    assert "a: MPICH Version: 5.0.2" in row.finding
    assert "b: Open MPI v5.0.3" in row.finding


@pytest.mark.full
def test_a_child_that_crashes_or_hangs_has_told_what_it_knew():
    crash = "print('{\"a\": 1}', flush=True); import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert run_child(crash, os.environ, 300.0) == {"a": 1, "died": "it was ended by SIGSEGV"}
    hang = "print('{\"a\": 1}', flush=True); import time; time.sleep(100)"
    assert run_child(hang, os.environ, 5.0) == {"a": 1, "died": "it did not end within 5 s"}


def test_a_child_is_no_rank_of_the_run():
    program = "import json, os; print(json.dumps({'told': sorted(n for n in os.environ if 'PMI' in n)}))"
    assert run_child(program, {**os.environ, "PMI_RANK": "1", "OMPI_X": "1"}, 30.0)["told"] == []


def test_a_launcher_of_another_mpi_is_found_before_mpi_starts():
    def problem(launcher):
        environment = RankEnvironment(launcher=launcher, rank=1, size=2, local_rank=1, local_size=2, host="a")
        return launch_problem(environment, os.environ)

    assert problem("srun") is None
    problems = [problem("openmpi"), problem("hydra")]
    # whichever MPI this Python's mpi4py is of, it is one of the two
    assert problems.count(None) == 1
    assert "would not start, or each of 2 ranks would be alone" in "".join(filter(None, problems))
