"""Islands with parts of a core: what `shardtrain plan` chooses beside ways that were made by hand.

python benchmarks/pools.py [--batch 12] [--rounds 1]    # as root

One core is measured by `shardtrain calibrate`; an island with a part of it is described as that much slower.
`shardtrain plan --output` writes a strategy and a cluster file, which `shardtrain launch --cluster` trains
unchanged; ways made by hand have strategy files too. Islands compile at full speed; their quotas begin after
`QUOTA_STEP` steps. This file is also the run that is trained. Figures: docs/benchmarks/unequal_islands.md.
"""

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from paired import markdown
from ranks import RunQuota, run_command, text_run

from shardtrain import Hook

PARTS, TIMES = "POOLS_PARTS", "POOLS_TIMES"
"""Environment variables of a run: the part of a core of each island, and the file for its step time."""
QUOTA_STEP, STEPS, MEASURED = 5, 25, 16
CORES = (0.25, 0.25, 0.125, 0.0625)
"""Part of a core of the two fast islands and of two slower ones."""
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
      batch: rows of a batch.
      rounds: runs of each way.
      seed: of the order of runs.
    """

    batch: int = 12
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


def describe_cluster(device: dict[str, float]) -> str:
    """Return the cluster file of the islands, given the rates of a core."""
    texts = ["link_gb_per_second = 0.5\n"]
    for name, count, part in zip(NAMES, (2, 1, 1), CORES[1:], strict=True):
        rates = {key: value * part for key, value in device.items() if key != "kernel_us"}
        rates["kernel_us"] = device["kernel_us"] / part
        inner = ", ".join(f"{key} = {value:.4g}" for key, value in rates.items())
        texts.append(f'[[islands]]\nkind = "{name}"\ncount = {count}\ndevices = 1\ndevice = {{ {inner} }}\n')
    return "\n".join(texts)


def measure_core() -> dict[str, float]:
    """Return the rates of one core, as `shardtrain calibrate` finds them."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    text = run_command("calibrate")
    os.sched_setaffinity(0, cores)
    lines = [line.split(" = ") for line in text.splitlines() if " = " in line]
    names = ("teraflops", "memory_gb_per_second", "kernel_us")
    return {name: float(value) for name, value in lines if name in names}


def train(way: Way, batch: int, folder: Path) -> float:
    """Train in a way and return the seconds of a step."""
    folder.mkdir()
    (folder / "strategy.toml").write_text(way.strategy)
    islands = ["--cluster", way.cluster] if way.cluster else ["--islands", len(way.islands)]
    words = ["--batch", batch, "--strategy", folder / "strategy.toml"]
    parts = ",".join(str(CORES[island]) for island in way.islands)
    times = folder / "run.txt"
    run_command(
        *("launch", *islands, "--logs", folder / "logs", "--", "train", __file__, *words),
        **{PARTS: parts, TIMES: str(times)},
    )
    return float(times.read_text())


def plan(batch: int, cluster: Path, folder: Path) -> tuple[Way, str, float]:
    """Return what the plan chose, its table, and the predicted seconds of a step."""
    strategy = folder / f"planned_{batch}.toml"
    text = run_command("plan", __file__, "--batch", batch, "--cluster", cluster, "--output", strategy)
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
        (cluster := folder / "cluster.toml").write_text(describe_cluster(device))
        chosen, table, predicted = plan(options.batch, cluster, folder)
        print(f"\n{table}\npredicted: {predicted:.4f} s a step", flush=True)
        ways = {"the plan's choice": chosen, **HAND_MADE}
        found: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(options.rounds):
            for key in draw.sample(list(ways), len(ways)):
                own = folder / f"{number}_{list(ways).index(key)}"
                found[key].append(train(ways[key], options.batch, own))
                print(f"{key}: {found[key][-1]:.4f} s a step", flush=True)
    seconds = {key: median(times) for key, times in found.items()}
    best = min(seconds[key] for key in HAND_MADE)
    rows = [
        (key, f"{each:.4f}", f"{each / best:.2f}") for key, each in sorted(seconds.items(), key=itemgetter(1))
    ]
    print(markdown(["way", "s a step", "over the best by hand"], rows))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
