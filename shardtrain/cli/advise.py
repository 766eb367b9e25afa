"""`shardtrain advise QUESTION ...`: answers from a few numbers, by published formulas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from shardtrain.errors.exit_codes import DONE, MISTAKE
from shardtrain.errors.messages import near
from shardtrain.plan.advice.checks import check_positive
from shardtrain.plan.advice.clusters import ClusterSpeed
from shardtrain.plan.advice.noise_scale import gradient_noise
from shardtrain.plan.advice.revocable import RevocableRun
from shardtrain.plan.advice.rows import MeasuredRow, read_rows
from shardtrain.report.advice import (
    clusters_text,
    devices_text,
    interval_text,
    noise_text,
    revocable_text,
    synchronisation_text,
)
from shardtrain.report.fits import fits_text
from shardtrain.report.sinks.json_lines import METRICS, read_jsonl
from shardtrain.system import terminal

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Devices:
    """How many devices an overhead allows for a wanted efficiency.

    Args:
      overhead: seconds that do not get fewer with more devices over seconds of computation, on one device.
      efficiency: speedup over number of devices that is wanted.
      devices: number of devices whose speedup is shown.
    """

    overhead: float
    efficiency: float = 0.8
    devices: int = 8


@dataclass(frozen=True, kw_only=True)
class Synchronise:
    """Which link, or how many parameter servers, hide synchronisation behind computation.

    Args:
      parameter_mb: megabytes of all gradients as they are sent.
      replicas: number of replicas that are synchronised.
      compute_seconds: seconds of computation of a step.
      server_link: gigabytes a second of a parameter server; by default servers are not counted.
    """

    parameter_mb: float
    replicas: int
    compute_seconds: float
    server_link: float | None = None


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
    """Which batch and learning rate, from gradient norms at two batch sizes.

    Args:
      small: the smaller batch.
      small_norm: root mean square of the gradient norm at it, over many steps.
      large: the larger batch, in the same unit.
      large_norm: root mean square of the gradient norm at it, at the same parameters.
      learning_rate: that is well tuned for the larger batch; by default factors are shown.
      exponent: of the learning rate: 1 for SGD, 0.5 to 1 for Adam.
    """

    small: float
    small_norm: float
    large: float
    large_norm: float
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
      rows: a CSV file; its columns are on the page about advice.
      device: kind of devices that is asked for, as in the rows; by default nothing is predicted.
      devices: number of devices that is asked for.
      teraflops: 10**12 operations of a step of all devices, with recomputation.
      parameter_mb: megabytes of gradients as they are sent.
      checkpoint_mb: megabytes of a checkpoint.
    """

    rows: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="ROWS.csv")]]
    device: str | None = None
    devices: int = 1
    teraflops: float | None = None
    parameter_mb: float | None = None
    checkpoint_mb: float | None = None


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Which of several clusters to use, at equal examples, equal time and equal loss.

    Args:
      batch: of a step on each cluster, in examples or tokens.
      step_seconds: of a step on each cluster.
      price_per_hour: of each whole cluster; by default nothing.
      noise_scale: the gradient noise scale, in the unit of the batches.
      hours: the time.
    """

    batch: tuple[float, ...]
    step_seconds: tuple[float, ...]
    noise_scale: float
    price_per_hour: tuple[float, ...] = ()
    hours: float = 1.0


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
    lines = [f"  {name:12} {(kind.__doc__ or '').splitlines()[0]}" for name, (kind, _) in QUESTIONS.items()]
    return (
        "usage: shardtrain advise QUESTION ...\n\n"
        + "\n".join(lines)
        + "\n\nshardtrain advise QUESTION --help shows its options.\n"
    )


def _devices(asked: Devices) -> str:
    return devices_text(asked.overhead, asked.efficiency, asked.devices)


def _synchronise(asked: Synchronise) -> str:
    return synchronisation_text(
        asked.parameter_mb * 1e6, asked.replicas, asked.compute_seconds, asked.server_link
    )


def _interval(asked: Interval) -> str:
    return interval_text(
        asked.save_seconds,
        asked.failure_hours * HOUR,
        asked.restart_seconds,
        asked.work_hours * HOUR,
        asked.step_seconds,
    )


def _batch(asked: Batch) -> str:
    noise = gradient_noise(asked.small, asked.small_norm**2, asked.large, asked.large_norm**2)
    return noise_text(noise.scale, asked.large, asked.learning_rate, asked.exponent)


def _revocable(asked: Revocable) -> str:
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

    metrics, strategy = asked.run / METRICS, asked.run / STRATEGY_FILE
    if not metrics.is_file():
        raise ValueError(f"there is no {metrics}; give the folder of a run, such as runs/gpt_text")
    predicted = read_strategy(strategy).predicted if strategy.is_file() else {}
    text = speed_text(read_jsonl(metrics), predicted)
    if text is None:
        raise ValueError(f"{metrics} has fewer than two measured lines; train on, or use --log-every 1")
    return text + "\n"


def _predict(asked: Predict) -> str:
    names = ("teraflops", "parameter_mb", "checkpoint_mb")
    given = {name: value for name in names if (value := getattr(asked, name)) is not None}
    check_positive("a prediction", {"devices": asked.devices, **given})
    rows = read_rows(asked.rows)
    if asked.device is None:
        return fits_text(rows, None)
    return fits_text(rows, MeasuredRow(model="", device=asked.device, devices=asked.devices, **given))


def _clusters(asked: Clusters) -> str:
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
