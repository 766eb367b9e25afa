"""Where a run listens, and what jax is told of its devices."""

import os
import socket
import types
from typing import Any

import jax
import pytest
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from shardtrain.islands import jax_runtime, membership
from shardtrain.islands.binding import (
    VISIBLE,
    bind_devices,
    device_environment,
    runtime_device_ids,
    visible_list,
)
from shardtrain.islands.mpi_library import check_started
from shardtrain.islands.network import find_address, find_listening_address
from shardtrain.islands.rank_environment import RankEnvironment
from shardtrain.islands.rank_placement import RankPlacement


def test_on_one_host_loopback_on_several_the_interface_of_the_job():
    assert find_listening_address(["a", "a"], {"SHARDTRAIN_INTERFACE": "nope"}) == "127.0.0.1"
    assert find_listening_address(["a", "b"], {"SHARDTRAIN_INTERFACE": "lo"}) == "127.0.0.1"
    assert find_listening_address(["a", "b"], {}) is None
    with pytest.raises(ValueError, match=r"interface 'nope' has no IPv4 address here .*; use one of .*lo"):
        find_address("nope")


class Two:
    """The communicator of two processes on two hosts."""

    def Split(self, *_: int) -> "Two":
        return self

    def allgather(self, mine: str) -> list[str]:
        return [mine, "b"]

    def bcast(self, mine: str, root: int) -> str:
        return mine

    def Free(self) -> None: ...


@pytest.mark.parametrize("proxy", ["http_proxy", None])
def test_ranks_of_an_island_meet_without_a_proxy(proxy, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "localhost")
    if proxy:
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    met = []
    monkeypatch.setattr(jax_runtime, "start_runtime", lambda *_: met.append(os.environ["no_proxy"]))
    placement: Any = types.SimpleNamespace(island=0, process=0, num_processes=2)
    comm: Any = Two()
    jax_runtime.join_processes(placement, comm, "a")
    assert met == [f"localhost,a,b,{socket.gethostname()}" if proxy else "localhost"]


@pytest.mark.parametrize(("mine", "bind"), [("127.0.0.1", "127.0.0.1:77"), (None, None)])
def test_jax_is_told_everything_and_asked_to_find_nothing(mine, bind, monkeypatch):
    """Its own detection would take one GPU, by its number on the host, and SIGTERM too."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *words, **names: told.update(names, words=words)
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(jax.config, "update", lambda name, value: told.update({name: value}))
    made: dict[str, Any] = {}
    monkeypatch.setattr(_jax, "make_gloo_tcp_collectives", made.update)
    placement = RankPlacement(island=0, num_islands=2, process=1, num_processes=2)
    jax_runtime.start_runtime(placement, "127.0.0.1:77" if mine else "a:77", mine)
    # all four that the process sees, by their numbers among these
    assert told["words"] == ("127.0.0.1:77" if mine else "a:77", 2, 1, [0, 1, 2, 3])
    assert told["cluster_detection_method"] == "deactivate"
    assert told["coordinator_bind_address"] == bind
    assert told["jax_enable_preemption_service"] is False
    _jax.make_gloo_tcp_collectives(distributed_client=None)  # pyright: ignore[reportArgumentType]
    assert made.get("hostname") == mine


@pytest.mark.parametrize(
    ("given", "neighbours", "used"),
    [
        # bound by something that set no other variable, such as a script around each rank
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, ["0,1", "2,3"], ("2,3", [0, 1])),
        # the same list for both: shared, as one GPU is
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ["0,1", "0,1"], ("1", [0])),
        ({"CUDA_VISIBLE_DEVICES": "5"}, ["5", "5"], ("5", [0])),
        ({"HIP_VISIBLE_DEVICES": "0,1,2,3"}, ["0,1,2,3"] * 2, ("2,3", [0, 1])),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SHARDTRAIN_BIND": "no"}, ["0,1", "0,1"], ("0,1", [0, 1])),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_LOCAL_DEVICE_IDS": "1"}, ["0,1", "0,1"], ("0,1", [1])),
    ],
)
def test_what_ranks_of_a_host_see_decides_what_each_uses(given, neighbours, used, monkeypatch):
    """After MPI has started, whatever was guessed before: the last word is that of the lists."""
    local = RankEnvironment(launcher="hydra", rank=1, size=2, local_rank=1, local_size=2, host="a")
    for name in (*VISIBLE, "JAX_PLATFORMS", "JAX_LOCAL_DEVICE_IDS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    for name, value in {**given, "CUDA_VISIBLE_DEVICES": "guessed"}.items():
        monkeypatch.setenv(name, value)
    bind_devices(local, given, neighbours)
    assert (visible_list(os.environ), runtime_device_ids(os.environ)) == used


@pytest.mark.parametrize(
    ("environ", "neighbours", "text"),
    [
        (
            {},
            [None] * 3,
            "3 ranks of a host see the same 7 GPUs, which cannot be shared evenly: 7 % 3 = 1. Start 1 or 7"
            " ranks there, or make only 6 of them visible; if each rank has GPUs of its own, bind them by the"
            " launcher or set SHARDTRAIN_BIND=no",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "4,6"},
            ["4,6"] * 3,
            "3 ranks of a host see the same 2 GPUs, which cannot be shared evenly: 2 % 3 = 2. Start 1 or 2"
            " ranks there; if",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "1,2"},
            ["0,1", "1,2", "3"],
            "the ranks of host a see different GPUs, and some of them twice: 0,1; 1,2; 3. Give all the same"
            " list, which they then share, or lists without 1 in common",
        ),
    ],
)
def test_devices_that_cannot_be_shared_are_refused_with_the_numbers(environ, neighbours, text):
    local = RankEnvironment(launcher="hydra", rank=1, size=3, local_rank=1, local_size=3, host="a")
    with pytest.raises(ValueError) as error:
        device_environment(local, environ, num_gpus=7, neighbours=neighbours)
    assert text in str(error.value)


def test_memory_loses_its_name_and_nothing_else_does(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f10 rw-s 0 00:19 5 {tmp_path}/other\n7f00-7f10 rw-s 0 00:19 5 /dev/shm/theirs\n")
    (tmp_path / "other").touch()
    membership.unlink_shared_memory(maps)
    assert (tmp_path / "other").exists()


def test_an_mpi_that_was_told_not_to_start_is_named():
    check_started(True, {})
    for environ, said in (
        ({"MPI4PY_RC_INITIALIZE": "0"}, "MPI4PY_RC_INITIALIZE=0"),
        ({}, "mpi4py.rc.initialize"),
    ):
        with pytest.raises(ValueError, match=f"because of {said}.* use `unset MPI4PY_RC_INITIALIZE`"):
            check_started(False, environ)
