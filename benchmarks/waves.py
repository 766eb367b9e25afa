"""Waves beside other ways to synchronise, on islands that are held up in turns: loss, seconds and staleness.

mpiexec -n 2 uv run python benchmarks/waves.py [--steps 240] [--pause 0.3] [--chance 0.05]
mpiexec -n 4 uv run python benchmarks/waves.py --num-stages 2   # two virtual workers; -n 2: one alone
mpiexec -n 2 uv run python benchmarks/waves.py --slow 2 --chance 0 --only every-step --results FOLDER  # a row

Before each step an island pauses with a small chance, which a seed decides for each island and step, so every
way meets the same pauses. Each way trains the same steps ("equal samples"); then the loss of its line at the
seconds that the quickest way took is compared ("equal time"; learning rates are constant). Seconds count from
a tenth of the steps on, where all islands wait for each other once: all have compiled by then. With stages a
virtual worker is a pipeline, flushed after each step or with batches in flight. Figures:
docs/benchmarks/waves.md.
"""

import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import mkdtemp
from typing import Any, NamedTuple

import tyro
from cpu_quota import CpuQuota

from shardtrain.islands.binding import bind_cpus
from shardtrain.islands.rank_environment import find_rank_environment

EVERY_STEP = "every-step"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      steps: of each run.
      every: steps of a wave, and of local SGD and DiLoCo between merges.
      num_stages: islands of a virtual worker.
      microbatches: of a pipeline that is flushed after each step.
      in_flight: batches in flight of one that is not.
      pause: seconds for which an island is held up.
      chance: of being held up before a step.
      slow: the islands of the last worker have this part of a core, 1 / slow, by a quota (root), and it has
        that part of the rows of another one.
      batch, seq, embed, num_layers: of the decoder that is trained.
      rate: learning rate.
      window: lines over which training losses are averaged.
      seed: of parameters, data and pauses.
      only: the ways to measure, by name; none: all.
      results: a folder where results are kept: the table has all that are there, so that each row may be a
        run of its own.
    """

    steps: int = 240
    every: int = 4
    num_stages: int = 1
    microbatches: int = 4
    in_flight: int = 4
    pause: float = 0.3
    chance: float = 0.05
    slow: int = 1
    batch: int = 16
    seq: int = 64
    embed: int = 64
    num_layers: int = 2
    rate: float = 2e-3
    window: int = 20
    seed: int = 0
    only: tuple[str, ...] = ()
    results: Path | None = None


class Result(NamedTuple):
    """One way to synchronise.

    Args:
      name: its name.
      heldout: held-out loss after all steps.
      step_seconds: mean seconds of a step, after the first tenth.
      waiting: part of them in which island 0 waited for others.
      staleness: the most steps of another island that were missing in a step, over islands; None: no waves.
      curve: (seconds since the first tenth, mean training loss of the last lines), line by line.
    """

    name: str
    heldout: float
    step_seconds: float
    waiting: float
    staleness: int | None
    curve: list[tuple[float, float]]


class Way(NamedTuple):
    """A way to synchronise.

    Args:
      synchronisation: of islands, or of virtual workers.
      microbatches: of a step.
      in_flight: batches in a pipeline at the same time.
    """

    synchronisation: Any
    microbatches: int = 1
    in_flight: int = 1


def ways(options: Options, num_islands: int) -> dict[str, Way]:
    """Return name -> a way to synchronise so many islands."""
    from shardtrain.combine.synchronisation import Outer, Synchronisation

    local = Synchronisation(on="deltas", every=options.every)
    distances = (0, 4, 32) if num_islands > options.num_stages else (0,)
    waves = {f"wsp, D = {each}": replace(local, distance=each) for each in distances}
    if options.num_stages > 1:
        flushed = {EVERY_STEP: Synchronisation(), **waves}
        return {
            **{f"{name}, flushed": Way(each, options.microbatches) for name, each in flushed.items()},
            **{
                f"{name}, {options.in_flight} in flight": Way(each, 1, options.in_flight)
                for name, each in waves.items()
            },
        }
    outer = Outer(learning_rate=0.7, momentum=0.5, nesterov=True)
    merges = {"local-sgd": local, "diloco": replace(local, outer=outer)}
    return {name: Way(each) for name, each in {EVERY_STEP: Synchronisation(), **waves, **merges}.items()}


def curve(lines: list[dict[str, float]], first_step: int, window: int) -> list[tuple[float, float]]:
    """Return (seconds since a step, mean training loss of the last `window` steps), line by line.

    >>> lines = [{"step": n, "wall_seconds": 2.0 * n, "train/loss": 4.0 - n} for n in (1, 2, 3)]
    >>> curve(lines, first_step=1, window=2)
    [(0.0, 3.0), (2.0, 2.5), (4.0, 1.5)]
    """
    start = next(line["wall_seconds"] for line in lines if line["step"] >= first_step)
    points = [
        (line["step"], line["wall_seconds"], line["train/loss"]) for line in lines if "train/loss" in line
    ]
    return [
        (seconds - start, mean(loss for other, _, loss in points if step - window < other <= step))
        for step, seconds, _ in points
        if step >= first_step
    ]


def loss_after(points: list[tuple[float, float]], seconds: float) -> float:
    """Return the loss of the last line within so many seconds.

    >>> loss_after([(0.0, 3.0), (2.0, 2.5), (4.0, 1.5)], 3.0)
    2.5
    """
    return [loss for at, loss in points if at <= seconds][-1]


def run_of(options: Options, way: Way, num_islands: int, folder: Path, pauses: Any) -> Any:
    """Return the run, of text that every machine with Python has."""
    import jax

    from shardtrain import CheckpointPolicy, Optimizer, Recovery, Run, Schedule, Strategy
    from shardtrain.data import Text
    from shardtrain.functional.loss import next_token_loss
    from shardtrain.islands.options import Across
    from shardtrain.models.decoder import DecoderConfig
    from shardtrain.pipeline.options import Pipeline

    def loss(apply: Any, batch: Any) -> Any:
        jax.debug.callback(pauses)
        return next_token_loss(apply, batch)

    sources = Path(os.__file__).parent
    config = DecoderConfig(
        vocab=256, seq=options.seq, embed=options.embed, num_layers=options.num_layers, num_heads=4
    )
    # the slow worker, the last one, has rows by its speed
    shares = (float(options.slow),) * (num_islands // options.num_stages - 1) + (1.0,)
    across = Across(shares=shares)
    if options.num_stages > 1:
        across = replace(across, axis="pipeline", partitions=options.num_stages)
    strategy = Strategy(
        synchronisation=way.synchronisation,
        accumulate=way.microbatches,
        across=across,
        pipeline=Pipeline(in_flight=way.in_flight),
    )
    return Run(
        model=config,
        data=Text(paths=tuple(sorted(sources.glob("a*.py"))), seq=options.seq),
        loss=loss,
        optimizer=Optimizer(learning_rate=Schedule(name="constant", peak=options.rate, warmup=20)),
        strategy=strategy,
        batch=options.batch,
        steps=options.steps,
        seed=options.seed,
        log_every=1,
        evaluate_every=None,
        recovery=Recovery(fingerprint_every=None),  # islands would meet for them
        checkpoints=CheckpointPolicy(every_steps=None, every_minutes=None),
        sinks=("jsonl",),
        run_dir=folder,
    )


def first_step(options: Options) -> int:
    """Return the step from which on seconds count, at which all islands wait for each other."""
    return max(options.steps // 10, 1)


class Pauses:
    """Called for each microbatch: sleeps at the first one of some steps; seed and worker decide of which.

    Args:
      options: of the pauses.
      worker: whose they are.
      microbatches: of a step.
      wait: called at the first microbatch of the step from which on seconds count.
    """

    def __init__(self, options: Options, worker: int, microbatches: int, wait: Callable[[], None]) -> None:
        import numpy as np

        draws = np.random.default_rng([options.seed, worker]).random(2 * options.steps)
        self._held_up, self._seconds = draws < options.chance, options.pause
        self._calls, self._microbatches = 0, microbatches
        self._first, self._wait = first_step(options), wait

    def __call__(self) -> None:
        step, microbatch = divmod(self._calls, self._microbatches)
        self._calls += 1
        if microbatch:
            return
        if step + 1 == self._first:
            self._wait()
        if self._held_up[(step + 1) % len(self._held_up)]:
            time.sleep(self._seconds)


def staleness(
    folder: Path, num_islands: int, every: int, num_stages: int = 1, in_flight: int = 1
) -> int | None:
    """Return the most steps of another worker that were missing in a step, on any worker, by the events.

    Args:
      folder: of the run.
      num_islands: of all virtual workers.
      every: steps of a wave.
      num_stages: islands of a virtual worker.
      in_flight: batches in it: as many less one were started before their wave was pulled.
    """
    from shardtrain.trainer.waves import read_wave_log, wave_file

    num_workers = num_islands // num_stages
    if num_workers == 1 or not wave_file(folder, 0).is_file():
        return None
    most = 0
    for shard in range(num_islands):
        clocks = [0] * num_workers
        for event in read_wave_log(folder, shard, num_workers):
            if event.kind == "push":
                clocks[event.island] += 1
            else:
                most = max(most, clocks[event.island] - min(clocks))
    return most * every + every - 1 + in_flight - 1


def measure(name: str, way: Way, options: Options, islands: Any) -> Result:
    """Train once; the same result on all ranks."""
    from rich.console import Console

    from shardtrain import train
    from shardtrain.report.sinks.json_lines import read_jsonl

    folder = Path(islands.broadcast("folder", mkdtemp() if islands.is_first else None))
    num_islands = islands.seat.num_islands
    worker = islands.seat.island // options.num_stages
    # the loss, and with it the pauses, is computed by the last stage of each worker
    comm = islands.comm.Split(islands.seat.island % options.num_stages)
    pauses = Pauses(options, worker, way.microbatches, comm.Barrier)
    quota = CpuQuota(1 / options.slow)
    if options.slow > 1 and worker == num_islands // options.num_stages - 1:
        quota.begin()
    train(run_of(options, way, num_islands, folder, pauses), Console(file=io.StringIO()), islands)
    quota.end()
    islands.all_gather_islands("trained", None)
    found = None
    if islands.is_first:
        lines = read_jsonl(folder / "metrics.jsonl")
        first = first_step(options)
        points = curve(lines, first, options.window)
        timed = [line for line in lines if line["step"] > first]
        waited = sum(line["seconds/islands"] for line in timed)
        found = Result(
            name=name,
            heldout=lines[-1]["heldout/loss"],
            step_seconds=points[-1][0] / (options.steps - first),
            waiting=waited / points[-1][0],
            staleness=staleness(folder, num_islands, options.every, options.num_stages, way.in_flight),
            curve=points,
        )
        shutil.rmtree(folder)
    return Result(*islands.broadcast("result", found))


def kept(folder: Path, results: dict[str, Result]) -> dict[str, Result]:
    """Write results to a folder, and return all that are there, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    return {path.stem: Result(*json.loads(path.read_text())) for path in folder.glob("*.json")}


def table(results: list[Result]) -> str:
    """Format the results; ratios are to the first."""
    seconds = min(result.curve[-1][0] for result in results)
    base = results[0]
    base_loss = loss_after(base.curve, seconds)
    lines = [
        "| synchronisation | held-out loss | ratio | s a step | ratio | waiting | staleness"
        f" | training loss after {seconds:.0f} s | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in results:
        loss = loss_after(each.curve, seconds)
        lines.append(
            f"| {each.name} | {each.heldout:.4f} | {each.heldout / base.heldout:.4f}"
            f" | {each.step_seconds:.4f} | {each.step_seconds / base.step_seconds:.2f} | {each.waiting:.0%}"
            f" | {'' if each.staleness is None else each.staleness} | {loss:.4f} | {loss / base_loss:.4f} |"
        )
    return "\n".join(lines)


def main(options: Options) -> None:
    # as `launch` does: a rank has cores of its own, where there are enough
    if cores := bind_cpus(find_rank_environment(os.environ)):
        os.sched_setaffinity(0, cores)
    from shardtrain.islands.membership import join

    islands = join()
    if islands is None:
        sys.exit("start it on several ranks: mpiexec -n 2 uv run python benchmarks/waves.py")
    found = ways(options, islands.seat.num_islands)
    if unknown := [name for name in options.only if name not in found]:
        sys.exit(f"no way is named {', '.join(unknown)}; there are {', '.join(found)}")
    chosen = options.only or found
    results = {name: measure(name, found[name], options, islands) for name in chosen}
    if islands.is_first:
        if options.results is not None:
            results = kept(options.results, results)
        print(table([results[name] for name in found if name in results]))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
