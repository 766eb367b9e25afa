"""How long a run stands still when an island is killed, and how soon a new one counts.

Islands that come and go, beside islands joined by MPI that all start again (`launch --restarts`).

    python benchmarks/elastic_recovery.py [--kills 10]
    python benchmarks/elastic_recovery.py --goodput-minutes 30

A small GPT (`examples/gpt_text.py`) on this host, each island on one device. A kill is a SIGKILL at a random
moment, of the chief in every second case; `train` writes a line of metrics for each step, so the longest time
between two lines around the kill is what the others waited. Then a new island starts: the time from its start
to its first epoch (with imports and compiled programs from the cache), and what the others waited then.
With `--goodput-minutes` one island is killed every five minutes, and another starts a minute later: the steps
done beside those of a time without kills before, and the causes of the rest by `shardtrain report`.
Figures: docs/elastic.md.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, Popen
from tempfile import TemporaryDirectory

import tyro
from paired import markdown

from shardtrain.elastic.history import read_history
from shardtrain.report.elastic_run import past_text, summarize
from shardtrain.report.sinks.json_lines import read_jsonl

TRAINED = (
    "--model.embed 64 --model.num-layers 2 --model.num-heads 2 --model.mlp 128 --batch 12 --steps 1000000"
    " --log-every 1 --evaluate-every 1000000 --evaluate-batches 1 --checkpoints.every-steps 500 --sinks jsonl"
)
ISLANDS = 3
SHARDTRAIN = (sys.executable, "-m", "shardtrain")
CALM_SECONDS, EVERY_MINUTES = 3.0, 5.0
"""Time between the end of one disturbance and the next kill; time between two kills, for goodput."""


class Run:
    """A run in a folder, and the times at which its lines of metrics were seen."""

    def __init__(self, folder: Path, words: tuple[str, ...]) -> None:
        self.folder = folder
        self.words = (*words, "train", "examples/gpt_text.py", *TRAINED.split(), "--run-dir", str(folder))
        self.processes: list[Popen[bytes]] = []
        self.seen: list[float] = []
        self._size = 0

    def start(self, *more: str) -> None:
        env = {**os.environ, "SHARDTRAIN_ADDRESS": "127.0.0.1"}
        words = [*self.words, *more]
        self.processes.append(Popen(words, stdout=DEVNULL, stderr=DEVNULL, env=env, start_new_session=True))

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

    def count_steps(self) -> int:
        """Return the number of steps done, by the last whole line of metrics."""
        return int(read_jsonl(self.folder / "metrics.jsonl")[-1]["step"])

    def longest_pause(self, begin: float, end: float) -> float:
        """Return the longest time without a line from the last one before `begin` on."""
        before = [each for each in self.seen if each <= begin][-1:]
        times = before + [each for each in self.seen if begin < each <= end]
        return max(later - earlier for earlier, later in pairwise(times))

    def close(self) -> None:
        for each in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()


class ElasticRun(Run):
    """A run of islands that come and go, all of them there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SHARDTRAIN)
        self.chance = random.Random(0)
        for _ in range(ISLANDS):
            self.add_island()

    def add_island(self) -> None:
        self.start("--elastic", f"1..{ISLANDS}", "--cpu-devices", "1")

    def find_names(self) -> tuple[str, ...]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return read_history(self.folder).epochs[-1].names
        return ()

    def wait_until_full(self) -> None:
        self.watch(120, lambda: len(self.find_names()) == ISLANDS)

    def kill(self, number: int) -> float:
        """Kill the chief, or another one in every second case; return the time."""
        chief, *others = self.find_names()
        name = self.chance.choice(others) if number % 2 and others else chief
        os.kill(int(name.split("-")[-2]), signal.SIGKILL)
        return time.monotonic()


def measure_elastic(kills: int, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each kind of wait of islands that come and go."""
    found: dict[str, list[float]] = {"kill": [], "join": [], "others at a join": []}
    with contextlib.closing(ElasticRun(folder)) as run:
        run.wait_until_full()
        for number in range(kills):
            run.watch(CALM_SECONDS + run.chance.random())
            killed = run.kill(number)
            run.watch(CALM_SECONDS)
            found["kill"].append(run.longest_pause(killed, time.monotonic()))
            started = time.monotonic()
            run.add_island()
            run.wait_until_full()
            found["join"].append(time.monotonic() - started)
            run.watch(1.0)
            found["others at a join"].append(run.longest_pause(started, time.monotonic()))
    return found


def measure_goodput(all_minutes: float, folder: Path) -> str:
    """Return a text about the steps done with kills and joins, beside those of a time without."""
    with contextlib.closing(ElasticRun(folder)) as run:
        run.wait_until_full()
        run.watch(30.0)
        rates = []
        for minutes, disturbs in ((all_minutes / 5, False), (all_minutes, True)):
            began, first, number = time.monotonic(), run.count_steps(), 0
            end = began + 60 * minutes
            while disturbs and time.monotonic() < end - 60:
                run.kill(number)
                number += 1
                run.watch(60.0)
                run.add_island()
                run.watch(min(60 * EVERY_MINUTES * number + began, end) - time.monotonic())
            run.watch(end - time.monotonic())
            rates.append((run.count_steps() - first) / (time.monotonic() - began))
    past = summarize(read_history(folder), read_jsonl(folder / "metrics.jsonl"), time.time())
    return (
        f"{rates[0]:.2f} steps a second undisturbed, {rates[1]:.2f} with {number} kills in"
        f" {all_minutes:g} minutes: {rates[1] / rates[0]:.1%}\n{past_text(past)}"
    )


def measure_restarts(kills: int, folder: Path) -> list[float]:
    """Return the seconds without a step after each kill of a rank that all start again from."""
    chance, found = random.Random(0), list[float]()
    launch = f"launch --islands {ISLANDS} --restarts 999 --logs {folder}/logs --"
    with contextlib.closing(Run(folder / "run", (*SHARDTRAIN, *launch.split()))) as run:
        run.start("--cpu-devices", "1")
        for _ in range(kills):
            count = len(run.seen)
            run.watch(120, lambda count=count: len(run.seen) > count + 20)
            run.watch(CALM_SECONDS + chance.random())
            (*_, last) = (run.folder / "environment.jsonl").read_text().splitlines()
            killed = time.monotonic()
            os.kill(chance.choice(json.loads(last)["ranks"])["pid"], signal.SIGKILL)
            # lines that were written before the kill may still be seen
            run.watch(2.0)
            count = len(run.seen)
            run.watch(120, lambda count=count: len(run.seen) > count + 3)
            found.append(run.longest_pause(killed, time.monotonic()))
    return found


def main(kills: int = 10, goodput_minutes: float | None = None) -> None:
    """Print the table, or the goodput.

    Args:
      kills: number of kills of each side.
      goodput_minutes: length of the time with kills, for goodput. None measures the pauses.
    """
    with TemporaryDirectory() as folder:
        if goodput_minutes is not None:
            print(measure_goodput(goodput_minutes, Path(folder) / "elastic"))
            return
        elastic = measure_elastic(kills, Path(folder) / "elastic")
        restarts = measure_restarts(kills, Path(folder) / "restarts")

    def show(values: list[float]) -> str:
        return f"{median(values):.2f} s, at most {max(values):.2f} s"

    rows = [
        ["a kill: no step for", show(elastic["kill"]), show(restarts)],
        ["a start: until it is a member", show(elastic["join"]), "-"],
        ["a start: no step of the others for", show(elastic["others at a join"]), "-"],
    ]
    print(markdown(["", "islands that come and go", "`launch --restarts`"], rows))


if __name__ == "__main__":
    tyro.cli(main)
