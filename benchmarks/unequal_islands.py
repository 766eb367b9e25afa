"""Islands with parts of a core: rows of the batch by measured speed, and what `shardtrain plan` chooses.

python benchmarks/unequal_islands.py [--slow 2] [--steps 80] [--change]    # as root
python benchmarks/unequal_islands.py --plan [--rounds 1]                   # as root

Two islands train with equal shares and with `--shares auto`, in another order in each round; the second one
has one `slow`-th of its core. With --change the first is the slow one from the middle of each run on. With
--plan there are four islands, and one core is measured by `shardtrain calibrate`: the plan's strategy is
trained unchanged, beside ways made by hand. Islands compile at full speed; their quotas begin after
`QUOTA_STEP` steps. This file is also the run. Figures: docs/benchmarks/unequal_islands.md.
"""

import os
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp
from typing import NamedTuple

import tyro
from paired import markdown, take_turns
from ranks import read_seconds, run_command, text_run, train

from shardtrain import Run

EQUAL, AUTO = "equal shares", "--shares auto"
CHANGED = "rows of the islands from now on: "
"""Begins the text that a run prints when rows change."""

QUOTA_STEP, MEASURED, BATCH = 5, 16, 32
"""The step after which quotas begin, the last steps, which are timed, and rows of a batch."""
PLANNED_STEPS, PLANNED_BATCH = 25, 12
CORES = (0.25, 0.25, 0.125, 0.0625)
"""Part of a core of the islands of a plan: two fast ones and two slower ones."""
NAMES = ("fast", "half", "quarter")


def run() -> Run:
    """Return the run."""
    return text_run(128, 256, 4, batch=24, evaluate_batches=1)


class Result(NamedTuple):
    """One run with shares.

    Args:
      step_seconds: of a step, the median of the last ones.
      speed: rows per second of all islands together, if none waited.
      rows: of each island at the end.
      changed: steps after which the rows changed.
      loss: the mean of the last line of metrics.
    """

    step_seconds: float
    speed: float
    rows: list[int]
    changed: list[int]
    loss: float


def measure_shares(shares: str, batch: int, steps: int, part: float, change: bool, root: Path) -> Result:
    """Train once with shares, the second island with a part of a core, and return what it took."""
    half = steps // 2
    first = (part if change else 1.0, half, steps)
    slow = (part, QUOTA_STEP, half if change else steps)
    folder, model = Path(mkdtemp(dir=root)), ("--model.embed", 128, "--model.num-layers", 2)
    words = (*model, "--steps", steps, "--batch", batch, "--shares", shares)
    printed, lines = train(__file__, folder, *words, launch=("--islands", 2), quotas=(first, slow))
    changes = [line for line in printed.splitlines() if CHANGED in line]
    rows = [batch // 2] * 2
    if changes:
        rows = [int(n) for n in changes[-1].partition(CHANGED)[2].partition(";")[0].split(", ")]
    # a line right after a change of the rows has none
    names = sorted({name for line in lines[-3:] for name in line if name.startswith("own_seconds/")})
    own = [median(line[name] for line in lines[-3:] if name in line) for name in names]
    speed = sum(n / x for n, x in zip(rows, own, strict=True))
    changed = [int(line.partition("after step ")[2].partition(":")[0]) for line in changes]
    return Result(read_seconds(folder / "times", MEASURED), speed, rows, changed, lines[-1]["train/loss"])


def table(batch: int, found: dict[str, list[Result]]) -> str:
    """Format the runs; ratios are of runs next to each other.

    The ideal is what the islands compute together in a second if none waits, in the run with equal shares.
    """
    rows = [
        (name, f"{run.step_seconds:.4f}", *(", ".join(map(str, x)) for x in run[2:4]), f"{run.loss:.5f}")
        for name, runs in found.items()
        for run in runs
    ]
    text = markdown(["", "s a step", "rows", "changed after steps", "loss"], rows) + "\n"
    pairs = list(zip(found[EQUAL], found[AUTO], strict=True))
    shown = {
        "equal shares / auto": [a.step_seconds / b.step_seconds for a, b in pairs],
        "auto / ideal": [b.step_seconds * a.speed / batch for a, b in pairs],
    }
    for name, each in shown.items():
        text += f"\n{name}: {median(each):.2f} ({', '.join(f'{x:.2f}' for x in each)})"
    return text


class Way(NamedTuple):
    """Islands by their numbers, the options that train them, and their cluster file, if there is one."""

    islands: tuple[int, ...]
    options: str
    cluster: Path | None = None


PIPELINE = "--across pipeline --partitions 2"
HAND_MADE = {
    "a fast island": Way((0,), ""),
    "2 fast, equal rows": Way((0, 1), "--shares 1,1"),
    "2 fast and half, rows 2:2:1": Way((0, 1, 2), "--shares 2,2,1"),
    "all, rows 4:4:2:1": Way((0, 1, 2, 3), "--shares 4,4,2,1"),
    "all, equal rows": Way((0, 1, 2, 3), "--shares 1,1,1,1"),
    "2 fast, a pipeline": Way((0, 1), f"{PIPELINE} --stages 2,2 --accumulate 4"),
    "all, node distribution": Way((0, 1, 2, 3), f"{PIPELINE} --stages 2,2 --accumulate 2 --shares 2,1"),
    "all, equal distribution": Way((0, 2, 1, 3), f"{PIPELINE} --stages 3,1 --accumulate 3 --shares 1,1"),
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
    text = run_command("calibrate", before=("taskset", "-c", str(min(os.sched_getaffinity(0)))))
    lines = [line.split(" = ") for line in text.splitlines() if " = " in line]
    names = ("teraflops", "memory_gb_per_second", "kernel_us")
    return {name: float(value) for name, value in lines if name in names}


def measure_way(way: Way, root: Path) -> float:
    """Train in a way and return the seconds of a step."""
    folder = Path(mkdtemp(dir=root))
    quotas = [(CORES[island], QUOTA_STEP, PLANNED_STEPS) for island in way.islands]
    words = ("--batch", PLANNED_BATCH, "--steps", PLANNED_STEPS, *way.options.split())
    launch = ("--cluster", way.cluster) if way.cluster else ("--islands", len(quotas))
    train(__file__, folder, *words, launch=launch, quotas=quotas)
    return read_seconds(folder / "times", MEASURED)


def make_plan(folder: Path) -> Way:
    """Return what the plan chose; print its table and the predicted seconds of a step."""
    (cluster := folder / "cluster.toml").write_text(describe_cluster(measure_core()))
    strategy, words = folder / "planned.toml", ("plan", __file__, "--batch", PLANNED_BATCH)
    text = run_command(*words, "--cluster", cluster, "--output", strategy)
    written, _, names = text.rpartition("cluster: ")[2].partition(", with islands in this order: ")
    left = {"fast": [0, 1], "half": [2], "quarter": [3]}
    islands = tuple(left[name].pop(0) for name in names.splitlines()[0].split(", "))
    lines = strategy.read_text().partition("[predicted]")[2].strip().splitlines()
    predicted = sum(float(line.split(" = ")[1]) for line in lines if " = " in line)
    print(text[text.index("which islands help") :].partition("\nstrategy:")[0])
    print(f"predicted: {predicted:.4f} s a step", flush=True)
    return Way(islands, f"--strategy {strategy}", Path(written))


def main(plan: bool = False, slow: int = 2, change: bool = False, rounds: int = 3, steps: int = 80) -> None:
    """Print the table of shares, or of what a plan chooses.

    Args:
      plan: what a plan chooses, instead of shares.
      slow: the second island has this part of its core: 1 / slow; 1 slows nobody.
      change: slow the first island instead, from the middle of each run on.
      rounds: runs of each way.
      steps: of each run with shares.
    """
    with TemporaryDirectory() as name:
        root = Path(name)
        if not plan:
            given = (BATCH, steps, 1 / slow, change, root)
            ways = {EQUAL: "1,1", AUTO: "auto"}
            calls = {way: partial(measure_shares, each, *given) for way, each in ways.items()}
            print(table(BATCH, take_turns(calls, rounds, 0)))
            return
        chosen = {"the plan's choice": make_plan(root), **HAND_MADE}
        sides = {way: partial(measure_way, each, root) for way, each in chosen.items()}
        found = take_turns(sides, rounds, 0)
    seconds = {way: median(times) for way, times in found.items()}
    best = min(seconds[way] for way in HAND_MADE)
    rows = [
        (way, f"{each:.4f}", f"{each / best:.2f}") for way, each in sorted(seconds.items(), key=itemgetter(1))
    ]
    print(markdown(["way", "s a step", "over the best by hand"], rows))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
