"""A transfer sends what was started before it ends, as other islands wait for it; what is copied."""

import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.islands.transfer import Transfer
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh


@pytest.mark.parametrize("failed", [False, True])
def test_what_was_started_is_sent_unless_the_run_failed(failed):
    mesh = make_mesh(Layout(mesh={"data": 1}), jax.devices()[:1])
    transfer = Transfer(mesh, [SimpleNamespace(traced_bytes=0)])  # pyright: ignore[reportArgumentType]
    running, may_go_on = threading.Event(), threading.Event()

    def first(arrays, group):
        # while it is traced in the transfer's thread, the second one waits for its turn
        running.set()
        may_go_on.wait(20)
        return arrays

    started = [
        transfer.start(number, program, [jnp.ones(3)]) for number, program in ((0, first), (1, second))
    ]
    assert running.wait(20)
    threading.Timer(0.1, may_go_on.set).start()
    transfer.close(failed)
    started[0].result(20)
    assert [future.cancelled() for future in started] == [False, failed]


def second(arrays, group):
    return arrays


def test_what_is_in_place_is_not_placed_again():
    mesh = make_mesh(Layout(), jax.devices()[:1])
    transfer = Transfer(mesh, [SimpleNamespace(traced_bytes=0)])  # pyright: ignore[reportArgumentType]
    array = jax.device_put(jnp.ones(3), NamedSharding(mesh, PartitionSpec()))
    found = transfer.result(0, transfer.start(0, second, [array]))
    assert transfer.land(0, found, [array])[0] is found[0]
    transfer.close()


def test_a_mean_has_no_small_first_bucket_unless_an_island_copies_or_it_is_asked_for():
    mesh = make_mesh(Layout(), jax.devices()[:1])
    group: Any = SimpleNamespace(traced_bytes=0)
    leaves = [jax.ShapeDtypeStruct((1 << 18,), jnp.float32)] * 3

    def sizes(is_stateless: bool, first_bytes: int | None = None, copies_first: bool = False) -> list[int]:
        transfer = Transfer(mesh, [group], first_bytes=first_bytes, copies_first=copies_first)
        return [len(bucket) for bucket in transfer.buckets(leaves, is_stateless=is_stateless)]

    assert sizes(True) == [3]
    assert sizes(True, copies_first=True) == sizes(False) == [1, 2]
    assert sizes(True, first_bytes=2 << 20) == [2, 1]
