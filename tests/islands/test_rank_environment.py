"""Ranks by the variables that launchers set (from real starts), islands, shares of devices and cores."""

import os
import socket

import pytest

from shardtrain.islands import binding
from shardtrain.islands.binding import bind_cpus, device_environment
from shardtrain.islands.rank_environment import RankEnvironment, find_rank_environment
from shardtrain.islands.rank_placement import RankPlacement, find_placement, parse_processes

HERE = socket.gethostname()
HYDRA = {
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y", "HYDI_CONTROL_FD": "7", "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1", "PMI_FD": "11", "PMI_HOSTNAME": "n2", "PMI_RANK": "3", "PMI_SIZE": "4",
}  # fmt: skip
SLURM_STEP = {
    "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "64", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3", "SLURM_PROCID": "1", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1", "SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0x1,0x2",
}  # fmt: skip
SLURM_BATCH = {
    "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "67", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
HET_STEP = {
    "SLURMD_NODENAME": "old0", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_NTASKS": "6", "SLURM_PROCID": "0", "SLURM_GTIDS": "0", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)",
    "SLURM_STEP_NODELIST": "new[0-1],old[0-1]", "SLURM_HET_SIZE": "2", "SLURM_MPI_TYPE": "pmi2",
    "PMI_RANK": "0", "PMI_SIZE": "6", "SLURM_NTASKS_HET_GROUP_0": "2", "SLURM_NTASKS_HET_GROUP_1": "4",
}  # fmt: skip
"""The hosts are listed by name, so that the first number of ranks is not that of host 0."""

HET_STEP_LAST = HET_STEP | {
    "SLURMD_NODENAME": "new1", "SLURM_LOCALID": "1", "SLURM_NODEID": "3", "SLURM_PROCID": "5",
    "SLURM_GTIDS": "4,5", "PMI_RANK": "5",
}  # fmt: skip
PROXY_STEP = {
    "SLURMD_NODENAME": "n2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11", "PMIX_NAMESPACE": "prterun-vm-4751@1", "PMIX_RANK": "1",
}  # fmt: skip
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_ess_base_vpid": "1",
    "OMPI_MCA_orte_ess_num_procs": "2", "PMIX_NAMESPACE": "3160997889", "PMIX_RANK": "1",
}  # fmt: skip
INTEL = {"I_MPI_ROOT": "/opt/intel/oneapi/mpi/latest", "I_MPI_HYDRA_UUID": "1", **HYDRA}
PALS = {
    "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "1", "PMI_RANK": "5", "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4",
}  # fmt: skip
FLUX = {
    "FLUX_JOB_ID": "f23", "FLUX_JOB_NNODES": "2", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_TASK_RANK": "3", "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "11",
}  # fmt: skip
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "3", "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (HYDRA, ("hydra", 3, 4, 1, 2, HERE)),
        (INTEL, ("hydra", 3, 4, 1, 2, HERE)),
        (HYDRA | PROXY_STEP, ("hydra", 3, 4, 1, 2, "n2")),
        (OPEN_MPI_5, ("openmpi", 1, 2, 1, 2, HERE)),
        (OPEN_MPI_5 | PROXY_STEP, ("openmpi", 1, 2, 1, 2, "n2")),
        (OPEN_MPI_4, ("openmpi", 1, 2, 0, 1, HERE)),
        (SLURM_STEP, ("srun", 1, 3, 1, 2, "n1")),
        (SLURM_STEP | {"PMI_RANK": "1", "PMI_SIZE": "3", "PMI_FD": "11"}, ("srun", 1, 3, 1, 2, "n1")),
        (SLURM_STEP | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.66.0"}, ("srun", 1, 3, 1, 2, "n1")),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": ""}, ("srun", 1, 3, None, None, "n1")),
        (HET_STEP, ("srun", 0, 6, 0, 1, "old0")),
        (HET_STEP_LAST, ("srun", 5, 6, 1, 2, "new1")),
        ({k: v for k, v in HET_STEP.items() if k != "SLURM_GTIDS"}, ("srun", 0, 6, None, None, "old0")),
        (SLURM_BATCH, ("none", 0, 1, 0, 1, "n1")),
        (PALS, ("pals", 5, 8, 1, 4, HERE)),
        (FLUX, ("flux", 3, 4, None, None, HERE)),
        (FLUX | {"FLUX_JOB_NNODES": "1"}, ("flux", 3, 4, 1, 4, HERE)),
        (FLUX | {"FLUX_JOB_NNODES": "4", "FLUX_TASK_LOCAL_ID": "0"}, ("flux", 3, 4, 0, 1, HERE)),
        (FLUX | HYDRA | {"PMI_RANK": "2"}, ("hydra", 2, 4, 1, 2, HERE)),
        (FLUX | {"PMI_RANK": "0", "PMI_SIZE": "2"}, ("pmi", 0, 2, None, None, HERE)),
        (MVAPICH, ("mvapich", 2, 3, 0, 1, HERE)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, ("pmi", 2, 4, None, None, HERE)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"} | PROXY_STEP, ("pmi", 2, 4, None, None, "n2")),
        ({}, ("none", 0, 1, 0, 1, HERE)),
    ],
)
def test_the_rank_is_found_under_every_launcher(environ, expected):
    names = ("launcher", "rank", "size", "local_rank", "local_size", "host")
    assert find_rank_environment(environ) == RankEnvironment(**dict(zip(names, expected, strict=True)))


def test_the_rank_is_found_under_the_launcher_of_this_environment(mpiexec):
    program = (
        "import os\n"
        "from shardtrain.islands.rank_environment import find_rank_environment\n"
        "place = find_rank_environment(os.environ)\n"
        "print(place.launcher, place.rank, place.size, place.local_rank, place.local_size)\n"
    )
    printed = mpiexec(2, program)
    assert [text.split()[1:] for text in printed] == [["0", "2", "0", "2"], ["1", "2", "1", "2"]]
    assert {text.split()[0] for text in printed} <= {"hydra", "openmpi"}


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (HYDRA | {"PMI_RANK": "x"}, "the variable PMI_RANK is 'x'; a launcher sets a number there"),
        (HYDRA | {"PMI_SIZE": "1" + "0" * 30}, "the variable PMI_SIZE is '1000000000000000000000000000000'"),
        (HYDRA | {"PMI_RANK": "9" * 5000}, "the variable PMI_RANK is '99999"),
        (HYDRA | {"PMI_RANK": "4"}, "launcher hydra gave rank 4 of 4; a rank is 0 to 3"),
        (HYDRA | {"MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID is 2 and MPI_LOCALNRANKS is 2, of 4 ranks"),
        (HYDRA | {"MPI_LOCALNRANKS": "0"}, "MPI_LOCALRANKID is 1 and MPI_LOCALNRANKS is 0, of 4 ranks"),
        (
            HYDRA | {"MPI_LOCALNRANKS": "5"},
            "a launcher sets a rank on this host below the number",
        ),
        ({"PMIX_RANK": "1"}, "the launcher sets rank 1 (PMIX_RANK) and no number of ranks; start with"),
    ],
)
def test_a_rank_that_makes_no_sense_is_refused(environ, text):
    with pytest.raises(ValueError) as error:
        find_rank_environment(environ)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_LOCALID": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x99999999999)"},
        {"SLURM_NODEID": "7"},
        {"SLURM_NODEID": "9" * 5000},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x" + "9" * 5000 + ")"},
    ],
)
def test_a_local_rank_of_slurm_that_fits_no_node_is_left_to_mpi(wrong):
    found = find_rank_environment(SLURM_STEP | wrong)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (1, 3, None, None)


@pytest.mark.parametrize(
    ("size", "processes", "expected"),
    [
        (3, 1, [(0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 1)]),
        (4, 2, [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
        (4, (1, 3), [(0, 2, 0, 1), (1, 2, 0, 3), (1, 2, 1, 3), (1, 2, 2, 3)]),
    ],
)
def test_ranks_fill_the_islands_in_order(size, processes, expected):
    names = ("island", "num_islands", "process", "num_processes")
    grid = [RankPlacement(**dict(zip(names, values, strict=True))) for values in expected]
    assert [find_placement(rank, size, processes) for rank in range(size)] == grid


@pytest.mark.parametrize(
    ("size", "processes", "text"),
    [
        (1, 2, "1 ranks cannot fill islands of 2 processes: 1 % 2 = 1. Start 2 ranks, or give islands 1"),
        (5, 2, "5 % 2 = 1. Start 4 or 6 ranks, or give islands 5 or 1"),
        (2, (1, 3), "need 4 ranks, and there are 2. Start 4 ranks, or give the last 1: 1,1"),
        (1, (1, 3), "islands of 1,3 processes need 4 ranks, and there are 1. Start 4 ranks"),
        (2, 0, "islands of 0 processes: each needs 1 or more"),
        (2, (), "each needs 1 or more"),
    ],
)
def test_ranks_that_do_not_fill_the_islands_are_refused_with_the_fix(size, processes, text):
    with pytest.raises(ValueError) as error:
        find_placement(0, size, processes)
    assert text in str(error.value)


@pytest.mark.parametrize(("text", "wrong"), [("1,x", "'x'"), ("", "''"), ("2,0", "'0'"), ("1.5", "'1.5'")])
def test_processes_that_are_no_numbers_are_refused(text, wrong):
    with pytest.raises(ValueError, match=f"{wrong} is no number from 1; write one for all islands"):
        parse_processes(text)


def at(local_rank, local_size, launcher="hydra"):
    rank, size = local_rank or 0, 8
    return RankEnvironment(
        launcher=launcher, rank=rank, size=size, local_rank=local_rank, local_size=local_size, host="a"
    )


@pytest.mark.parametrize(
    ("place", "environ", "num_gpus", "expected"),
    [
        (at(1, 2), {}, 8, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}),
        (at(0, 4), {}, 6, {}),
        (at(3, 4), {}, 2, {"CUDA_VISIBLE_DEVICES": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.375"}),
        (at(1, 2), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, None, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        (at(1, 2), {}, 1, {"CUDA_VISIBLE_DEVICES": "0", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.375"}),
        (at(1, 2), {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"}, 1, {"CUDA_VISIBLE_DEVICES": "0"}),
        (at(1, 2), {}, 0, {}),
        (at(0, 1), {}, 8, {}),
        (at(None, None), {}, 8, {}),
        (at(1, 4), {"CUDA_VISIBLE_DEVICES": "3"}, 8, {}),
        (at(1, 2), {"CUDA_VISIBLE_DEVICES": ""}, 8, {}),
        (at(1, 2), {"JAX_PLATFORMS": "cpu"}, 8, {}),
        (at(1, 2), {"SHARDTRAIN_BIND": "no"}, 8, {}),
        (at(1, 2, "srun"), {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, 8, {}),
        (at(1, 2, "srun"), {"CUDA_VISIBLE_DEVICES": "0,1"}, 8, {"CUDA_VISIBLE_DEVICES": "1"}),
        # a process for each GPU, not bound; bound it sees one, by whatever number
        (at(1, 4, "srun"), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 4, {"CUDA_VISIBLE_DEVICES": "5"}),
        (at(3, 4, "srun"), {"CUDA_VISIBLE_DEVICES": "3"}, 4, {}),
        (at(1, 4, "srun"), {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}, 4, {}),
    ],
)
def test_ranks_on_a_host_share_its_gpus(place, environ, num_gpus, expected):
    assert device_environment(place, environ, num_gpus) == expected


@pytest.fixture
def cores(monkeypatch):
    """Eight cores, of which the process may use six; two hardware threads a core: i and i + 4."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 6})
    monkeypatch.setattr(binding, "_core_sort_key", lambda cpu: (0, cpu % 4, cpu))


@pytest.mark.parametrize(
    ("place", "environ", "usable", "expected"),
    [
        (at(0, 3), {}, {0, 1, 2, 4, 5, 6}, {0, 4}),
        (at(2, 3), {}, {0, 1, 2, 4, 5, 6}, {2, 6}),
        (at(1, 2), {}, {0, 1, 2, 4, 5, 6}, {5, 2, 6}),
        (at(0, 3), {}, set(range(8)), None),
        (at(0, 3, "srun"), {"SLURM_CPU_BIND_TYPE": "none"}, set(range(8)), {0, 4}),
        (at(0, 3, "srun"), {"SLURM_CPU_BIND_TYPE": "mask_cpu:"}, {0, 1, 2, 4, 5, 6}, None),
        (at(0, 3), {"SLURM_CPU_BIND_TYPE": "mask_cpu:"}, {0, 1, 2, 4, 5, 6}, {0, 4}),
        (at(0, 7), {}, {0, 1, 2, 4, 5, 6}, None),
        (at(0, 1), {}, {0, 1, 2, 4, 5, 6}, None),
        (at(None, None), {}, {0, 1, 2, 4, 5, 6}, None),
        (at(0, 3), {"SHARDTRAIN_BIND": "no"}, {0, 1, 2, 4, 5, 6}, None),
    ],
)
@pytest.mark.usefixtures("cores")
def test_ranks_that_are_not_bound_share_the_cores(place, environ, usable, expected):
    assert bind_cpus(place, environ, usable) == expected


def test_the_cores_of_this_machine_are_shared_without_rest():
    """Through the system's own files; the tests are bound by nobody, or then nothing is shared."""
    mine = os.sched_getaffinity(0)
    shares = [bind_cpus(at(i, len(mine)), {}, mine) for i in range(len(mine))]
    assert len(mine) == 1 or set.union(*(s for s in shares if s)) == mine
    assert binding.read_usable_cores() >= mine
