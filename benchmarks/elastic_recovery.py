"""How long a run stands still when an island is killed, and how soon a new one counts.

Islands that come and go, beside islands joined by MPI that all start again (`launch --restarts`).

    python benchmarks/elastic_recovery.py [--kills 10] [--islands 3]

A small GPT (`examples/gpt_text.py`) on this host, each island on one device. A kill is a SIGKILL at a random
moment, of the chief in every second case; `train` writes a line of metrics for each step, so the longest time
between two lines around the kill is what the others waited. Then a new island starts: the time from its start
to its first epoch (with imports and compiled programs from the cache), and what the others waited then.
Figures: docs/elastic.md.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from subprocess import DEVNULL
from tempfile import TemporaryDirectory

import tyro
from paired import markdown

from shardtrain.elastic.history import read_history

SMALL = "--model.embed 64 --model.num-layers 2 --model.num-heads 2 --model.mlp 128 --batch 12 --log-every 1"
NEVER = "--evaluate-every 1000000 --evaluate-batches 1 --sinks jsonl"
SHARDTRAIN = (sys.executable, "-m", "shardtrain")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      kills: number of kills of each side.
      islands: number of islands.
      calm_seconds: time between the end of one disturbance and the next kill.
      seed: of the moments.
    """

    kills: int = 10
    islands: int = 3
    calm_seconds: float = 3.0
    seed: int = 0


class Run:
    """A run in a folder, and the times at which its lines of metrics were seen."""

    def __init__(self, folder: Path, words: tuple[str, ...], saves: int) -> None:
        self.folder = folder
        steps = ("--steps", "1000000", "--checkpoints.every-steps", str(saves), "--run-dir", str(folder))
        self.words = (*words, "train", "examples/gpt_text.py", *SMALL.split(), *NEVER.split(), *steps)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.seen: list[float] = []
        self._size = 0

    def start(self, *more: str) -> None:
        environment = {**os.environ, "SHARDTRAIN_ADDRESS": "127.0.0.1"}
        command = [*self.words, *more]
        self.processes.append(
            subprocess.Popen(command, stdout=DEVNULL, stderr=DEVNULL, env=environment, start_new_session=True)
        )

    def watch(self, seconds: float, until=lambda: False) -> None:
        """Note when lines come, for some time or until something is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            with contextlib.suppress(FileNotFoundError):
                size = (self.folder / "metrics.jsonl").stat().st_size
                if size != self._size:
                    self._size = size
                    self.seen.append(time.monotonic())
            time.sleep(0.002)

    def longest_pause(self, begin: float, end: float) -> float:
        """Return the longest time without a line from the last one before `begin` on."""
        before = [each for each in self.seen if each <= begin][-1:]
        times = before + [each for each in self.seen if begin < each <= end]
        return max(later - earlier for earlier, later in pairwise(times))

    def end(self) -> None:
        for each in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()


class ElasticRun(Run):
    """A run of islands that come and go, all of them there."""

    def __init__(self, options: Options, folder: Path) -> None:
        super().__init__(folder, SHARDTRAIN, saves=500)
        self.options, self.chance = options, random.Random(options.seed)
        for _ in range(options.islands):
            self.add_island()

    def add_island(self) -> None:
        self.start("--elastic", f"1..{self.options.islands}", "--cpu-devices", "1")

    def find_names(self) -> tuple[str, ...]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return read_history(self.folder).epochs[-1].names
        return ()

    def wait_until_full(self) -> None:
        self.watch(120, lambda: len(self.find_names()) == self.options.islands)

    def kill(self, number: int) -> float:
        """Kill the chief, or another one in every second case; return the time."""
        chief, *others = self.find_names()
        name = self.chance.choice(others) if number % 2 and others else chief
        os.kill(int(name.split("-")[-2]), signal.SIGKILL)
        return time.monotonic()


def measure_elastic(options: Options, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each kind of wait of islands that come and go."""
    run = ElasticRun(options, folder)
    found: dict[str, list[float]] = {"kill": [], "join": [], "others at a join": []}
    try:
        run.wait_until_full()
        for number in range(options.kills):
            run.watch(options.calm_seconds + run.chance.random())
            killed = run.kill(number)
            run.watch(options.calm_seconds)
            found["kill"].append(run.longest_pause(killed, time.monotonic()))
            started = time.monotonic()
            run.add_island()
            run.wait_until_full()
            found["join"].append(time.monotonic() - started)
            run.watch(1.0)
            found["others at a join"].append(run.longest_pause(started, time.monotonic()))
    finally:
        run.end()
    return found


def measure_restarts(options: Options, folder: Path) -> list[float]:
    """Return the seconds without a step after each kill of a rank that all start again from."""
    chance, found = random.Random(options.seed), list[float]()
    launch = f"launch --islands {options.islands} --restarts 999 --logs {folder / 'logs'} --"
    run = Run(folder / "run", (*SHARDTRAIN, *launch.split()), saves=500)
    try:
        run.start("--cpu-devices", "1")
        for _ in range(options.kills):
            count = len(run.seen)
            run.watch(120, lambda count=count: len(run.seen) > count + 20)
            run.watch(options.calm_seconds + chance.random())
            (*_, last) = (run.folder / "environment.jsonl").read_text().splitlines()
            killed = time.monotonic()
            os.kill(chance.choice(json.loads(last)["ranks"])["pid"], signal.SIGKILL)
            # lines that were written before the kill may still be seen
            run.watch(2.0)
            count = len(run.seen)
            run.watch(120, lambda count=count: len(run.seen) > count + 3)
            found.append(run.longest_pause(killed, time.monotonic()))
    finally:
        run.end()
    return found


def main(options: Options) -> None:
    """Print the table."""
    with TemporaryDirectory() as folder:
        elastic = measure_elastic(options, Path(folder) / "elastic")
        restarts = measure_restarts(options, Path(folder) / "restarts")

    def show(values: list[float]) -> str:
        return f"{median(values):.2f} s, at most {max(values):.2f} s"

    rows = [
        ["a kill: no step for", show(elastic["kill"]), show(restarts)],
        ["a start: until it is a member", show(elastic["join"]), "-"],
        ["a start: no step of the others for", show(elastic["others at a join"]), "-"],
    ]
    head = ["", "islands that come and go", "`launch --restarts`"]
    sys.stdout.write(markdown(head, rows) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
