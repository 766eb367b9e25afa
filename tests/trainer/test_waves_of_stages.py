"""Waves of virtual workers that are pipelines across islands, see `programs/waves_of_stages.py`."""

import json
from pathlib import Path

import numpy as np
import pytest

from shardtrain.islands.parameter_shard import Event
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.waves import read_wave_log

PROGRAM = Path(__file__).parents[1] / "programs" / "waves_of_stages.py"
EVERY, DISTANCE, STEPS = 2, 1, 8


@pytest.mark.full
@pytest.mark.parametrize("in_flight", [1, 2])
def test_waves_of_stages(in_flight, tmp_path, mpiexec):
    text = tmp_path / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 123, 36 * 8 + 20, np.uint8).tobytes())
    found = json.loads(mpiexec(4, PROGRAM, text, tmp_path, in_flight)[0])
    lines = read_jsonl(tmp_path / "ahead" / "metrics.jsonl")
    # the first pipeline is the fastest: it gets as far ahead as it may, and never further
    staleness = [line["staleness"] for line in lines]
    assert max(staleness) == (DISTANCE + 1) * EVERY + in_flight - 2, staleness
    # a wave of a stage pushes its parameters once, one of two shards of them to the other pipeline, and gets
    # as much; the other pipeline's waves are answered from this shard, once each
    sent, shard_bytes = sum(line["bytes/islands"] for line in lines), 4 * found["num_parameters"] // 2
    assert sent <= 2 * STEPS // EVERY * shard_bytes
    assert sent > STEPS // EVERY * shard_bytes
    # the losses are of both pipelines, each example once
    first = EVERY if in_flight == 1 else EVERY + in_flight  # the step in which the first wave ends
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(first, STEPS + 1, EVERY))
    assert 0 < lines[-1]["heldout/loss"] < 6
    # a replay repeats one history of each shard: no step twice, though the run was stopped and resumed
    for island in range(4):
        events = read_wave_log(tmp_path / "stopped", island, 2)
        pushes = [event for event in events if event.kind == "push"]
        steps = range(EVERY, found["stopped"] + 4 + 1, EVERY)
        assert sorted(pushes) == sorted(Event("push", each, step) for each in range(2) for step in steps)
