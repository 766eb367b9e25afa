"""Waves beside other ways to synchronise, on islands that are held up in turns: loss, seconds and staleness.

mpiexec -n 2 python benchmarks/waves.py [--steps 240] [--pause 0.3] [--chance 0.05]
mpiexec -n 2 python benchmarks/waves.py --slow 2 --chance 0   # as root

Before each step an island pauses with a small chance, which a seed decides for each island and step, so every
way meets the same pauses. Each way trains the same steps ("equal samples"); then the loss of its line at the
seconds that the quickest way took is compared ("equal time"). Seconds count from a tenth of the steps on,
where all islands wait for each other once: all have compiled by then. Figures: docs/benchmarks/waves.md.
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
      distances: most clocks that an island may be ahead of the slowest one, each a way.
      pause: seconds for which an island is held up.
      chance: of being held up before a step.
      slow: the last island has 1 / slow of the time (by a quota: root) and of the rows of another one.
      batch, seq, embed, num_layers: of the decoder that is trained.
      rate: learning rate, after 20 steps of warmup.
      seed: of parameters, data and pauses.
    """

    steps: int = 240
    every: int = 4
    distances: tuple[int, ...] = (0, 4, 32)
    pause: float = 0.3
    chance: float = 0.05
    slow: int = 1
    batch: int = 16
    seq: int = 64
    embed: int = 64
    num_layers: int = 2
    rate: float = 2e-3
    seed: int = 0

    @property
    def first_step(self) -> int:
        """The step from which on seconds count, at which all islands wait for each other."""
        return max(self.steps // 10, 1)


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


def list_ways(options: Options) -> dict[str, Any]:
    """Return name -> a way to synchronise islands."""
    from shardtrain.combine.synchronisation import Outer, Synchronisation

    local = Synchronisation(on="deltas", every=options.every)
    outer = Outer(learning_rate=0.7, momentum=0.5, nesterov=True)
    return {
        "every-step": Synchronisation(),
        **{f"waves, D = {each}": replace(local, distance=each) for each in options.distances},
        "local-sgd": local,
        "diloco": replace(local, outer=outer),
    }


def read_curve(lines: list[dict[str, float]], first_step: int, window: int = 20) -> list[tuple[float, float]]:
    """Return (seconds since a step, mean training loss of the last `window` steps), line by line.

    >>> lines = [{"step": n, "wall_seconds": 2.0 * n, "train/loss": 4.0 - n} for n in (1, 2, 3)]
    >>> read_curve(lines, first_step=1, window=2)
    [(0.0, 3.0), (2.0, 2.5), (4.0, 1.5)]
    """
    start = next(line["wall_seconds"] for line in lines if line["step"] >= first_step)
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    return [
        (line["wall_seconds"] - start, mean(loss for n, loss in losses.items() if step - window < n <= step))
        for line in lines
        if (step := line["step"]) in losses and step >= first_step
    ]


def make_run(
    options: Options, way: Any, num_islands: int, folder: Path, pauses: Any, quota: RunQuota | None
) -> Any:
    """Return the run, whose loss pauses by the options."""
    import jax

    from shardtrain import Hook, Optimizer, Recovery, Schedule, Strategy
    from shardtrain.functional.loss import next_token_loss
    from shardtrain.islands.options import Across

    def loss(apply: Any, batch: Any) -> Any:
        jax.debug.callback(pauses)
        return next_token_loss(apply, batch)

    # the slow island, the last one, has rows by its speed
    across = Across(shares=(float(options.slow),) * (num_islands - 1) + (1.0,))
    return text_run(
        {"seq": options.seq, "embed": options.embed, "num_layers": options.num_layers},
        folder,
        loss=loss,
        optimizer=Optimizer(learning_rate=Schedule(name="constant", peak=options.rate, warmup=20)),
        strategy=Strategy(synchronisation=way, across=across),
        hooks=(Hook(on_step=quota.on_step),) if quota else (),
        batch=options.batch,
        steps=options.steps,
        seed=options.seed,
        log_every=1,
        recovery=Recovery(fingerprint_every=None),  # islands would wait for each other for them
    )


class Pauses:
    """Called in each step: sleeps in some of them; seed and island decide in which.

    Args:
      options: of the pauses.
      island: whose they are.
      wait: called in the step from which on seconds count.
    """

    def __init__(self, options: Options, island: int, wait: Callable[[], None]) -> None:
        import numpy as np

        draws = np.random.default_rng([options.seed, island]).random(2 * options.steps)
        self._held_up, self._seconds = draws < options.chance, options.pause
        self._step, self._first, self._wait = 0, options.first_step, wait

    def __call__(self) -> None:
        self._step += 1
        if self._step == self._first:
            self._wait()
        if self._held_up[self._step % len(self._held_up)]:
            time.sleep(self._seconds)


def find_staleness(folder: Path, num_islands: int, every: int) -> int | None:
    """Return the most steps of another island that were missing in a step, on any island, by the events.

    Args:
      folder: of the run.
      num_islands: number of islands.
      every: steps of a wave.
    """
    from shardtrain.trainer.waves import read_wave_log, wave_file

    if not wave_file(folder, 0).is_file():
        return None
    most = 0
    for shard in range(num_islands):
        clocks = [0] * num_islands
        for event in read_wave_log(folder, shard, num_islands):
            if event.kind == "push":
                clocks[event.island] += 1
            else:
                most = max(most, clocks[event.island] - min(clocks))
    return most * every + every - 1


def measure(name: str, way: Any, options: Options, islands: Any) -> Result:
    """Train once; the same result on all ranks."""
    from rich.console import Console

    from shardtrain import train
    from shardtrain.report.sinks.json_lines import read_jsonl

    folder = Path(islands.broadcast("folder", mkdtemp() if islands.is_first else None))
    num_islands, island = islands.placement.num_islands, islands.placement.island
    pauses = Pauses(options, island, islands.comm.Barrier)
    part = 1 / options.slow if island == num_islands - 1 else 1.0
    # rank 0 tells when to all if any has a quota
    quota = RunQuota(part, folder, options.first_step // 2, options.steps) if options.slow > 1 else None
    train(make_run(options, way, num_islands, folder, pauses, quota), Console(file=io.StringIO()), islands)
    islands.all_gather_islands("trained", None)
    found = None
    if islands.is_first:
        lines = read_jsonl(folder / "metrics.jsonl")
        first = options.first_step
        points = read_curve(lines, first)
        seconds, _ = points[-1]
        found = Result(
            name=name,
            heldout=lines[-1]["heldout/loss"],
            step_seconds=seconds / (options.steps - first),
            waiting=sum(line["seconds/islands"] for line in lines if line["step"] > first) / seconds,
            staleness=find_staleness(folder, num_islands, options.every),
            curve=points,
        )
        shutil.rmtree(folder)
    return Result(*islands.broadcast("result", found))


def table(results: list[Result]) -> str:
    """Format the results; ratios are to the first."""
    seconds = min(result.curve[-1][0] for result in results)
    # in a short run the first line of a way may be later than the end of the quickest
    losses = [
        next((loss for at, loss in each.curve[::-1] if at <= seconds), each.curve[0][1]) for each in results
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
        )
        for each, loss in zip(results, losses, strict=True)
    ]
    header += [f"training loss after {seconds:.0f} s", "ratio"]
    return markdown(header, rows)


def main(options: Options) -> None:
    bind()
    islands = join_ranks()
    results = []
    for name, way in list_ways(options).items():
        results.append(measure(name, way, options, islands))
        if islands.is_first:
            print(name, results[-1].step_seconds, file=sys.stderr, flush=True)
    if islands.is_first:
        print(table(results))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
