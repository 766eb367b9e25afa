"""The questions of `shardtrain advise`: their options. What answers them: `advise.py`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


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
