"""Kill, freeze, stop and start islands of a run at random moments, in real processes.

    python tests/elastic/chaos.py --events 100

At the end all living islands have the parameters of one process alone, bitwise, the ledger of the folder has
each slot of each step once, and a replay of it has sums in float32, which depend on their order, bitwise.
Prints how long the others waited after a kill.
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

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))
from elastic_island import PATIENCE_SECONDS, SLOTS, Toy, train_alone

from shardtrain.elastic.history import read_history
from shardtrain.elastic.ledger import is_valid_checkpoint, list_ledger
from shardtrain.elastic.replay import list_differences, replay_steps
from shardtrain.elastic.run_files import list_checkpoints

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
        """Send a signal to the island, which may have been forked by another process."""
        (name,) = (text for text in self.list_texts() if text.startswith("name "))
        os.kill(int(name.rsplit("-", 2)[1]), number)

    @property
    def is_member(self):
        # one that joins computes once before
        return sum(text.startswith("computes ") for text in self.list_texts()) > 1


class Run:
    """A run of toy islands in a folder."""

    def __init__(self, python, folder, steps, seconds=0.003):
        self.python, self.folder, self.steps, self.seconds = python, folder, steps, seconds
        self.processes: list[Process] = []

    def start(self, number=1):
        for _ in range(number):
            output = self.folder / f"output-{len(self.processes)}.txt"
            words = [*self.python, str(PROGRAM), str(self.folder), str(self.steps), str(self.seconds)]
            with output.open("w") as file:
                popen = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
            self.processes.append(Process(popen, output))
        return self.processes[-1]

    def list_living(self):
        return [each for each in self.processes if each.popen.poll() is None]

    def wait_for(self, condition, seconds=60.0):
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
        finished = {each for each in outcomes if each.startswith(f"stopped {self.steps} ")}
        assert finished == {f"stopped {self.steps} {train_alone(self.steps)}"}, outcomes
        epochs = read_history(self.folder).epochs
        for line in list_ledger(epochs, self.steps):
            assert sorted(slot for slots in line.slots.values() for slot in slots) == list(range(SLOTS)), line
        meshes = {name: "" for epoch in epochs for name in epoch.names}
        for saved in list_checkpoints(self.folder / "elastic"):
            if is_valid_checkpoint(epochs, saved.step, saved.epoch):
                replayed, restored = Toy(), Toy()
                replay_steps({"": replayed}, meshes, epochs, 0, saved.step)
                restored.restore(saved.folder)
                assert list_differences(replayed.state, restored.state) == []
        return epochs

    def list_waits(self, killed):
        """Return the seconds from each kill to the next step of a survivor in a later epoch."""
        waits = []
        for at in killed:
            after = []
            for each in self.processes:
                changed = False
                for clock, kind, *_ in each.lines:
                    changed |= kind == "epoch" and float(clock) > at
                    if changed and kind == "step":
                        after.append(float(clock) - at)
                        break
            waits += [min(after)] if after else []
        return waits


def run_chaos(run, seed, events, *, fewest=2, most=4):
    """Do random things to a run until it has had some events; return the times of kills."""
    rng, killed = random.Random(seed), []
    run.start(3)
    run.wait_for(lambda: sum(each.is_member for each in run.list_living()) >= 2)
    for _ in range(events):
        time.sleep(rng.uniform(0.1, 0.8))
        living = [each for each in run.list_living() if each.is_member]
        if len(run.list_living()) <= fewest or not living:
            run.start()
            run.wait_for(lambda: len([each for each in run.list_living() if each.is_member]) >= fewest)
            continue
        victim = rng.choice([living[0], rng.choice(living)])
        what = rng.choice(["kill", "kill", "kill", "leave", "freeze", "start"])
        if what == "kill":
            victim.signal(signal.SIGKILL)
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
    parser.add_argument("--steps", type=int, default=6000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run([sys.executable], Path(folder), asked.steps)
        began = time.monotonic()
        killed = run_chaos(run, asked.seed, asked.events)
        epochs = run.finish(1200.0)
        waits = sorted(run.list_waits(killed))
        words = [word for epoch in epochs for word in epoch.why.replace(";", "").split()]
        counts = {word: words.count(word) for word in ("joined", "lost", "left", "dealt", "founded")}
        sys.stdout.write(
            f"{len(killed)} kills, {len(run.processes)} processes, {len(epochs)} epochs {counts}\n"
            f"{sum(epoch.repeats for epoch in epochs)} steps repeated of {asked.steps},"
            f" in {time.monotonic() - began:.0f} s\n"
            "seconds from a kill to the next step:"
            f" median {waits[len(waits) // 2]:.3f}, worst {waits[-1]:.3f}\n"
        )


if __name__ == "__main__":
    main()
