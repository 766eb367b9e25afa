"""Islands with parts of a core: what `shardtrain plan` chooses beside ways that were made by hand.

python benchmarks/pools.py [--batches 24 12] [--parts 0.25 0.25 0.125 0.0625]    # as root

One core is measured by `shardtrain calibrate`; an island with a part of it is described as that much slower.
`shardtrain plan --output` writes a strategy and a cluster file, which `shardtrain launch --cluster` trains
unchanged; ways made by hand have strategy files too. Islands compile at full speed; their quotas begin after
`QUOTA_STEP` steps. This file is also the run that is trained. Figures: docs/benchmarks/unequal_islands.md.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from paired import markdown
from ranks import RunQuota, text_run

from shardtrain import Hook

ROOT = Path(__file__).parents[1]
PARTS, TIMES = "POOLS_PARTS", "POOLS_TIMES"
"""Environment variables of a run: the part of a core of each island, and the file for its step time."""
QUOTA_STEP, STEPS, MEASURED = 5, 25, 16
NAMES = ("fast", "half", "quarter")


def list_hooks() -> Iterator[Hook]:
    """Yield the hooks of a run that is measured; each rank then has its quota."""
    if PARTS in os.environ:
        from shardtrain.islands.rank_environment import find_rank_environment

        found, file = find_rank_environment(os.environ), Path(os.environ[TIMES])
        part = float(os.environ[PARTS].split(",")[found.rank if found else 0])
        yield Hook(on_step=RunQuota(part, file.parent, QUOTA_STEP, STEPS).on_step)
        times: list[float] = []

        def measure(step: int) -> None:
            times.append(time.monotonic())
            if step == STEPS:
                # evaluation and the save are not measured
                file.write_text(str(median(b - a for a, b in pairwise(times[-MEASURED:]))))

        yield Hook(on_step=measure)


run = text_run(
    {"seq": 128, "embed": 256, "num_layers": 4},
    Path(os.environ.get(TIMES, "runs/pools")).with_suffix(""),
    steps=STEPS,
    batch=24,
    evaluate_batches=1,
    hooks=tuple(list_hooks()),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      batches: rows of a batch, each a table.
      parts: part of a core of the two fast islands and of two slower ones.
      link: gigabytes a second between islands, as the plan assumes.
      rounds: runs of each way.
      seed: of the order of runs.
    """

    batches: tuple[int, ...] = (24, 12)
    parts: tuple[float, float, float, float] = (0.25, 0.25, 0.125, 0.0625)
    link: float = 0.5
    rounds: int = 1
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Way:
    """Islands by their numbers, and the strategy file that trains them; None as cluster: no cluster file."""

    islands: tuple[int, ...]
    strategy: str
    cluster: Path | None = None


def pipelines(partitions: int, stages: str, shares: str = "", microbatches: int = 4) -> str:
    """Return the strategy of pipelines."""
    given = f"partitions = {partitions}\n" + (f"shares = [{shares}]\n" if shares else "")
    return (
        f'accumulate = {microbatches}\n[across]\naxis = "pipeline"\n{given}[pipeline]\nstages = "{stages}"\n'
    )


def replicas(shares: str) -> str:
    """Return the strategy of replicas."""
    return f"[across]\nshares = {shares if shares.startswith(chr(34)) else f'[{shares}]'}\n"


HAND_MADE = {
    "a fast island": Way(islands=(0,), strategy=""),
    "2 fast, equal rows": Way(islands=(0, 1), strategy=replicas("1, 1")),
    "2 fast and half, rows 2:2:1": Way(islands=(0, 1, 2), strategy=replicas("2, 2, 1")),
    "all, rows 4:4:2:1": Way(islands=(0, 1, 2, 3), strategy=replicas("4, 4, 2, 1")),
    "all, equal rows": Way(islands=(0, 1, 2, 3), strategy=replicas("1, 1, 1, 1")),
    "2 fast, a pipeline": Way(islands=(0, 1), strategy=pipelines(2, "2,2")),
    "all, node distribution": Way(islands=(0, 1, 2, 3), strategy=pipelines(2, "2,2", "2, 1", 2)),
    "all, equal distribution": Way(islands=(0, 2, 1, 3), strategy=pipelines(2, "3,1", "1, 1", 3)),
}
"""Name -> a way that somebody may write; shares and cuts are by the speeds 4, 4, 2, 1."""


def shardtrain(*words: object, **environment: str) -> str:
    """Run a command and return what it prints.

    Raises:
      SystemExit: it failed.
    """
    command = [sys.executable, "-m", "shardtrain", *map(str, words)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "400", **environment}
    found = subprocess.run(command, env=environ, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}")
    return found.stdout


def describe_cluster(options: Options, device: dict[str, float]) -> str:
    """Return the cluster file of the islands, given the rates of a core."""
    texts = [f"link_gb_per_second = {options.link}\n"]
    for name, count, part in zip(NAMES, (2, 1, 1), options.parts[1:], strict=True):
        rates = {key: value * part for key, value in device.items() if key != "kernel_us"}
        rates["kernel_us"] = device["kernel_us"] / part
        inner = ", ".join(f"{key} = {value:.4g}" for key, value in rates.items())
        texts.append(f'[[islands]]\nkind = "{name}"\ncount = {count}\ndevices = 1\ndevice = {{ {inner} }}\n')
    return "\n".join(texts)


def measure_core() -> dict[str, float]:
    """Return the rates of one core, as `shardtrain calibrate` finds them."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    text = shardtrain("calibrate")
    os.sched_setaffinity(0, cores)
    lines = [line.split(" = ") for line in text.splitlines() if " = " in line]
    names = ("teraflops", "memory_gb_per_second", "kernel_us")
    return {name: float(value) for name, value in lines if name in names}


def train(way: Way, options: Options, batch: int, folder: Path) -> float:
    """Train in a way and return the seconds of a step."""
    folder.mkdir()
    (folder / "strategy.toml").write_text(way.strategy)
    islands = ["--cluster", way.cluster] if way.cluster else ["--islands", len(way.islands)]
    words = ["--batch", batch, "--strategy", folder / "strategy.toml"]
    parts = ",".join(str(options.parts[island]) for island in way.islands)
    times = folder / "run.txt"
    shardtrain(
        *("launch", *islands, "--logs", folder / "logs", "--", "train", __file__, *words),
        **{PARTS: parts, TIMES: str(times)},
    )
    return float(times.read_text())


def plan(options: Options, batch: int, cluster: Path, folder: Path) -> tuple[Way, str, float]:
    """Return what the plan chose, its table, and the predicted seconds of a step."""
    strategy = folder / f"planned_{batch}.toml"
    text = shardtrain("plan", __file__, "--batch", batch, "--cluster", cluster, "--output", strategy)
    written, _, names = text.rpartition("cluster: ")[2].partition(", with islands in this order: ")
    left = {"fast": [0, 1], "half": [2], "quarter": [3]}
    islands = tuple(left[name].pop(0) for name in names.splitlines()[0].split(", "))
    found = strategy.read_text()
    lines = found.partition("[predicted]")[2].strip().splitlines()
    predicted = sum(float(line.split(" = ")[1]) for line in lines if " = " in line)
    table = text[text.index("which islands help") :].partition("\nstrategy:")[0]
    return Way(islands=islands, strategy=found, cluster=Path(written)), table, predicted


def main(options: Options) -> None:
    draw = random.Random(options.seed)
    with TemporaryDirectory() as name:
        folder = Path(name)
        device = measure_core()
        print(f"a core: {device}")
        (cluster := folder / "cluster.toml").write_text(describe_cluster(options, device))
        for batch in options.batches:
            chosen, table, predicted = plan(options, batch, cluster, folder)
            print(f"\nbatch {batch}\n{table}\npredicted: {predicted:.4f} s a step", flush=True)
            ways = {"the plan's choice": chosen, **HAND_MADE}
            found: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(options.rounds):
                for key in draw.sample(list(ways), len(ways)):
                    at = folder / f"{batch}_{number}_{list(ways).index(key)}"
                    found[key].append(train(ways[key], options, batch, at))
                    print(f"{key}: {found[key][-1]:.4f} s a step", flush=True)
            best = min(median(times) for key, times in found.items() if key in HAND_MADE)
            rows = [
                (key, f"{median(times):.4f}", f"{median(times) / best:.2f}")
                for key, times in sorted(found.items(), key=lambda item: median(item[1]))
            ]
            print(markdown(["way", "s a step", "over the best by hand"], rows), flush=True)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
