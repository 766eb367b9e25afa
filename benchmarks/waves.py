"""Waves beside other ways to synchronise, on islands that are held up in turns: loss, seconds and staleness.

python benchmarks/waves.py [--steps 240] [--pause 0.3] [--chance 0.05]
python benchmarks/waves.py --slow 2 --chance 0   # as root

Before each step an island pauses with a small chance, which a seed decides for each island and step, so every
way meets the same pauses. Each way trains the same steps ("equal samples"); then the loss of its line at the
seconds that the quickest way took is compared ("equal time"). Seconds count from a tenth of the steps on,
where all islands wait for each other once: all have compiled by then. This file is also the run.
Figures: docs/benchmarks/waves.md.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from paired import markdown
from ranks import text_run, train

import shardtrain as st
from shardtrain.islands.rank_environment import find_rank_environment
from shardtrain.trainer.waves import read_wave_log, wave_file

ISLANDS, EVERY = 2, 4
"""Number of islands; steps of a wave, and of local SGD and DiLoCo between merges."""

TOLD = "WAVES_OPTIONS"
"""Environment variable of a run: the options."""

LOCAL = f"--local-steps {EVERY}"
WAYS = {
    "every-step": "",
    **{f"waves, D = {d}": f"--synchronisation wsp --clock-distance {d} {LOCAL}" for d in (0, 4, 32)},
    "local-sgd": f"--synchronisation local-sgd {LOCAL}",
    "diloco": f"--synchronisation diloco --outer-rate 0.7 --outer-momentum 0.5 {LOCAL}",
}
"""Name of a way to synchronise islands -> its options; D: most clocks of an island before the slowest one."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      steps: of each run.
      pause: seconds for which an island is held up.
      chance: of being held up before a step.
      slow: the last island has 1 / slow of the time (by a quota: root) and of the rows of another one.
    """

    steps: int = 240
    pause: float = 0.3
    chance: float = 0.05
    slow: int = 1

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


def run() -> st.Run:
    """Return the run, whose loss pauses by the options."""
    options = Options(**json.loads(os.environ[TOLD]))
    pauses = Pauses(options, find_rank_environment(os.environ).rank, wait_for_all)

    def loss(apply: Any, batch: Any) -> Any:
        jax.debug.callback(pauses)
        return st.next_token_loss(apply, batch)

    return text_run(
        64,
        64,
        2,
        loss=loss,
        optimizer=st.Optimizer(learning_rate=st.Schedule(name="constant", peak=2e-3, warmup=20)),
        # the slow island, the last one, has rows by its speed
        strategy=st.Strategy(across=st.Across(shares=(float(options.slow),) * (ISLANDS - 1) + (1.0,))),
        batch=16,
        steps=options.steps,
        log_every=1,
        recovery=st.Recovery(fingerprint_every=None),  # islands would wait for each other for them
    )


def wait_for_all() -> None:
    """Wait until all islands are here."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


class Pauses:
    """Called in each step: sleeps in some of them; seed and island decide in which.

    Args:
      options: of the pauses.
      island: whose they are.
      wait: called in the step from which on seconds count.
    """

    def __init__(self, options: Options, island: int, wait: Callable[[], None]) -> None:
        draws = np.random.default_rng([0, island]).random(2 * options.steps)
        self._held_up, self._seconds = draws < options.chance, options.pause
        self._step, self._first, self._wait = 0, options.first_step, wait

    def __call__(self) -> None:
        self._step += 1
        if self._step == self._first:
            self._wait()
        if self._held_up[self._step % len(self._held_up)]:
            time.sleep(self._seconds)


def find_staleness(folder: Path) -> int | None:
    """Return the most steps of another island that were missing in a step, by the events of a run."""
    if not wave_file(folder, 0).is_file():
        return None
    most = 0
    for shard in range(ISLANDS):
        clocks = [0] * ISLANDS
        for event in read_wave_log(folder, shard, ISLANDS):
            if event.kind == "push":
                clocks[event.island] += 1
            else:
                most = max(most, clocks[event.island] - min(clocks))
    return most * EVERY + EVERY - 1


def measure(name: str, options: Options) -> Result:
    """Train once."""
    with TemporaryDirectory() as root:
        folder, first = Path(root), options.first_step
        quotas = [(part, first // 2, options.steps) for part in (1.0, 1 / options.slow)]
        given = {"launch": ("--islands", ISLANDS), "quotas": quotas, TOLD: json.dumps(asdict(options))}
        _, lines = train(__file__, folder, *WAYS[name].split(), **given)
        points, staleness = read_curve(lines, first), find_staleness(folder / "run")
    seconds, _ = points[-1]
    waiting = sum(line["seconds/islands"] for line in lines if line["step"] > first) / seconds
    heldout, step_seconds = lines[-1]["heldout/loss"], seconds / (options.steps - first)
    return Result(name, heldout, step_seconds, waiting, staleness, points)


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
    results = []
    for name in WAYS:
        results.append(measure(name, options))
        print(name, results[-1].step_seconds, file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
