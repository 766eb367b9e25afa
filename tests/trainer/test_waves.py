"""Runs in waves on three islands of unequal speed, see `programs/waves.py`."""

import json
from pathlib import Path

import numpy as np

from shardtrain.islands.parameter_shard import Event
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.waves import read_wave_log

PROGRAM = Path(__file__).parents[1] / "programs" / "waves.py"
EVERY, DISTANCE, STEPS = 2, 2, 12


def test_waves(tmp_path, mpiexec):
    text = tmp_path / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 123, 36 * 8 + 20, np.uint8).tobytes())
    found = json.loads(mpiexec(3, PROGRAM, text, tmp_path)[0])
    lines = read_jsonl(tmp_path / "ahead" / "metrics.jsonl")
    # island 0 is the fastest: it gets as far ahead as it may, and never further
    staleness = [line["staleness"] for line in lines]
    assert max(staleness) == DISTANCE * EVERY + EVERY - 1, staleness
    # a wave pushes the parameters once, two of three shards of them to others; island 0 sends its shard to
    # two islands for each of their waves, some of them after its own last one
    sent, shard_bytes = sum(line["bytes/islands"] for line in lines), 4 * found["num_parameters"] // 3
    pushed = STEPS // EVERY * 2 * shard_bytes
    assert pushed < sent <= 2 * pushed
    # every example of every island is in exactly one line: batches of 9 rows of 8 tokens
    in_waves = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in in_waves] == list(range(EVERY, STEPS + 1, EVERY))
    assert 0 < lines[-1]["heldout/loss"] < 6
    # what a replay repeats is one history: no step twice, though the run was stopped and resumed
    for island in range(3):
        events = read_wave_log(tmp_path / "stopped", island, 3)
        pushes = [event for event in events if event.kind == "push"]
        steps = range(EVERY, found["stopped"] + 8 + 1, EVERY)
        assert sorted(pushes) == sorted(Event("push", each, step) for each in range(3) for step in steps)
