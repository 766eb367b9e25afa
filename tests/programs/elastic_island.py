"""One island that trains a toy model, in whole numbers: FOLDER STEPS SECONDS_PER_SLOT [MEMBERSHIP as JSON].

Each line that it prints begins with the clock of the host.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from shardtrain.elastic.island import ElasticIsland
from shardtrain.elastic.member import Membership

SIZE, SLOTS = 1000, 6
WHOLE = sum(1000**slot for slot in range(SLOTS))
PATIENCE_SECONDS = 2.0


def say(text):
    sys.stdout.write(f"{time.monotonic():.4f} {text}\n")
    sys.stdout.flush()


class Toy:
    """Parameters that depend on each slot of each step: x not on who computes it, and y on who does."""

    def __init__(self, seconds=0.0):
        self.state = {
            "x": np.arange(SIZE, dtype=np.int64),
            "y": np.ones(SIZE, np.float32),
            "step": np.zeros((), np.int64),
        }
        self.seconds = seconds

    def compute(self, step, slots):
        say(f"computes {step} {slots}")
        time.sleep(self.seconds * len(slots))
        assert self.state["step"] == step
        grads = [self.state["x"] * (2 * slot + 3) + 7 * step + slot for slot in slots]
        noise = [np.sin(self.state["x"] * (slot + 1), dtype=np.float32) for slot in slots]
        return {
            "grad": np.sum(grads, 0),
            "noise": np.sum(noise, 0),
            "counts": np.int64(sum(1000**slot for slot in slots)),
        }

    def apply(self, step, total):
        assert self.state["step"] == step
        assert total["counts"] == WHOLE, "a slot is missing, or counted twice"
        self.state = {
            "x": (self.state["x"] * 31 + total["grad"]) % 10007,
            # a difference in the last bit grows
            "y": (self.state["y"] * np.float32(1.7) + total["noise"]) % np.float32(1),
            "step": np.int64(step + 1),
        }
        say(f"step {step + 1}")

    def save(self, folder):
        np.savez(folder / "state.npz", **self.state)

    def restore(self, folder):
        with np.load(folder / "state.npz") as found:
            self.state = dict(found)


def train_alone(steps):
    """Return the sum of the parameters after some steps of one process."""
    toy = Toy()
    for step in range(steps):
        total = toy.compute(step, range(SLOTS))
        toy.apply(step, total)
    return int(toy.state["x"].sum())


if __name__ == "__main__":
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    toy = Toy(float(sys.argv[3]))
    membership = Membership(
        num_slots=SLOTS, num_steps=steps, found_seconds=3.0, minority_seconds=1.0, **options
    )
    island = ElasticIsland(
        folder, toy, membership, save_every=20, host=os.environ.get("SHARDTRAIN_ADDRESS", "127.0.0.1"),
        patience_seconds=PATIENCE_SECONDS, report=say,
    )  # fmt: skip
    say(f"name {island.member.me.name}")
    with island:
        for _ in island:
            pass
    say(f"outcome {island.outcome} {toy.state['step']} {toy.state['x'].sum()}")
