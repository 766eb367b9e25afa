"""Islands of unequal speed: shares of the batch by measured speed beside equal shares, in one run.

mpiexec -n 2 uv run python benchmarks/unequal_islands.py [--slow 2] [--steps 80] [--change] [--by processes]

Every rank keeps to one core. The last one gets one `slow`-th of it: by a quota of a control group, which
needs root, or by `slow` - 1 other processes that compute on it for ever. The same run is trained with equal
shares and with `--shares auto`, in another order in each round. With --change rank 0 is the slow one from the
middle of each run on. With --splits 26,6 27,5 these fixed rows are tried beside them: the best split shows
what no shares can save.
Figures: docs/benchmarks/unequal_islands.md.
"""

import io
import multiprocessing
import os
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
from typing import Any, Literal, NamedTuple

import tyro
from cpu_quota import CpuQuota

from shardtrain.islands.binding import bind_cpus
from shardtrain.islands.rank_environment import find_rank_environment

EQUAL, AUTO, FIXED = "equal shares", "--shares auto", "rows "

CHANGED = "rows of the islands from now on: "
"""Begins the text that a run prints, see `row_shares.RowShares.add`."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      slow: the last island has this part of its core: 1 / slow.
      change: slow the first island instead, from the middle of each run on.
      by: a quota of processor time (a control group: root), or other processes on the same core.
      splits: rows of the islands that are kept through a run of their own, each as 26,6.
      rounds: runs of each way.
      steps: of each run.
      measured: the last steps of a run, whose seconds are taken; lines of metrics are for 10 steps each.
      batch, seq, embed, num_layers: of the decoder that is trained.
      seed: of parameters and data.
    """

    slow: int = 2
    change: bool = False
    by: Literal["quota", "processes"] = "quota"
    splits: tuple[str, ...] = ()
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


def compute_for_ever(core: int) -> None:
    """Take as much of a core as the scheduler gives."""
    os.sched_setaffinity(0, {core})
    while True:
        sum(range(10_000))


class Load:
    """Other processes on the core of a rank."""

    def __init__(self, number: int) -> None:
        self._context, self._number = multiprocessing.get_context("spawn"), number
        self._processes: list[Any] = []

    def begin(self, core: int) -> None:
        """Start them, where a core has to be shared."""
        self._processes = [
            self._context.Process(target=compute_for_ever, args=(core,), daemon=True)
            for _ in range(self._number)
        ]
        for process in self._processes:
            process.start()

    def end(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []


def make_run(options: Options, shares: Any, folder: Path, on_step: Callable[[int], None]) -> Any:
    """Return the run, of text that every machine with Python has; lines of metrics are as rare as usual."""
    from shardtrain import CheckpointPolicy, Hook, Run, Strategy
    from shardtrain.data import Text
    from shardtrain.islands.options import Across
    from shardtrain.models.decoder import DecoderConfig

    sources = Path(os.__file__).parent
    return Run(
        model=DecoderConfig(
            vocab=256, seq=options.seq, embed=options.embed, num_layers=options.num_layers, num_heads=4
        ),
        data=Text(paths=tuple(sorted(sources.glob("a*.py"))), seq=options.seq),
        strategy=Strategy(across=Across(shares=shares)),
        batch=options.batch,
        steps=options.steps,
        seed=options.seed,
        evaluate_every=None,
        evaluate_batches=1,
        checkpoints=CheckpointPolicy(every_minutes=None),
        sinks=("jsonl",),
        run_dir=folder,
        hooks=(Hook(on_step=on_step),),
    )


def cut_off(shares: Any, step: int, steps: int) -> str | None:
    """Return why a run says nothing of its speed: a signal ended it before its last step; None: none did."""
    if step == steps:
        return None
    return f"the run with shares {shares} was stopped after step {step} of {steps}, so nothing was measured"


def measure(options: Options, shares: Any, islands: Any, load: Load | CpuQuota) -> Result:
    """Train once, under load, and return what it took; the same folder on all ranks."""
    from rich.console import Console

    from shardtrain import train
    from shardtrain.report.sinks.json_lines import read_jsonl

    rank, last = islands.environment.rank, islands.environment.size - 1
    folder = Path(islands.broadcast("folder", mkdtemp() if islands.is_first else None))
    core = min(os.sched_getaffinity(0))
    if rank == last:
        load.begin(core)
    printed, times = io.StringIO(), list[float]()
    run = make_run(options, shares, folder, lambda step: times.append(time.monotonic()))
    done = threading.Event()

    def change() -> None:
        """Move the load when half of the steps are done."""
        metrics = folder / "metrics.jsonl"
        while not done.is_set():
            lines = metrics.read_text().count("\n") if metrics.is_file() else 0
            if lines * run.log_every >= options.steps // 2:
                (load.end if rank == last else lambda: load.begin(core))()
                return
            time.sleep(0.02)

    mover = threading.Thread(target=change) if options.change and rank in (0, last) else None
    if mover:
        mover.start()
    trained = train(run, Console(file=printed, width=200), islands)
    done.set()
    if mover:
        mover.join()
    load.end()
    if problem := cut_off(shares, trained.step, options.steps):
        sys.exit(problem if islands.is_first else 1)
    found = None
    if islands.is_first:
        lines = read_jsonl(folder / "metrics.jsonl")
        end = options.steps - 5
        begin = end - options.measured
        late = [line for line in lines if begin < line["step"] <= end]
        changes = [line for line in printed.getvalue().splitlines() if CHANGED in line]
        sys.stderr.write("".join(f"{line.strip()}\n" for line in changes))
        weights = (1.0,) * (last + 1) if shares == "auto" else shares
        rows = [round(options.batch * weight / sum(weights)) for weight in weights]
        if changes:
            words = changes[-1].partition(f": {CHANGED}")[2].partition(";")[0]
            rows = [int(word) for word in words.split(", ")]
        # a line right after a change of the rows has none
        names = sorted({name for line in late for name in line if name.startswith("own_seconds/")})
        own = [median(line[name] for line in late if name in line) for name in names]
        found = Result(
            # a median: each process pauses once or twice in a run, for up to 1.5 s
            step_seconds=median(b - a for a, b in pairwise(times[begin:end])),
            speed=sum(n / x for n, x in zip(rows, own, strict=True)),
            rows=rows,
            changed=[int(line.partition("after step ")[2].partition(":")[0]) for line in changes],
            loss=lines[-1]["train/loss"],
        )
        shutil.rmtree(folder)
    return islands.broadcast("result", found)


def table(options: Options, found: dict[str, list[Any]]) -> str:
    """Format the runs; ratios are of runs next to each other."""
    results = {name: [Result(*run) for run in runs] for name, runs in found.items()}
    ratios, above, waited = [], [], []
    for equal, auto in zip(results[EQUAL], results[AUTO], strict=True):
        ratios.append(equal.step_seconds / auto.step_seconds)
        # what the islands compute together in a second if none waits, measured in the run with equal shares
        above.append(auto.step_seconds / (options.batch / equal.speed))
        # the same of the run itself: what is waited and exchanged in it, however fast the machine was by then
        waited.append(auto.step_seconds / (options.batch / auto.speed))
    lines = ["| | s a step | rows | changed after steps | loss |", "|---|--:|---|---|--:|"]
    for name, runs in results.items():
        for run in runs:
            rows, changed = (", ".join(map(str, each)) for each in (run.rows, run.changed))
            lines.append(f"| {name} | {run.step_seconds:.4f} | {rows} | {changed} | {run.loss:.5f} |")
    lines += ["", f"equal shares / auto: {_spread(ratios)}", f"auto / ideal: {_spread(above)}"]
    lines += [f"auto / ideal of the same run: {_spread(waited)}"]
    fixed = {name: [run.step_seconds for run in results[name]] for name in results if name.startswith(FIXED)}
    if fixed:
        best = min(fixed, key=lambda name: median(fixed[name]))
        beside = [auto.step_seconds / x for auto, x in zip(results[AUTO], fixed[best], strict=True)]
        ideal = [options.batch / equal.speed for equal in results[EQUAL]]
        over = [x / seconds for x, seconds in zip(fixed[best], ideal, strict=True)]
        lines += [f"auto / best of the fixed splits ({best}): {_spread(beside)}"]
        lines += [f"best of the fixed splits / ideal: {_spread(over)}"]
    return "\n".join(lines)


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({', '.join(f'{x:.2f}' for x in ratios)})"


def main(options: Options) -> None:
    if cores := bind_cpus(find_rank_environment(os.environ)):
        os.sched_setaffinity(0, {min(cores)})
    from shardtrain.islands.membership import join

    islands = join()
    if islands is None:
        sys.exit("start it on several ranks: mpiexec -n 2 uv run python benchmarks/unequal_islands.py")
    load = CpuQuota(1 / options.slow) if options.by == "quota" else Load(options.slow - 1)
    ways: dict[str, Any] = {EQUAL: (1.0,) * islands.environment.size, AUTO: "auto"}
    ways |= {f"{FIXED}{rows}": tuple(map(float, rows.split(","))) for rows in options.splits}
    found: dict[str, list[Any]] = {name: [] for name in ways}
    # the first run of a process takes up to a tenth longer, so it is not counted
    measure(options, ways[EQUAL], islands, load)
    draw = random.Random(options.seed)
    for _ in range(options.rounds):
        for name in draw.sample(list(ways), len(ways)):
            found[name].append(measure(options, ways[name], islands, load))
    if islands.is_first:
        print(table(options, found))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
