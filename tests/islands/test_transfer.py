"""A transfer that ends sends what was started, because other islands wait for it, unless the run failed."""

import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

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
