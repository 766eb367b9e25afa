"""`shardtrain advise QUESTION ...`: answer questions about a run, by published formulas."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from shardtrain.cli.arguments import run_subcommand
from shardtrain.cli.run_rows import read_measured_rows, read_metrics, read_step_phases
from shardtrain.errors.exit_codes import DONE
from shardtrain.errors.messages import refuse
from shardtrain.plan.advice.fit import MeasuredRow
from shardtrain.plan.advice.noise_scale import gradient_noise, read_logged_noise
from shardtrain.plan.advice.revocable import RevocableRun
from shardtrain.report.advice import interval_text, noise_text, revocable_text
from shardtrain.report.fits import fits_text, rows_text
from shardtrain.system import terminal

HOUR = 3600.0

SUCCESSORS = {
    "devices": "shardtrain plan RUN --advise: efficiency of the best way, and devices that 80 % allows",
    "synchronise": "shardtrain plan RUN --advise: how much faster links must be to hide collectives",
    "clusters": "shardtrain advise batch: the steps to a loss for each batch, times seconds of a step",
}
"""Former question -> what answers it now."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Compute how often to save, from the time of a save and the time between failures.

    Args:
      save_seconds: seconds for which a save stops the training.
      failure_hours: mean hours between failures of the run: the mean of one host, divided by the number of
        hosts.
      restart_seconds: seconds from a failure until the run trains again.
      work_hours: hours of the run without saves and failures.
      step_seconds: seconds of a step; if given, the interval is also shown in steps.
    """

    save_seconds: float
    failure_hours: float
    restart_seconds: float = 0.0
    work_hours: float = 24.0
    step_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Compare batches and learning rates by the gradient noise scale, from a run or from two gradient norms.

    Args:
      run: the folder of a run with --gradient-noise-scale; the newer half of its steps is averaged. Without
        it, give the four numbers below.
      small: the smaller batch.
      small_norm: root mean square of the gradient norm at the smaller batch, over many steps.
      large: the larger batch, in the same unit.
      large_norm: root mean square of the gradient norm at the larger batch, at the same parameters.
      learning_rate: learning rate that is well tuned for the larger batch, or for the batch of the run. By
        default, factors are shown.
      exponent: exponent by which the learning rate grows with the batch: 1 for SGD, 0.5 to 1 for Adam.
    """

    run: Path | None = None
    small: float | None = None
    small_norm: float | None = None
    large: float | None = None
    large_norm: float | None = None
    learning_rate: float | None = None
    exponent: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Revocable:
    """Estimate time and cost on hosts that may be revoked, by a formula and by simulation.

    Args:
      hosts: number of hosts.
      work_hours: hours of the run on these hosts, without saves and revocations.
      save_minutes: minutes of training between saves.
      save_seconds: seconds for which a save stops the training.
      life_hours: mean hours until a host is revoked.
      replace_seconds: seconds from a revocation until the new host trains.
      others: what the other hosts do in this time. wait: they restart from the last save with the new host,
        as synchronous runs do. continue: they train without it.
      price_per_hour: price of a host; a host that was revoked costs nothing.
      compare: other numbers of hosts to compare, for the same total work.
      simulate: number of runs to simulate.
      seed: seed of the simulation.
    """

    hosts: int
    work_hours: float
    save_minutes: float
    save_seconds: float
    life_hours: float
    replace_seconds: float = 0.0
    others: Literal["wait", "continue"] = "wait"
    price_per_hour: float = 0.0
    compare: tuple[int, ...] = ()
    simulate: int = 200
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Compare the speed of a run with its prediction, and name what likely limits it.

    Args:
      run: the folder of the run, which may still be training.
    """

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Fit times of steps, saves and starts to measured rows, and predict the times of another run.

    Args:
      rows: CSV files, with the columns that docs/advice.md explains, and folders of past runs.
      device: kind of devices of the predicted run, as in the rows. By default, nothing is predicted.
      devices: number of devices of the predicted run.
      teraflops: 10**12 operations of a step on all devices, with recomputation.
      operations: number of operations that a step starts, or of tensors, as in the rows.
      parameter_mb: megabytes of gradients as they are sent.
      checkpoint_mb: megabytes of a checkpoint.
    """

    rows: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="ROWS.csv|RUN")]]
    device: str | None = None
    devices: int = 1
    teraflops: float | None = None
    operations: float | None = None
    parameter_mb: float | None = None
    checkpoint_mb: float | None = None


def main(arguments: Sequence[str]) -> int:
    """Answer one of `QUESTIONS`; return 0, or 2 if none is given."""
    if arguments and arguments[0] in SUCCESSORS:
        name = arguments[0]
        raise ValueError(f"there is no question {name!r} any more; use {SUCCESSORS[name]}")

    def print_answer(answer: Callable[[Any], str], asked: Any) -> int:
        terminal.out(answer(asked))
        return DONE

    commands = {name: (kind, partial(print_answer, answer)) for name, (kind, answer) in QUESTIONS.items()}
    return run_subcommand("shardtrain advise", "QUESTION", commands, arguments)


def _check(question: str, asked: object, positive: Sequence[str], zero: Sequence[str] = ()) -> None:
    """Refuse options that are out of range.

    Args:
      question: what was asked for, for the message.
      asked: the options; None and () mean that an option was not given.
      positive: names of options that must be above zero; of an option with several numbers, each must be.
      zero: names of options that may also be zero.

    Raises:
      ValueError: lists every number out of range.
    """

    def given(names: Sequence[str]) -> dict[str, float]:
        found = {}
        for name in names:
            value, option = getattr(asked, name), f"--{name.replace('_', '-')}"
            if isinstance(value, tuple):
                found |= {f"{option}, number {i + 1},": one for i, one in enumerate(value)}
            elif value is not None:
                found[option] = value
        return found

    problems = [
        f"{name} is {value:g}; use a finite number {text}"
        for names, lowest, text in ((positive, math.ulp(0.0), "above 0"), (zero, 0.0, "of at least 0"))
        for name, value in given(names).items()
        if not lowest <= value < math.inf
    ]
    refuse(f"{question} was asked for", problems)


def _interval(asked: Interval) -> str:
    positive = ["save_seconds", "failure_hours", "work_hours", "step_seconds"]
    _check("an interval", asked, positive, ["restart_seconds"])
    return interval_text(
        asked.save_seconds,
        asked.failure_hours * HOUR,
        asked.restart_seconds,
        asked.work_hours * HOUR,
        asked.step_seconds,
    )


def _batch(asked: Batch) -> str:
    positive = ["small", "large", "learning_rate", "exponent"]
    _check("a batch", asked, positive, ["small_norm", "large_norm"])
    small, small_norm, large, large_norm = asked.small, asked.small_norm, asked.large, asked.large_norm
    if asked.run is not None and [small, small_norm, large, large_norm] == [None] * 4:
        noise, batch = read_logged_noise(read_metrics(asked.run), str(asked.run))
        return noise_text(noise.scale, batch, asked.learning_rate, asked.exponent)
    if asked.run is not None or small is None or small_norm is None or large is None or large_norm is None:
        raise ValueError(
            "a batch was asked for; give either --run, the folder of a run, or all four of --small,"
            " --small-norm, --large and --large-norm"
        )
    noise = gradient_noise(small, small_norm**2, large, large_norm**2)
    return noise_text(noise.scale, large, asked.learning_rate, asked.exponent)


def _revocable(asked: Revocable) -> str:
    positive = ["hosts", "work_hours", "save_minutes", "life_hours", "compare", "simulate"]
    zero = ["save_seconds", "replace_seconds", "price_per_hour", "seed"]
    _check("a run on revocable hosts", asked, positive, zero)
    run = RevocableRun(
        hosts=asked.hosts,
        work_seconds=asked.work_hours * HOUR,
        interval_seconds=asked.save_minutes * 60,
        save_seconds=asked.save_seconds,
        host_life_seconds=asked.life_hours * HOUR,
        replace_seconds=asked.replace_seconds,
        others=asked.others,
        price_per_hour=asked.price_per_hour,
    )
    return revocable_text(run, asked.compare, asked.simulate, asked.seed)


def _speed(asked: Speed) -> str:
    from shardtrain.report.speed import speed_text
    from shardtrain.trainer.strategy import STRATEGY_FILE, read_strategy

    lines, _ = read_step_phases(asked.run)
    strategy = asked.run / STRATEGY_FILE
    predicted = read_strategy(strategy).predicted if strategy.is_file() else {}
    return f"{speed_text(lines, predicted)}\n"


def _predict(asked: Predict) -> str:
    names = ("teraflops", "operations", "parameter_mb", "checkpoint_mb")
    _check("a prediction", asked, ["devices", *names])
    given = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if not asked.rows:
        raise ValueError("a prediction was asked for without rows; give CSV files or run folders")
    rows, notes = read_measured_rows(asked.rows)
    row = None
    if asked.device is not None:
        row = MeasuredRow(model="", device=asked.device, devices=asked.devices, **given)
    folders = [path for path in asked.rows if path.is_dir()]
    measured = rows_text(rows) if folders else ""
    return measured + fits_text(rows, row) + "".join(f"{note}\n" for note in notes)


QUESTIONS: dict[str, tuple[type, Callable[[Any], str]]] = {
    "interval": (Interval, _interval),
    "batch": (Batch, _batch),
    "revocable": (Revocable, _revocable),
    "speed": (Speed, _speed),
    "predict": (Predict, _predict),
}
"""Question -> the class of its options, and the function that answers it."""
