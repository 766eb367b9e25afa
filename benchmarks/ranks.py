"""What benchmarks of several ranks share: a command, cores, a run of real text, a quota of processor time."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def bind(*, one_core: bool = False) -> None:
    """Keep to this rank's cores, as `shardtrain train` does; before jax starts its threads."""
    from shardtrain.islands.binding import bind_cpus
    from shardtrain.islands.rank_environment import find_rank_environment

    if cores := bind_cpus(find_rank_environment(os.environ)):
        os.sched_setaffinity(0, {min(cores)} if one_core else cores)


def join_ranks() -> Any:
    """Return the islands; end where there is one process alone."""
    from shardtrain.islands.membership import join

    return join() or sys.exit("start it on several ranks: mpiexec -n 2 python benchmarks/NAME.py")


def text_run(config: dict[str, int], folder: Path, **fields: Any) -> Any:
    """Return a run of a decoder on text that every machine with Python has; it saves nothing midway."""
    from shardtrain import CheckpointPolicy, Run
    from shardtrain.data import Text
    from shardtrain.models.decoder import DecoderConfig

    paths = tuple(sorted(Path(os.__file__).parent.glob("a*.py")))
    return Run(
        model=DecoderConfig(vocab=256, num_heads=4, **config),  # type: ignore[arg-type]
        data=Text(paths=paths, seq=config["seq"]),
        evaluate_every=None,
        checkpoints=CheckpointPolicy(every_steps=None, every_minutes=None),
        sinks=("jsonl",),
        run_dir=folder,
        **fields,
    )


class CpuQuota:
    """A control group with a part of one core's time, which this process enters and leaves (Linux, root).

    It has this time before processes of other groups.

    Args:
      part: of a core; the whole process has it, all threads together.
      root: where control groups are mounted.
    """

    def __init__(self, part: float, root: Path = Path("/sys/fs/cgroup")) -> None:
        self._part = part
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


class RunQuota:
    """The quota of this rank for some steps of a run; rank 0, which has the hooks, tells the others by files.

    Args:
      part: of a core, as of `CpuQuota`.
      folder: a folder of all ranks, for the files.
      first, last: after these steps the quotas of all ranks begin and end.
    """

    def __init__(self, part: float, folder: Path, first: int, last: int) -> None:
        self._quota, self._events = CpuQuota(part), {first: "begin", last: "end"}
        self._folder = folder
        threading.Thread(target=self._follow, daemon=True).start()

    def on_step(self, step: int) -> None:
        """Tell all ranks, as a hook of a run."""
        if step in self._events:
            (self._folder / f"quota_{self._events[step]}").touch()

    def _follow(self) -> None:
        for event, act in ("begin", self._quota.begin), ("end", self._quota.end):
            while not (self._folder / f"quota_{event}").exists():
                time.sleep(0.01)
            act()
