"""Waves beside other ways to synchronise, on islands that are held up in turns: loss, seconds and staleness.

mpiexec -n 2 python benchmarks/waves.py [--steps 240] [--pause 0.3] [--chance 0.05]
mpiexec -n 4 python benchmarks/waves.py --num-stages 2   # two virtual workers; -n 2: one alone
mpiexec -n 4 python benchmarks/waves.py --num-stages 2 --distances 4 --core 0.4 --rates 1e-3 2e-3 4e-3  # root

Before each step an island pauses with a small chance, which a seed decides for each island and step, so every
way meets the same pauses. Each way trains the same steps ("equal samples"); then the loss of its line at the
seconds that the quickest way took is compared ("equal time"), and the steps and seconds to a target loss.
Seconds count from a tenth of the steps on, where all islands wait for each other once: all have compiled by
then. With stages a virtual worker is a pipeline, flushed after each step or with batches in flight: at a
constant learning rate, and by a rule for late gradients (`make_rate`). Figures: docs/benchmarks/waves.md.
"""

import io
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
from paired import markdown
from ranks import RunQuota, bind, join_ranks, text_run


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      steps: of each run.
      every: steps of a wave, and of local SGD and DiLoCo between merges.
      distances: most clocks that a worker may be ahead of the slowest one, each a way.
      num_stages: islands of a virtual worker.
      microbatches: of a pipeline that is flushed after each step.
      in_flight: batches in flight of one that is not.
      pause: seconds for which an island is held up.
      chance: of being held up before a step.
      core: part of a core of each island, by a quota (root); 1 sets none.
      slow: the last worker has 1 / slow of the time (by a quota) and of the rows of another one.
      batch, seq, embed, num_layers: of the decoder that is trained.
      rates: learning rates, with each of which every way trains.
      anneal: steps in which the rule for late gradients comes to the full rate.
      targets: training losses of a window of lines, to which steps and seconds are counted.
      window: lines over which training losses are averaged.
      seed: of parameters, data and pauses.
    """

    steps: int = 240
    every: int = 4
    distances: tuple[int, ...] = (0, 4, 32)
    num_stages: int = 1
    microbatches: int = 4
    in_flight: int = 4
    pause: float = 0.3
    chance: float = 0.05
    core: float = 1.0
    slow: int = 1
    batch: int = 16
    seq: int = 64
    embed: int = 64
    num_layers: int = 2
    rates: tuple[float, ...] = (2e-3,)
    anneal: int = 100
    targets: tuple[float, ...] = (2.6,)
    window: int = 20
    seed: int = 0

    @property
    def first_step(self) -> int:
        """The step from which on seconds count, at which all islands wait for each other."""
        return max(self.steps // 10, 1)


class Way(NamedTuple):
    """A way to synchronise islands or virtual workers.

    Args:
      synchronisation: of them.
      microbatches: of a step.
      in_flight: batches in flight.
      delay: by which the learning rate is divided at first.
      rate: learning rate.
    """

    synchronisation: Any
    microbatches: int = 1
    in_flight: int = 1
    delay: int = 1
    rate: float = 0.0


class Result(NamedTuple):
    """One way to synchronise.

    Args:
      name: its name.
      heldout: held-out loss after all steps.
      step_seconds: mean seconds of a step, after the first tenth.
      waiting: part of them in which island 0 waited for others.
      staleness: the most steps of another island that were missing in a step, over islands; None: no waves.
      curve: (step, seconds since the first tenth, mean training loss of the last lines), line by line.
    """

    name: str
    heldout: float
    step_seconds: float
    waiting: float
    staleness: int | None
    curve: list[tuple[float, float, float]]


def list_ways(options: Options, num_islands: int) -> dict[str, Way]:
    """Return name -> a way to synchronise so many islands."""
    from shardtrain.combine.synchronisation import Outer, Synchronisation

    local = Synchronisation(on="deltas", every=options.every)
    distances = options.distances if num_islands > options.num_stages else (0,)
    waves = {f"wsp, D = {each}": replace(local, distance=each) for each in distances}
    merged = {"every-step": Synchronisation(), **waves}
    if options.num_stages > 1:
        flight, name_flight = options.in_flight, f"{options.in_flight} in flight"
        ways = {
            **{f"{name}, flushed": Way(each, options.microbatches) for name, each in merged.items()},
            **{f"{name}, {name_flight}": Way(each, 1, flight) for name, each in waves.items()},
            **{f"{name}, {name_flight}, rule": Way(each, 1, flight, flight) for name, each in waves.items()},
        }
    else:
        outer = Outer(learning_rate=0.7, momentum=0.5, nesterov=True)
        merged |= {"local-sgd": local, "diloco": replace(local, outer=outer)}
        ways = {name: Way(each) for name, each in merged.items()}
    return {f"{k}, rate {rate:g}": w._replace(rate=rate) for rate in options.rates for k, w in ways.items()}


def make_rate(way: Way, anneal: int) -> Callable[[Any], Any]:
    """Return the learning rate of each step: it rises for 20 steps, and is divided by the delay at first.

    The divisor is annealed to 1 as in PipeMare (Yang et al. 2021), technique 1: delay ** (1 - step / anneal).
    """
    import jax.numpy as jnp

    def rate(step: Any) -> Any:
        left = 1 - jnp.minimum(step / anneal, 1)
        return way.rate * jnp.minimum(step / 20, 1) / way.delay**left

    return rate


def read_curve(
    lines: list[dict[str, float]], first_step: int, window: int
) -> list[tuple[float, float, float]]:
    """Return (step, seconds since a step, mean training loss of the last `window` steps), line by line.

    >>> lines = [{"step": n, "wall_seconds": 2.0 * n, "train/loss": 4.0 - n} for n in (1, 2, 3)]
    >>> read_curve(lines, first_step=1, window=2)
    [(1, 0.0, 3.0), (2, 2.0, 2.5), (3, 4.0, 1.5)]
    """
    start = next(line["wall_seconds"] for line in lines if line["step"] >= first_step)
    points = [
        (line["step"], line["wall_seconds"], line["train/loss"]) for line in lines if "train/loss" in line
    ]
    return [
        (step, seconds - start, mean(loss for other, _, loss in points if step - window < other <= step))
        for step, seconds, _ in points
        if step >= first_step
    ]


def make_run(
    options: Options, way: Way, num_islands: int, folder: Path, pauses: Any, quota: RunQuota | None
) -> Any:
    """Return the run, whose loss pauses by the options."""
    import jax

    from shardtrain import Hook, Optimizer, Recovery, Schedule, Strategy
    from shardtrain.functional.loss import next_token_loss
    from shardtrain.islands.options import Across
    from shardtrain.pipeline.options import Pipeline

    def loss(apply: Any, batch: Any) -> Any:
        jax.debug.callback(pauses)
        return next_token_loss(apply, batch)

    # the slow worker, the last one, has rows by its speed
    shares = (float(options.slow),) * (num_islands // options.num_stages - 1) + (1.0,)
    across = Across(shares=shares)
    if options.num_stages > 1:
        across = replace(across, axis="pipeline", partitions=options.num_stages)
    return text_run(
        {"seq": options.seq, "embed": options.embed, "num_layers": options.num_layers},
        folder,
        loss=loss,
        optimizer=Optimizer(learning_rate=Schedule(function=make_rate(way, options.anneal))),
        strategy=Strategy(
            synchronisation=way.synchronisation,
            accumulate=way.microbatches,
            across=across,
            pipeline=Pipeline(in_flight=way.in_flight),
        ),
        hooks=(Hook(on_step=quota.on_step),) if quota else (),
        batch=options.batch,
        steps=options.steps,
        seed=options.seed,
        log_every=1,
        recovery=Recovery(fingerprint_every=None),  # islands would wait for each other for them
    )


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
        self._first, self._wait = options.first_step, wait

    def __call__(self) -> None:
        step, microbatch = divmod(self._calls, self._microbatches)
        self._calls += 1
        if microbatch:
            return
        if step + 1 == self._first:
            self._wait()
        if self._held_up[(step + 1) % len(self._held_up)]:
            time.sleep(self._seconds)


def find_staleness(folder: Path, num_islands: int, options: Options, in_flight: int = 1) -> int | None:
    """Return the most steps of another worker that were missing in a step, on any worker, by the events.

    Args:
      folder: of the run.
      num_islands: of all virtual workers.
      options: with the steps of a wave and the islands of a worker.
      in_flight: batches in a worker: as many less one were started before their wave was pulled.
    """
    from shardtrain.trainer.waves import read_wave_log, wave_file

    num_workers = num_islands // options.num_stages
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
    return most * options.every + options.every - 1 + in_flight - 1


def measure(name: str, way: Way, options: Options, islands: Any) -> Result:
    """Train once; the same result on all ranks."""
    from rich.console import Console

    from shardtrain import train
    from shardtrain.report.sinks.json_lines import read_jsonl

    folder = Path(islands.broadcast("folder", mkdtemp() if islands.is_first else None))
    num_islands, island = islands.placement.num_islands, islands.placement.island
    worker, stage = divmod(island, options.num_stages)
    # the loss, and with it the pauses, is computed by the last stage of each worker
    pauses = Pauses(options, worker, way.microbatches, islands.comm.Split(stage).Barrier)
    part = options.core / (options.slow if worker == num_islands // options.num_stages - 1 else 1)
    # rank 0 tells when to all if any has a quota
    is_limited = options.core < 1 or options.slow > 1
    quota = RunQuota(part, folder, options.first_step // 2, options.steps) if is_limited else None
    train(make_run(options, way, num_islands, folder, pauses, quota), Console(file=io.StringIO()), islands)
    islands.all_gather_islands("trained", None)
    found = None
    if islands.is_first:
        lines = read_jsonl(folder / "metrics.jsonl")
        first = options.first_step
        points = read_curve(lines, first, options.window)
        seconds = points[-1][1]
        found = Result(
            name=name,
            heldout=lines[-1]["heldout/loss"],
            step_seconds=seconds / (options.steps - first),
            waiting=sum(line["seconds/islands"] for line in lines if line["step"] > first) / seconds,
            staleness=find_staleness(folder, num_islands, options, way.in_flight),
            curve=points,
        )
        shutil.rmtree(folder)
    return Result(*islands.broadcast("result", found))


def find_target(curve: list[tuple[float, float, float]], target: float) -> tuple[str, str]:
    """Return the steps and seconds to a training loss, empty if the curve does not come to it.

    >>> find_target([(1, 0.0, 3.0), (2, 2.0, 2.5)], 2.6)
    ('2', '2.0')
    """
    return next(((str(step), f"{at:.1f}") for step, at, loss in curve if loss <= target), ("", ""))


def table(results: list[Result], targets: tuple[float, ...]) -> str:
    """Format the results; ratios are to the first."""
    seconds = min(result.curve[-1][1] for result in results)
    # in a short run the first line of a way may be later than the end of the quickest
    losses = [
        next((loss for _, at, loss in each.curve[::-1] if at <= seconds), each.curve[0][2])
        for each in results
    ]
    base = results[0]
    header = ["synchronisation", "held-out loss", "ratio", "s a step", "ratio", "waiting", "staleness"]
    rows = [
        (
            each.name,
            f"{each.heldout:.4f}",
            f"{each.heldout / base.heldout:.4f}",
            f"{each.step_seconds:.4f}",
            f"{each.step_seconds / base.step_seconds:.2f}",
            f"{each.waiting:.0%}",
            "" if each.staleness is None else each.staleness,
            f"{loss:.4f}",
            f"{loss / losses[0]:.4f}",
            *(text for each_target in targets for text in find_target(each.curve, each_target)),
        )
        for each, loss in zip(results, losses, strict=True)
    ]
    header += [f"training loss after {seconds:.0f} s", "ratio"]
    header += [f"{unit} to {target}" for target in targets for unit in ("steps", "s")]
    return markdown(header, rows)


def main(options: Options) -> None:
    bind()
    islands = join_ranks()
    ways = list_ways(options, islands.placement.num_islands)
    results = []
    for name, way in ways.items():
        results.append(measure(name, way, options, islands))
        if islands.is_first:
            reached = [find_target(results[-1].curve, target) for target in options.targets]
            print(name, results[-1].step_seconds, reached, file=sys.stderr, flush=True)
    if islands.is_first:
        print(table(results, options.targets))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
