"""Kill, freeze, stop and start islands of a run at random moments, in real processes.

    python tests/elastic/chaos.py --events 100 --kind toy

After each step islands have the result of one process, bitwise for the toy and to 2e-5 for the loss of a GPT;
with 8 bits its means over 500 steps are within 1 %. At the end all that live have the same. The
ledger of the folder has each slot of each step once, and a replay from each checkpoint to the next one has
all its arrays, which depend on the order of sums, bitwise. Prints how long the others waited after a kill.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))
from elastic_island import KINDS, PATIENCE_SECONDS, SLOTS, list_results, make_program

from shardtrain.elastic.history import read_history
from shardtrain.elastic.ledger import is_valid_checkpoint, list_ledger
from shardtrain.elastic.replay import list_differences, replay_steps
from shardtrain.elastic.run_files import list_checkpoints

MEANS = ("int8",)
"""Kinds that are compared by means over 500 steps, as they round."""

PROGRAM = Path(__file__).parents[1] / "programs" / "elastic_island.py"


@dataclass
class Process:
    popen: subprocess.Popen
    output: Path

    @property
    def lines(self):
        return [line.split(" ", 2) for line in self.output.read_text().splitlines() if line[:1].isdigit()]

    def list_texts(self):
        return [" ".join(line[1:]) for line in self.lines]

    @property
    def outcome(self):
        found = [text for text in self.list_texts() if text.startswith("outcome ")]
        return found[-1].removeprefix("outcome ") if found else ""

    def signal(self, number):
        """Send a signal to the island, which another process may have forked; return whether it was there."""
        (name,) = (text for text in self.list_texts() if text.startswith("name "))
        try:
            os.kill(int(name.rsplit("-", 2)[1]), number)
        except ProcessLookupError:  # it has just left by itself
            return False
        return True

    @property
    def is_member(self):
        # one that joins computes once before
        return sum(text.startswith("computes ") for text in self.list_texts()) > 1


class Run:
    """A run of islands in a folder."""

    def __init__(self, python, folder, steps, seconds=0.003, kind="toy"):
        self.python, self.folder, self.steps, self.seconds = python, folder, steps, seconds
        self.kind = kind
        self.processes: list[Process] = []

    def start(self, number=1):
        for _ in range(number):
            output = self.folder / f"output-{len(self.processes)}.txt"
            words = [*self.python, str(PROGRAM), str(self.folder), str(self.steps), str(self.seconds)]
            words.append(self.kind)
            with output.open("w") as file:
                popen = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
            self.processes.append(Process(popen, output))
        return self.processes[-1]

    def list_living(self):
        return [each for each in self.processes if each.popen.poll() is None]

    def list_members(self):
        return [each for each in self.list_living() if each.is_member]

    @property
    def is_done(self):
        return any(each.outcome.startswith("stopped") for each in self.processes)

    def wait_for(self, condition, seconds=120.0):
        end = time.monotonic() + seconds
        while not (found := condition()):
            texts = [each.output.read_text()[-2000:] for each in self.processes]
            assert time.monotonic() < end, "\n".join(texts)
            time.sleep(0.02)
        return found

    def end(self):
        """Kill what still runs, also what is frozen."""
        for each in self.list_living():
            each.signal(signal.SIGKILL)
            each.popen.wait()

    def finish(self, seconds=120.0):
        """Wait for the end, and check what the run must show; return the epochs."""
        self.wait_for(lambda: not self.list_living(), seconds)
        outcomes = [each.outcome for each in self.processes if each.popen.returncode == 0]
        # if all members leave, the run stops early, and new islands continue from its checkpoint
        # one that comes after the end has done nothing
        results = {
            result
            for outcome, steps, result in (each.rsplit(" ", 2) for each in outcomes)
            if (outcome, steps) == ("stopped", str(self.steps)) and result != "nan"
        }
        assert len(results) == 1, outcomes
        self.compare()
        epochs = read_history(self.folder).epochs
        for line in list_ledger(epochs, self.steps):
            assert sorted(slot for slots in line.slots.values() for slot in slots) == list(range(SLOTS)), line
        self.replay(epochs)
        return epochs

    def compare(self):
        """Compare the result after each step with that of one process; keep the largest difference."""
        lines = sorted(
            (float(line[0]), line[2])
            for each in self.processes
            for line in each.lines
            if line[1] == "applied"
        )
        # a step that all had done may be repeated, if all died before it was saved
        found = {int(step): float(result) for _, text in lines for step, result in [text.split()]}
        expected = list_results(self.steps, self.kind)
        assert found.keys() == expected.keys()
        found, expected = (np.array([each[step] for step in sorted(each)]) for each in (found, expected))
        if self.kind in MEANS:
            number = 500 // KINDS[self.kind]
            found, expected = (
                x[: len(x) // number * number].reshape(-1, number).mean(1) for x in (found, expected)
            )
        self.most_off = np.abs(found / expected - 1).max()
        assert self.most_off <= (0.01 if self.kind in MEANS else 0 if self.kind == "toy" else 2e-5)

    def replay(self, epochs):
        """Compute the steps from each checkpoint to the next one anew, from the ledger alone."""
        meshes = {name: "" for epoch in epochs for name in epoch.names}
        replayed, restored, first = make_program(self.kind), make_program(self.kind), 0
        self.num_replayed = 0
        for saved in list_checkpoints(self.folder / "elastic"):
            if is_valid_checkpoint(epochs, saved.step, saved.epoch):
                replay_steps({"": replayed}, meshes, epochs, first, saved.step)
                restored.restore(saved.folder)
                assert list_differences(replayed.state, restored.state) == [], saved
                first = saved.step
                self.num_replayed += 1

    def list_waits(self, killed):
        """Return the seconds from each kill to the next step of a survivor in a later epoch."""
        waits = []
        for at in killed:
            after = []
            for each in self.processes:
                changed = False
                for clock, kind, *_ in each.lines:
                    changed |= kind == "epoch" and float(clock) > at
                    if changed and kind == "applied":
                        after.append(float(clock) - at)
                        break
            waits += [min(after)] if after else []
        return waits


def run_chaos(run, seed, events, *, fewest=2, most=4):
    """Do random things to a run until it has had some events; return the times of kills."""
    rng, killed = random.Random(seed), []
    run.start(3)
    run.wait_for(lambda: len(run.list_members()) >= 2)
    for _ in range(events):
        time.sleep(rng.uniform(0.1, 0.8))
        if run.is_done:
            break
        living = run.list_members()
        if len(run.list_living()) <= fewest or not living:
            run.start()
            run.wait_for(lambda: run.is_done or len(run.list_members()) >= fewest)
            continue
        victim = rng.choice([living[0], rng.choice(living)])
        what = rng.choice(["kill", "kill", "kill", "leave", "freeze", "start"])
        if what == "kill":
            if victim.signal(signal.SIGKILL):
                killed.append(time.monotonic())
        elif what == "leave":
            victim.signal(signal.SIGTERM)
        elif what == "freeze":
            victim.signal(signal.SIGSTOP)
            time.sleep(PATIENCE_SECONDS + rng.uniform(0.2, 1.0))
            victim.signal(signal.SIGCONT)
        if len(run.list_living()) < most:
            run.start()
    return killed


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: 6000 of the toy, else 1000")
    parser.add_argument("--kind", choices=list(KINDS), default="toy")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = asked.steps or (6000 if asked.kind == "toy" else 1000)
        run = Run([sys.executable], Path(folder), steps, 0.003 if asked.kind == "toy" else 0.01, asked.kind)
        began = time.monotonic()
        killed = run_chaos(run, asked.seed, asked.events)
        epochs = run.finish(1200.0)
        waits = sorted(run.list_waits(killed))
        words = [word for epoch in epochs for word in epoch.why.replace(";", "").split()]
        counts = {word: words.count(word) for word in ("joined", "lost", "left", "dealt", "founded")}
        sys.stdout.write(
            f"{len(killed)} kills, {len(run.processes)} processes, {len(epochs)} epochs {counts}\n"
            f"{sum(epoch.repeats * epoch.every for epoch in epochs)} steps repeated of {steps}, in"
            f" {time.monotonic() - began:.0f} s; {run.num_replayed} stretches replayed bitwise\n"
            f"results differ by up to {run.most_off:.1e} from one process\n"
            "seconds from a kill to the next step:"
            f" median {waits[len(waits) // 2]:.3f}, worst {waits[-1]:.3f}\n"
        )


if __name__ == "__main__":
    main()
