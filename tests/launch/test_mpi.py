"""The command lines for each MPI, by value."""

import os
import sys
from pathlib import Path

import pytest

from shardtrain.launch import local, mpi
from shardtrain.launch.hosts import parse_hosts
from shardtrain.launch.job import INTERFACES, THRESHOLDS, Job

KEEPER = ("/py", "-m", "shardtrain.launch.rank", "logs/a", "--usr1", "INT", "--")
PROGRAM = ("/py", "-m", "shardtrain", "train", "run.py")
HYDRA_VARIABLES = (
    ("-genv", "SHARDTRAIN_ISLAND_PROCESSES", "1"),
    ("-genv", "GLIBC_TUNABLES", THRESHOLDS),
)
OPEN_MPI_VARIABLES = (
    ("-x", "SHARDTRAIN_ISLAND_PROCESSES=1"),
    ("-x", f"GLIBC_TUNABLES={THRESHOLDS}"),
)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/py")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def job(**changes):
    changes = {"islands": 2, **changes}
    return Job(arguments=PROGRAM[3:], program=PROGRAM[:3], logs=Path("logs/a"), **changes)


def of(flavour):
    return mpi.Mpiexec(path="mpiexec", vendor=flavour, version="5")


def lines(launch):
    """Without what every command ends in."""
    assert launch.lines[-2:] == (KEEPER, PROGRAM)
    return launch.lines[:-2]


def test_on_this_machine():
    start = ("mpiexec", "-n", "2")
    # nobody else can connect
    names = ("SHARDTRAIN_INTERFACE", *INTERFACES)
    loopback = [("-genv", name, "lo") for name in names]
    assert lines(local.launch_by(job(), of("hydra"), {})) == (start, *HYDRA_VARIABLES, *loopback)
    expected = (start, ("--oversubscribe",), ("--bind-to", "none"), *OPEN_MPI_VARIABLES)
    found = lines(local.launch_by(job(), of("openmpi"), {}))
    assert found == (*expected, *(("-x", f"{name}=lo") for name in names))


@pytest.mark.parametrize("flavour", ["hydra", "intel"])
def test_hosts_for_mpich_and_intel(flavour):
    launch = mpi.launch_by(job(hosts=parse_hosts("a,b"), processes_per_island=3), of(flavour), {})
    assert lines(launch)[:2] == (("mpiexec", "-n", "6"), ("-hosts", "a,b", "-ppn", "3"))
    assert (launch.files, launch.environment) == ({}, {})


@pytest.mark.parametrize(("flavour", "option"), [("hydra", "-f"), ("intel", "-machinefile")])
def test_unequal_hosts_for_mpich_and_intel_are_a_file(flavour, option):
    launch = mpi.launch_by(job(hosts=parse_hosts("a:1,b:3"), processes_per_island=(1, 3)), of(flavour), {})
    assert lines(launch)[:3] == (
        ("mpiexec", "-n", "4"),
        (option, "logs/a/hosts"),
        ("-genv", "SHARDTRAIN_ISLAND_PROCESSES", "1,3"),
    )
    assert launch.files == {Path("logs/a/hosts"): "a:1\nb:3\n"}


def test_hosts_for_open_mpi_which_is_told_what_to_carry():
    environ = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--a", "HOME": "/h", "GLIBC_TUNABLES": "mine=1"}
    launch = mpi.launch_by(job(hosts=parse_hosts("a:1,b:1")), of("openmpi"), environ)
    assert lines(launch) == (
        ("mpiexec", "-n", "2"),
        ("--host", "a:1,b:1"),
        ("--bind-to", "none"),
        OPEN_MPI_VARIABLES[0],
        ("-x", "GLIBC_TUNABLES=mine=1"),
        ("-x", "JAX_PLATFORMS", "-x", "XLA_FLAGS"),
    )


def test_root_may_run_open_mpi(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert local.launch_by(job(), of("openmpi"), {}).environment == allowed
    assert local.launch_by(job(), of("hydra"), {}).environment == {}


def test_local_is_for_this_machine():
    with pytest.raises(
        ValueError, match="launch local is for this machine, and hosts are a,b; use: launch mpi"
    ):
        local.launch_by(job(hosts=parse_hosts("a,b")), of("hydra"), {})


def test_a_local_launch_does_not_see_the_batch_job_around_it():
    around = {"SLURM_JOB_ID": "1", "PMIX_RANK": "0", "PBS_NODEFILE": "/n", "FLUX_TASK_RANK": "0"}
    own = {"PATH": "/bin", "OMPI_MCA_btl": "tcp", "JAX_PLATFORMS": "cpu"}
    launch = local.launch_by(job(), of("hydra"), around | own)
    assert set(launch.unset) == set(around)
    assert launch.full_environment(around | own) == own
    assert mpi.launch_by(job(), of("hydra"), around | own).unset == ()


@pytest.mark.parametrize(
    ("text", "flavour", "version"),
    [
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "hydra", "5.0.2"),
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://", "openmpi", "5.0.11"),
        ("mpirun (Open MPI) 4.1.4\n", "openmpi", "4.1.4"),
        ("mpiexec (OpenRTE) 4.0.3\n", "openmpi", "4.0.3"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619 (id: c2e19c2f3e)\n"
            "Copyright 2003-2023, Intel Corporation.\n",
            "intel",
            "2021.10",
        ),
    ],
)
def test_whose_mpiexec_it_is(text, flavour, version):
    assert mpi.read_version("m", text) == mpi.Mpiexec(path="m", vendor=flavour, version=version)


def test_an_mpiexec_of_no_known_mpi_is_refused():
    with pytest.raises(
        ValueError, match="m --version prints 'version 3': neither MPICH, Intel MPI nor Open MPI"
    ):
        mpi.read_version("m", "version 3\n")


def test_the_mpiexec_beside_python_goes_before_path(tmp_path, monkeypatch):
    for name, text in (("beside", "mpiexec (Open MPI) 5.0.1"), ("other", "HYDRA 4.2.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mpiexec").write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'other'}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside/python"))
    assert mpi.find_mpiexec().vendor == "openmpi"
    assert mpi.find_mpiexec(str(tmp_path / "other/mpiexec")).vendor == "hydra"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert mpi.find_mpiexec().vendor == "hydra"
    with pytest.raises(ValueError, match="there is no 'nope' that can be run; install"):
        mpi.find_mpiexec("nope")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"no mpiexec in .* or on PATH; install shardtrain\[mpi\]"):
        mpi.find_mpiexec()
