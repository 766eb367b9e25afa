"""`shardtrain advise QUESTION ...`: answers from a few numbers, by published formulas."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from shardtrain.cli.command_help import usage_text
from shardtrain.cli.run_rows import read_measured_rows
from shardtrain.errors.exit_codes import DONE, USAGE_ERROR
from shardtrain.errors.messages import near, problems_error
from shardtrain.plan.advice.fit import MeasuredRow
from shardtrain.plan.advice.noise_scale import gradient_noise, read_logged_noise
from shardtrain.plan.advice.revocable import RevocableRun
from shardtrain.report.advice import (
    interval_text,
    noise_text,
    revocable_text,
)
from shardtrain.report.fits import fits_text, rows_text
from shardtrain.report.sinks.json_lines import METRICS, read_jsonl
from shardtrain.system import terminal

HOUR = 3600.0

SUCCESSORS = {
    "devices": "shardtrain plan RUN --advise: efficiency of the best way, and devices that 80 % allows",
    "synchronise": "shardtrain plan RUN --advise: how much faster links must be to hide collectives",
    "clusters": "shardtrain advise batch: the steps to a loss for each batch, times seconds of a step",
}
"""Questions that are no more -> what answers them."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """How often to save, from the time of a save and of failures.

    Args:
      save_seconds: how long a save keeps the run waiting.
      failure_hours: mean hours between failures of the whole run: those of a host over the number of hosts.
      restart_seconds: from a failure until the run works again.
      work_hours: hours of the run without saves and failures.
      step_seconds: seconds of a step, to say the interval in steps.
    """

    save_seconds: float
    failure_hours: float
    restart_seconds: float = 0.0
    work_hours: float = 24.0
    step_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Which batch and learning rate, from the gradient noise scale of a run or gradient norms at two batches.

    Args:
      run: the folder of a run with --gradient-noise-scale, of which the newer half is averaged; else the four
        numbers below.
      small: the smaller batch.
      small_norm: root mean square of the gradient norm at it, over many steps.
      large: the larger batch, in the same unit.
      large_norm: root mean square of the gradient norm at it, at the same parameters.
      learning_rate: that is well tuned for the larger batch, or for that of the run; by default factors are
        shown.
      exponent: of the learning rate: 1 for SGD, 0.5 to 1 for Adam.
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
    """Expected time and cost on hosts that may be revoked, beside a simulation.

    Args:
      hosts: number of hosts.
      work_hours: hours of the run on them, without saves and revocations.
      save_minutes: minutes of work between saves.
      save_seconds: how long a save keeps the run waiting.
      life_hours: mean hours until a host is revoked.
      replace_seconds: from a revocation until the new host works.
      others: what the other hosts do meanwhile: wait, and continue from the last save, as synchronous runs
        do; or continue without it.
      price_per_hour: of a host; a host that is not there costs nothing.
      compare: other numbers of hosts, with the same work in all.
      simulate: how many runs to simulate.
      seed: of the simulation.
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
    """How fast a past or running run is, beside its prediction, and what likely limits it.

    Args:
      run: the folder of a run.
    """

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Fit times of steps, saves and starts to measured rows, and predict those of another run.

    Args:
      rows: CSV files, whose columns are on the page about advice, and folders of past runs.
      device: kind of devices that is asked for, as in the rows; by default nothing is predicted.
      devices: number of devices that is asked for.
      teraflops: 10**12 operations of a step of all devices, with recomputation.
      parameter_mb: megabytes of gradients as they are sent.
      checkpoint_mb: megabytes of a checkpoint.
    """

    rows: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="ROWS.csv|RUN")]]
    device: str | None = None
    devices: int = 1
    teraflops: float | None = None
    parameter_mb: float | None = None
    checkpoint_mb: float | None = None


def main(arguments: Sequence[str]) -> int:
    """Answer one of `QUESTIONS`; return 0, or 2 if none is given."""
    wants_help = bool({"-h", "--help"} & set(arguments))
    if not arguments or (wants_help and arguments[0] not in QUESTIONS):
        terminal.out(usage())
        return DONE if wants_help else USAGE_ERROR
    name, *rest = arguments
    if name in SUCCESSORS:
        raise ValueError(f"there is no question {name!r} any more; use {SUCCESSORS[name]}")
    if name not in QUESTIONS:
        raise ValueError(f"there is no question {near(name, QUESTIONS)}\n{usage()}")
    kind, answer = QUESTIONS[name]
    terminal.out(answer(tyro.cli(kind, args=rest, prog=f"shardtrain advise {name}")))
    return DONE


def usage() -> str:
    """Return the text of --help."""
    kinds = {name: kind for name, (kind, _) in QUESTIONS.items()}
    return usage_text("shardtrain advise", "QUESTION", kinds)


def _check(question: str, asked: object, positive: Sequence[str], zero: Sequence[str] = ()) -> None:
    """Refuse options out of range, by their names and in their units, before anything is computed of them.

    Args:
      question: what was asked for, for the message.
      asked: its options; one that is None or empty was not given.
      positive: names of options that must be above zero, each of several numbers too.
      zero: names of options that may be zero too.

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
    if problems:
        raise problems_error(f"{question} was asked for", problems)


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
        noise, batch = read_logged_noise(_read_lines(asked.run), str(asked.run))
        return noise_text(noise.scale, batch, asked.learning_rate, asked.exponent)
    if asked.run is not None or small is None or small_norm is None or large is None or large_norm is None:
        raise ValueError(
            "a batch was asked for; give either --run, the folder of a run, or all four of --small,"
            " --small-norm, --large and --large-norm"
        )
    noise = gradient_noise(small, small_norm**2, large, large_norm**2)
    return noise_text(noise.scale, large, asked.learning_rate, asked.exponent)


def _read_lines(run: Path) -> list[dict[str, float]]:
    """Return the lines of metrics of a run's folder.

    Raises:
      ValueError: it has none.
    """
    if not (run / METRICS).is_file():
        raise ValueError(f"there is no {run / METRICS}; give the folder of a run, such as runs/gpt_text")
    return read_jsonl(run / METRICS)


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

    lines, strategy = _read_lines(asked.run), asked.run / STRATEGY_FILE
    predicted = read_strategy(strategy).predicted if strategy.is_file() else {}
    text = speed_text(lines, predicted)
    if text is None:
        raise ValueError(
            f"{asked.run / METRICS} has fewer than two measured lines; train on, or use --log-every 1"
        )
    return text + "\n"


def _predict(asked: Predict) -> str:
    names = ("teraflops", "parameter_mb", "checkpoint_mb")
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
"""Question -> its options and what answers it."""
