"""Islands of unequal speed: rows of the batch by measured speed beside equal rows, in one run.

mpiexec -n 2 python benchmarks/unequal_islands.py [--slow 2] [--steps 80] [--change]    # as root

Every rank keeps to one core. The last one gets one `slow`-th of it, by a quota of a control group. The same
run is trained with equal shares and with `--shares auto`, in another order in each round. With --change rank
0 is the slow one from the middle of each run on. Figures: docs/benchmarks/unequal_islands.md.
"""

import io
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any, NamedTuple

import tyro
from paired import markdown
from ranks import CpuQuota, bind, join_ranks, text_run

EQUAL, AUTO = "equal shares", "--shares auto"
CHANGED = "rows of the islands from now on: "
"""Begins the text that a run prints when rows change."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      slow: the last island has this part of its core: 1 / slow; 1 slows nobody.
      change: slow the first island instead, from the middle of each run on.
      rounds: runs of each way.
      steps: of each run.
      measured: the last steps of a run, whose seconds are taken; lines of metrics are for 10 steps each.
      batch, seq, embed, num_layers: of the decoder that is trained.
      seed: of parameters and data.
    """

    slow: int = 2
    change: bool = False
    rounds: int = 3
    steps: int = 80
    measured: int = 30
    batch: int = 32
    seq: int = 128
    embed: int = 128
    num_layers: int = 2
    seed: int = 0


class Result(NamedTuple):
    """One run.

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


def measure(options: Options, shares: Any, islands: Any) -> Result:
    """Train once, under load, and return what it took; the same on all ranks.

    Raises:
      SystemExit: the run was stopped before its last step, so nothing was measured.
    """
    from rich.console import Console

    from shardtrain import Hook, Strategy, train
    from shardtrain.islands.options import Across

    rank, last = islands.environment.rank, islands.environment.size - 1
    folder = Path(islands.broadcast("folder", mkdtemp() if islands.is_first else None))
    quota = CpuQuota(1 / options.slow)
    begin = quota.begin if options.slow > 1 else lambda: None
    if rank == last:
        begin()
    printed, times = io.StringIO(), list[float]()
    run = text_run(
        {"seq": options.seq, "embed": options.embed, "num_layers": options.num_layers},
        folder,
        strategy=Strategy(across=Across(shares=shares)),
        batch=options.batch,
        steps=options.steps,
        seed=options.seed,
        evaluate_batches=1,
        hooks=(Hook(on_step=lambda step: times.append(time.monotonic())),),
    )
    done = threading.Event()
    move = {0: begin, last: quota.end}.get(rank) if options.change else None
    mover = threading.Thread(target=move_load, args=(run, move, done))
    mover.start()
    trained = train(run, Console(file=printed, width=200), islands)
    done.set()
    mover.join()
    quota.end()
    if trained.step < options.steps:
        sys.exit(f"stopped after step {trained.step} of {options.steps}, so nothing was measured")
    found = None
    if islands.is_first:
        found = read_result(options, shares, last + 1, folder, printed.getvalue(), times)
        shutil.rmtree(folder)
    return Result(*islands.broadcast("result", found))


def move_load(run: Any, move: Callable[[], None] | None, done: threading.Event) -> None:
    """Call a function when half of a run's steps are in its metrics."""
    metrics = run.run_dir / "metrics.jsonl"
    while move is not None and not done.wait(0.02):
        lines = metrics.read_text().count("\n") if metrics.is_file() else 0
        if lines * run.log_every >= run.steps // 2:
            return move()
    return None


def read_result(
    options: Options, shares: Any, num_islands: int, folder: Path, printed: str, times: list[float]
) -> Result:
    """Return the figures of a run from its folder, what it printed and when its steps ended."""
    from shardtrain.report.sinks.json_lines import read_jsonl

    lines = read_jsonl(folder / "metrics.jsonl")
    end = options.steps - 5
    begin = end - options.measured
    changes = [line for line in printed.splitlines() if CHANGED in line]
    weights = (1.0,) * num_islands if shares == "auto" else shares
    rows = [round(options.batch * weight / sum(weights)) for weight in weights]
    if changes:
        words = changes[-1].partition(f": {CHANGED}")[2].partition(";")[0]
        rows = [int(word) for word in words.split(", ")]
    late = [line for line in lines if begin < line["step"] <= end]
    # a line right after a change of the rows has none
    names = sorted({name for line in late for name in line if name.startswith("own_seconds/")})
    own = [median(line[name] for line in late if name in line) for name in names]
    return Result(
        # a median: each process pauses once or twice in a run, for up to 1.5 s
        step_seconds=median(b - a for a, b in pairwise(times[begin:end])),
        speed=sum(n / x for n, x in zip(rows, own, strict=True)),
        rows=rows,
        changed=[int(line.partition("after step ")[2].partition(":")[0]) for line in changes],
        loss=lines[-1]["train/loss"],
    )


def table(options: Options, found: dict[str, list[Result]]) -> str:
    """Format the runs; ratios are of runs next to each other.

    The ideal is what the islands compute together in a second if none waits, in the run with equal shares.
    """
    rows = [
        (
            name,
            f"{run.step_seconds:.4f}",
            *(", ".join(map(str, x)) for x in (run.rows, run.changed)),
            f"{run.loss:.5f}",
        )
        for name, runs in found.items()
        for run in runs
    ]
    text = markdown(["", "s a step", "rows", "changed after steps", "loss"], rows) + "\n"
    pairs = list(zip(found[EQUAL], found[AUTO], strict=True))
    shown = {
        "equal shares / auto": [a.step_seconds / b.step_seconds for a, b in pairs],
        "auto / ideal": [b.step_seconds * a.speed / options.batch for a, b in pairs],
    }
    for name, each in shown.items():
        text += f"\n{name}: {median(each):.2f} ({', '.join(f'{x:.2f}' for x in each)})"
    return text


def main(options: Options) -> None:
    bind(one_core=True)
    islands = join_ranks()
    ways: dict[str, Any] = {EQUAL: (1.0,) * islands.environment.size, AUTO: "auto"}
    found: dict[str, list[Result]] = {name: [] for name in ways}
    # the first run of a process takes up to a tenth longer, so it is not counted
    measure(options, ways[EQUAL], islands)
    draw = random.Random(options.seed)
    for _ in range(options.rounds):
        for name in draw.sample(list(ways), len(ways)):
            found[name].append(measure(options, ways[name], islands))
    if islands.is_first:
        print(table(options, found))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
