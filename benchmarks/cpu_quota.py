"""A quota of processor time for a process, by a control group of its own (Linux, as root)."""

import os
from pathlib import Path

PERIOD_SECONDS = 0.004
"""The quota is for each period, or for a longer one where the kernel gives no quota so short. It is short
beside a step, so that all parts of a step are slowed alike."""

LEAST_SECONDS = 0.001
"""The shortest quota that the kernel gives."""


class CpuQuota:
    """A control group with a part of one core's time, which a process enters and leaves.

    Args:
      part: of a core; the whole process has it, all threads together.
      pid: of the process; None: this one.
      root: where control groups are mounted.
    """

    def __init__(self, part: float, pid: int | None = None, root: Path = Path("/sys/fs/cgroup")) -> None:
        self._part, self._pid = part, pid or os.getpid()
        self._is_v1 = (root / "cpu" / "cgroup.procs").is_file()
        self._root = root / "cpu" if self._is_v1 else root
        self._own: Path | None = None
        self._before = self._root

    def begin(self, core: int = 0) -> None:
        """Slow the process, all threads of it.

        Args:
          core: on which it runs; the quota does not depend on it.

        Raises:
          SystemExit: no control group can be made here.
        """
        own = self._root / f"shardtrain-{self._pid}"
        period = round(1e6 * max(PERIOD_SECONDS, LEAST_SECONDS / self._part))
        quota = round(period * self._part)
        try:
            self._before = self._group()
            own.mkdir()
            if self._is_v1:
                (own / "cpu.cfs_period_us").write_text(str(period))
                (own / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (own / "cpu.max").write_text(f"{quota} {period}")
            (own / "cgroup.procs").write_text(str(self._pid))
        except OSError as error:
            raise SystemExit(f"no control group for processor time can be made here: {error}") from error
        self._own = own

    def end(self) -> None:
        """Let the process run as before, if it was slowed."""
        if self._own is None:
            return
        if Path(f"/proc/{self._pid}").exists():
            (self._before / "cgroup.procs").write_text(str(self._pid))
        self._own.rmdir()
        self._own = None

    def _group(self) -> Path:
        """Return the group of the process."""
        for line in Path(f"/proc/{self._pid}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names.split(",")[0] == ("cpu" if self._is_v1 else ""):
                return self._root / path.lstrip("/")
        return self._root
