"""`shardtrain advise QUESTION ...`: answers from a few numbers, by published formulas."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from shardtrain.cli.advise_questions import (
    Batch,
    Clusters,
    Devices,
    Interval,
    Predict,
    Revocable,
    Speed,
    Synchronise,
)
from shardtrain.cli.command_help import usage_text
from shardtrain.cli.run_rows import rows_of
from shardtrain.errors.exit_codes import DONE, MISTAKE
from shardtrain.errors.messages import near
from shardtrain.plan.advice.checks import check_fraction, check_positive
from shardtrain.plan.advice.clusters import ClusterSpeed
from shardtrain.plan.advice.noise_scale import gradient_noise, logged_noise
from shardtrain.plan.advice.revocable import RevocableRun
from shardtrain.plan.advice.rows import MeasuredRow
from shardtrain.report.advice import (
    clusters_text,
    devices_text,
    interval_text,
    noise_text,
    revocable_text,
    synchronisation_text,
)
from shardtrain.report.fits import fits_text, rows_text
from shardtrain.report.sinks.json_lines import METRICS, read_jsonl
from shardtrain.system import terminal

HOUR = 3600.0


def main(arguments: Sequence[str]) -> int:
    """Answer one of `QUESTIONS`; return 0, or 2 if none is given."""
    wants_help = bool({"-h", "--help"} & set(arguments))
    if not arguments or (wants_help and arguments[0] not in QUESTIONS):
        terminal.out(usage())
        return DONE if wants_help else MISTAKE
    name, *rest = arguments
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

    check_positive(question, given(positive), given(zero))


def _devices(asked: Devices) -> str:
    _check("a number of devices", asked, ["devices"], ["overhead"])
    check_fraction("a number of devices", "--efficiency", asked.efficiency)
    return devices_text(asked.overhead, asked.efficiency, asked.devices)


def _synchronise(asked: Synchronise) -> str:
    _check("a link", asked, ["parameter_mb", "replicas", "compute_seconds", "server_link"])
    return synchronisation_text(
        asked.parameter_mb * 1e6, asked.replicas, asked.compute_seconds, asked.server_link
    )


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
        noise, batch = logged_noise(_lines_of(asked.run), str(asked.run))
        return noise_text(noise.scale, batch, asked.learning_rate, asked.exponent)
    if asked.run is not None or small is None or small_norm is None or large is None or large_norm is None:
        raise ValueError(
            "a batch was asked for; give either --run, the folder of a run, or all four of --small,"
            " --small-norm, --large and --large-norm"
        )
    noise = gradient_noise(small, small_norm**2, large, large_norm**2)
    return noise_text(noise.scale, large, asked.learning_rate, asked.exponent)


def _lines_of(run: Path) -> list[dict[str, float]]:
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

    lines, strategy = _lines_of(asked.run), asked.run / STRATEGY_FILE
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
    rows, notes = rows_of(asked.rows)
    row = None
    if asked.device is not None:
        row = MeasuredRow(model="", device=asked.device, devices=asked.devices, **given)
    folders = [path for path in asked.rows if path.is_dir()]
    measured = rows_text(rows) if folders else ""
    return measured + fits_text(rows, row) + "".join(f"{note}\n" for note in notes)


def _clusters(asked: Clusters) -> str:
    positive = ["batch", "step_seconds", "noise_scale", "hours"]
    _check("a comparison of clusters", asked, positive, ["price_per_hour"])
    lengths = {name: len(getattr(asked, name)) for name in ("batch", "step_seconds")}
    if asked.price_per_hour:
        lengths["price_per_hour"] = len(asked.price_per_hour)
    if len(set(lengths.values())) > 1 or not asked.batch:
        given = ", ".join(f"{number} of {name}" for name, number in lengths.items())
        raise ValueError(f"clusters were asked for with {given}; give one number of each for every cluster")
    prices = asked.price_per_hour or (0.0,) * len(asked.batch)
    rows = enumerate(zip(asked.batch, asked.step_seconds, prices, strict=True))
    clusters = [
        ClusterSpeed(name=f"{number + 1}", batch=batch, step_seconds=seconds, price_per_hour=price)
        for number, (batch, seconds, price) in rows
    ]
    return clusters_text(clusters, asked.noise_scale, asked.hours * HOUR)


QUESTIONS: dict[str, tuple[type, Callable[[Any], str]]] = {
    "devices": (Devices, _devices),
    "synchronise": (Synchronise, _synchronise),
    "interval": (Interval, _interval),
    "batch": (Batch, _batch),
    "revocable": (Revocable, _revocable),
    "clusters": (Clusters, _clusters),
    "speed": (Speed, _speed),
    "predict": (Predict, _predict),
}
"""Question -> its options and what answers it."""
