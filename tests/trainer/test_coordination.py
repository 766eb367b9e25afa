"""What islands do together, without MPI: rows, common steps, fingerprints, and device memory."""

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.islands.bridge import Control
from shardtrain.islands.membership import START_SECONDS
from shardtrain.islands.mpi_library import cuda_aware, decide_device_memory
from shardtrain.islands.rank_timeout import RankWait
from shardtrain.trainer.coordination import (
    AGREEMENT_SECONDS,
    LONG_SECONDS,
    Coordination,
    StepVote,
)
from shardtrain.trainer.synchronisation import broadcast_state, find_differing_arrays


def test_a_run_of_one_island_answers_by_itself():
    coordination = Coordination()
    assert coordination.any_rank("a bad step", True)
    assert not coordination.any_rank("a bad step", False)
    assert coordination.run_in_turn("data", lambda: 7) == 7
    assert coordination.sum_over_islands("evaluation", {"loss": (3.0, 2.0)}) == {"loss": (3.0, 2.0)}
    state: Any = object()
    assert broadcast_state(coordination, state, own_optimizers=False) is state
    assert find_differing_arrays(coordination, state, own_optimizers=False) == []


def test_a_folder_that_is_ahead_is_taken_back(tmp_path):
    with Checkpoints(tmp_path, CheckpointPolicy(keep=9)) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(step, {"x": jnp.full(3, step, jnp.float32)}, {})
        checkpoints.wait()
        checkpoints.resume_after(4)
        assert checkpoints.latest() == 4
        restored = checkpoints.restore({"x": jnp.zeros(3)}, newest=4)
        assert restored is not None
        assert restored.step == 4
        checkpoints.save(6, {"x": jnp.full(3, 60, jnp.float32)}, {})
        checkpoints.wait()
        assert checkpoints.restore({"x": jnp.zeros(3)}).state["x"][0] == 60.0  # type: ignore[union-attr]
        checkpoints.resume_after(-1)
        assert checkpoints.latest() is None
        checkpoints.save(1, {"x": jnp.zeros(3)}, {})


def test_the_probe_of_device_memory_survives_a_crash_and_a_hang():
    assert cuda_aware((sys.executable, "-c", "pass"))
    assert not cuda_aware((sys.executable, "-c", "import os; os.abort()"))
    assert not cuda_aware((sys.executable, "-c", "import time; time.sleep(60)"), timeout_seconds=0.5)


def test_device_memory_is_used_where_every_rank_can():
    def islands(others: list[bool], num_processes: int = 1) -> Any:
        control = SimpleNamespace(
            all_gather=lambda name, able: [able, *others], names=["island 0", "island 1"]
        )
        return SimpleNamespace(control=control, placement=SimpleNamespace(num_processes=num_processes))

    assert decide_device_memory("auto", islands([True]), "gpu", lambda: True)
    assert not decide_device_memory("auto", islands([False]), "gpu", lambda: True)
    assert not decide_device_memory("auto", islands([True]), "cpu", lambda: True)
    assert not decide_device_memory("host", islands([True]), "gpu", lambda: True)
    assert not decide_device_memory("auto", islands([True], num_processes=2), "gpu", lambda: True)
    with pytest.raises(ValueError, match="does not take device memory on island 1; use 'host'"):
        decide_device_memory("device", islands([False]), "gpu", lambda: True)


def test_the_page_of_islands_has_the_limits_of_the_code():
    page = (Path(__file__).parents[2] / "docs/islands.md").read_text().replace("\n", " ")
    assert f"{START_SECONDS:.0f} s at the start, {AGREEMENT_SECONDS:.0f} s at the comparison" in page
    assert f"{LONG_SECONDS:.0f} s where" in page
    assert f"{inspect.signature(Control).parameters['patience_seconds'].default:.0f} s elsewhere" in page
    assert f"named after {RankWait.REPORT_SECONDS:.0f} s" in page


def test_all_processes_of_an_island_have_saved_a_step_before_old_ones_are_deleted():
    for saved, newest in (([20, None], -1), ([20, 10], 10), ([10, 20], 10)):
        control = SimpleNamespace(all_gather=lambda name, value, timeout, saved=saved: saved)
        islands: Any = SimpleNamespace(control=control)
        vote = Coordination(islands, is_chief=lambda: True).vote(20, StepVote(15, True, saved[0])).vote
        assert (vote.stop, vote.save, vote.saved) == (0, False, newest)
