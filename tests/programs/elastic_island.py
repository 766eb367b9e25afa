"""One island that trains a toy model, in whole numbers, or a GPT: FOLDER STEPS SECONDS_PER_SLOT [KIND].

Each line that it prints begins with the clock of the host.
"""

import os
import sys
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from shardtrain.elastic.epoch import find_next
from shardtrain.elastic.island import ElasticIsland
from shardtrain.elastic.member import Membership

SIZE, SLOTS = 1000, 6
WHOLE = sum(1000**slot for slot in range(SLOTS))
PATIENCE_SECONDS = 2.0
KINDS = {"toy": 1, "mean": 1, "int8": 1, "adasum": 1, "diloco": 5}
"""Kind of a run -> number of steps between exchanges."""


def say(text):
    sys.stdout.write(f"{time.monotonic():.4f} {text}\n")
    sys.stdout.flush()


class Toy:
    """Parameters that depend on each slot of each step: x not on who computes it, and y and z on who does."""

    codecs: ClassVar = {"coded": "int8", "counts": "", "grad": "", "noise": ""}

    def __init__(self):
        self.state = {
            "x": np.arange(SIZE, dtype=np.int64),
            "y": np.ones(SIZE, np.float32),
            "z": np.ones(SIZE, np.float32),
            "step": np.zeros((), np.int64),
        }

    @property
    def result(self):
        return int(self.state["x"].sum())

    def compute(self, step, slots):
        assert self.state["step"] == step
        grads = [self.state["x"] * (2 * slot + 3) + 7 * step + slot for slot in slots]
        noise = [np.sin(self.state["x"] * (slot + 1), dtype=np.float32) for slot in slots]
        return {
            "grad": np.sum(grads, 0),
            "noise": np.sum(noise, 0),
            "coded": np.sum(noise, 0),
            "counts": np.int64(sum(1000**slot for slot in slots)),
        }

    def apply(self, step, total):
        assert self.state["step"] == step
        assert total["counts"] == WHOLE, "a slot is missing, or counted twice"
        self.state = {
            "x": (self.state["x"] * 31 + total["grad"]) % 10007,
            # a difference in the last bit grows
            "y": (self.state["y"] * np.float32(1.7) + total["noise"]) % np.float32(1),
            "z": (self.state["z"] * np.float32(1.7) + total["coded"]) % np.float32(1),
            "step": np.int64(step + 1),
        }

    def save(self, folder):
        np.savez(folder / "state.npz", **self.state)

    def restore(self, folder):
        with np.load(folder / "state.npz") as found:
            self.state = dict(found)


def make_program(kind):
    """Return the program of a kind of run; its `result` is what it has learned."""
    if kind == "toy":
        return Toy()
    from elastic_gpt import Gpt  # jax takes seconds to import

    return Gpt(kind, SLOTS, KINDS[kind])


def list_results(steps, kind="toy"):
    """Return number of steps done -> the result of one process, after each exchange."""
    program, found = make_program(kind), {}
    for step in range(0, steps, KINDS[kind]):
        program.apply(step, program.compute(step, range(SLOTS)))
        found[find_next(step, KINDS[kind])] = program.result
    return found


def train_alone(steps, kind="toy"):
    """Return the result of some steps of one process."""
    return list_results(steps, kind)[steps]


class Spoken:
    """A program that says what it does, and takes its time."""

    def __init__(self, program, every, seconds):
        self.program, self.every, self.seconds = program, every, seconds
        self.save, self.restore = program.save, program.restore
        self.codecs = getattr(program, "codecs", ())

    @property
    def state(self):
        return self.program.state

    @state.setter
    def state(self, state):
        self.program.state = state

    def compute(self, step, slots):
        say(f"computes {step} {slots}")
        time.sleep(self.seconds * len(slots))
        return self.program.compute(step, slots)

    def apply(self, step, total):
        self.program.apply(step, total)
        say(f"applied {find_next(step, self.every)} {self.program.result}")


if __name__ == "__main__":
    folder, steps, kind = Path(sys.argv[1]), int(sys.argv[2]), (sys.argv[4:] or ["toy"])[0]
    program = Spoken(make_program(kind), KINDS[kind], float(sys.argv[3]))
    membership = Membership(
        num_slots=SLOTS, num_steps=steps, every=KINDS[kind], found_seconds=3.0, minority_seconds=1.0
    )
    island = ElasticIsland(
        folder, program, membership, save_every=20, host=os.environ.get("SHARDTRAIN_ADDRESS", "127.0.0.1"),
        patience_seconds=PATIENCE_SECONDS, report=say,
    )  # fmt: skip
    say(f"name {island.member.me.name}")
    with island:
        for _ in island:
            pass
    done = program.state["step"] if kind == "toy" else int(program.state.step)
    say(f"outcome {island.outcome} {done} {program.program.result}")
