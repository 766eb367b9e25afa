"""What benchmarks of several ranks share: a command, cores, a run of real text, a quota of processor time."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from shardtrain import CheckpointPolicy, Hook, Run, Text
from shardtrain.islands.binding import bind_cpus
from shardtrain.islands.rank_environment import find_rank_environment
from shardtrain.models.decoder import DecoderConfig
from shardtrain.report.sinks.json_lines import read_jsonl

PERIOD_SECONDS, LEAST_SECONDS = 0.004, 0.001
"""The period of a quota, short beside a step, and the shortest quota that the kernel gives."""


ROOT = Path(__file__).parents[1]


def run_command(*words: object, before: Sequence[str] = (), **environment: str) -> str:
    """Run a command of `shardtrain` in the repository, and return what it prints.

    Args:
      words: the command and its options.
      before: a command that runs it, such as on another host.
      environment: variables.

    Raises:
      SystemExit: it failed.
    """
    command = [*before, sys.executable, "-m", "shardtrain", *map(str, words)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "400", **environment}
    found = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        ended = f"{' '.join(command)} ended with {found.returncode}"
        sys.exit(f"{ended}:\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}")
    return found.stdout


Quota = tuple[float, int, int]
"""Part of a core, and the steps after which it begins and ends."""

QUOTAS = "BENCHMARK_QUOTAS"
"""Environment variable of a `text_run`: the file for the times of its steps, and the quota of each rank."""


def train(
    path: str, folder: Path, *words: object, launch: tuple = (), quotas: Sequence[Quota] = (), **given: Any
) -> tuple[str, list[dict[str, float]]]:
    """Train a run, and return what is printed, and the lines of metrics that have a loss.

    Args:
      path: the run file.
      folder: for the run folder, `run`, logs, and the times of steps, `times`.
      words: options of the run.
      launch: options of `launch`; without any there is one process.
      quotas: of each rank of a `text_run`, whose steps are timed.
      given: of `run_command`.
    """
    if quotas:
        given[QUOTAS] = json.dumps([str(folder / "times"), quotas])
    launched = ("launch", *launch, "--logs", folder / "logs", "--") if launch else ()
    printed = run_command(*launched, "train", path, "--run-dir", folder / "run", *words, **given)
    return printed, [line for line in read_jsonl(folder / "run" / "metrics.jsonl") if "train/loss" in line]


def bind() -> None:
    """Keep to this rank's cores, as `shardtrain train` does; before jax starts its threads."""
    if cores := bind_cpus(find_rank_environment(os.environ)):
        os.sched_setaffinity(0, cores)


def text_run(seq: int, embed: int, num_layers: int, **fields: Any) -> Run:
    """Return a run of a decoder on text that every machine with Python has; it saves nothing midway.

    Where `train` gave quotas, this rank's begins and ends after its steps, whose times are written to a file.
    """
    hooks: tuple[Hook, ...] = ()
    if QUOTAS in os.environ:
        name, quotas = json.loads(os.environ[QUOTAS])
        part, first, last = quotas[find_rank_environment(os.environ).rank]
        if part < 1:
            events = {first: (quota := CpuQuota(part)).begin, last: quota.end}
            threading.Thread(target=follow, args=(Path(name), events), daemon=True).start()
        hooks = (Hook(on_step=lambda step: write_time(Path(name))),)
    return Run(
        model=DecoderConfig(vocab=256, num_heads=4, seq=seq, embed=embed, num_layers=num_layers),
        data=Text(paths=tuple(sorted(Path(os.__file__).parent.glob("a*.py"))), seq=seq),
        evaluate_every=None,
        checkpoints=CheckpointPolicy(every_steps=None, every_minutes=None),
        sinks=("jsonl",),
        hooks=hooks,
        **fields,
    )


def write_time(times: Path) -> None:
    """Add the time to a file, a line for each step."""
    with times.open("a") as file:
        file.write(f"{time.monotonic()}\n")


def follow(times: Path, events: Mapping[int, Callable[[], None]]) -> None:
    """Call a function after each of some steps, by the lines of a file of all ranks."""
    for step, act in events.items():
        while not times.is_file() or times.read_text().count("\n") < step:
            time.sleep(0.01)
        act()


def read_seconds(times: Path, num_steps: int) -> float:
    """Return the median seconds of the last steps."""
    # a median: each process pauses once or twice in a run, for up to 1.5 s
    return median(b - a for a, b in pairwise(map(float, times.read_text().split()[-num_steps - 1 :])))


class CpuQuota:
    """A control group with a part of one core's time, which this process enters and leaves (Linux, root).

    It has this time before processes of other groups.

    Args:
      part: of a core; the whole process has it, all threads together.
    """

    def __init__(self, part: float) -> None:
        self._part, root = part, Path("/sys/fs/cgroup")
        self._is_v1 = (root / "cpu" / "cgroup.procs").is_file()
        self._root = self._before = root / "cpu" if self._is_v1 else root
        self._own: Path | None = None

    def begin(self) -> None:
        """Slow the process, all threads of it.

        Raises:
          SystemExit: no control group can be made here.
        """
        own = self._root / f"shardtrain-{os.getpid()}"
        period = round(1e6 * max(PERIOD_SECONDS, LEAST_SECONDS / self._part))
        quota = round(period * self._part)
        try:
            self._before = self._find_group()
            own.mkdir()
            if self._is_v1:
                (own / "cpu.cfs_period_us").write_text(str(period))
                (own / "cpu.cfs_quota_us").write_text(str(quota))
                (own / "cpu.shares").write_text("262144")
            else:
                (own / "cpu.max").write_text(f"{quota} {period}")
                (own / "cpu.weight").write_text("10000")
            (own / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise SystemExit(f"no control group for processor time can be made here: {error}") from error
        self._own = own

    def end(self) -> None:
        """Let the process run as before, if it was slowed."""
        if self._own is not None:
            (self._before / "cgroup.procs").write_text(str(os.getpid()))
            self._own.rmdir()
            self._own = None

    def _find_group(self) -> Path:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names.split(",")[0] == ("cpu" if self._is_v1 else ""):
                return self._root / path.lstrip("/")
        return self._root
