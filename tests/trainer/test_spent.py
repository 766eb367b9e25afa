"""Where the time of a run goes: each kind of waiting is charged to itself, and all of it is charged."""

import time

import numpy as np
import pytest
from quiet_training import InMemory, train_quietly
from tiny_language_model import TinyConfig

from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy

SECONDS = 0.1


class Slow:
    """Samples of which each takes a while."""

    fingerprint = "slow"

    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(SECONDS)
        return {"tokens": np.arange(index, index + 9, dtype=np.int32)}


def test_slow_data_is_charged_to_the_input(tmp_path):
    run = Run(
        model=TinyConfig(),
        data=InMemory(Slow()),
        strategy=Strategy(
            layout=Layout(mesh={"data": 1, "fsdp": 4, "tensor": 2}), predicted={"compute_seconds": 0.001}
        ),
        batch=4,
        steps=4,
        log_every=1,
        run_dir=tmp_path,
    )
    _, printed, lines = train_quietly(run)
    kinds = {name for line in lines for name in line if name.startswith("seconds/")}
    assert {"seconds/input", "seconds/step", "seconds/other"} <= kinds
    # four samples a batch, loaded ahead by one thread or more: the loop waits for most of them
    assert sum(line["seconds/input"] for line in lines) > 2 * SECONDS
    seconds = [sum(x for name, x in line.items() if name.startswith("seconds/")) for line in lines]
    walls = [line["wall_seconds"] for line in lines]
    # nothing is left out, and nothing counted twice
    assert sum(seconds[1:]) == pytest.approx(walls[-1] - walls[0], abs=0.05)
    assert all(line["peak_memory_bytes"] > 1 << 20 for line in lines)
    assert "time of this start: " in printed
    # the same line says how far this is from the prediction of the strategy, and why
    assert "predicted 1 ms (" in printed
    assert "most of the difference: input " in printed
    assert "peak memory of the process: " in printed
    assert not any(name.startswith(("bytes/", "own_seconds/", "mfu")) for line in lines for name in line)
    assert "MFU" not in printed
