"""The job of a launch: a program, its islands of processes, and hosts. Values only.

Each launcher converts it to commands and files, see `launcher.py`.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardtrain.errors.messages import refuse
from shardtrain.islands.network import INTERFACE
from shardtrain.islands.rank_placement import PROCESSES
from shardtrain.launch.hosts import Host, hosts_problem

INTERFACES = (
    *("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE"),
    *("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "NCCL_SOCKET_IFNAME"),
)
"""Variables that restrict the transports of MPICH (UCX, libfabric), Open MPI and NCCL to one interface."""

TUNABLES = "GLIBC_TUNABLES"
THRESHOLDS = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184"
"""Settings that keep the pages of large buffers between steps: page faults dominated transfers on a CPU."""

MOST_ISLANDS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program to be started as many ranks.

    Args:
      arguments: the arguments of the program: `("train", "examples/gpt_text.py")`.
      islands: number of islands.
      processes_per_island: one number for all islands, or one each.
      hosts: in the order of the ranks; () means this machine, or the hosts of a batch system.
      program: the command of each rank, before the arguments.
      folder: the folder in which elastic islands run; None means that of this process.
      logs: the folder for one log per rank.
      interface: the network interface on which all ranks listen, such as eth1; None lets MPI choose.
      time_seconds: time limit; None disables it.
      stop_seconds: seconds before the time limit at which the ranks are asked to stop and save.

    Raises:
      ValueError: lists all values that are out of range or contradict each other.

    >>> Job(arguments=("train", "run.py"), islands=2, processes_per_island=(1, 3)).num_ranks
    4
    """

    arguments: tuple[str, ...]
    islands: int = 1
    processes_per_island: int | tuple[int, ...] = 1
    hosts: tuple[Host, ...] = ()
    program: tuple[str, ...] = (sys.executable, "-m", "shardtrain")
    folder: Path | None = None
    logs: Path = Path("logs")
    interface: str | None = None
    time_seconds: int | None = None
    stop_seconds: int = 120

    def __post_init__(self) -> None:
        problems = []
        if self.interface is not None and not re.fullmatch(r"[A-Za-z0-9][\w.:-]{0,14}", self.interface):
            problems.append(
                f"interface {self.interface!r} is no name of one; `ip link` lists them: eth0, ib0"
            )
        # islands and their processes: one number for all, or one for each island
        if self.islands < 1:
            problems.append(f"islands is {self.islands}; use 1 or more")
        elif self.islands > MOST_ISLANDS:
            problems.append(f"islands is {self.islands}; use at most {MOST_ISLANDS}")
        each = self.processes_per_island
        numbers = (each,) if isinstance(each, int) else each
        if not numbers or min(numbers) < 1:
            problems.append(f"processes per island {each!r}: each island needs 1 or more")
        elif not isinstance(each, int) and len(each) != self.islands:
            text = ",".join(map(str, each))
            problems.append(
                f"processes per island {text} is for {len(each)} islands, and islands is {self.islands};"
                f" use islands={len(each)}, or {self.islands} numbers"
            )
        if self.stop_seconds < 0:
            problems.append(f"{self.stop_seconds} s for stopping and saving are given; use 0 or more")
        # the time limit must leave time to run before that to stop and save
        if self.time_seconds is not None and self.time_seconds <= self.stop_seconds:
            problems.append(
                f"the time limit of {self.time_seconds} s leaves nothing before the {self.stop_seconds} s for"
                f" stopping and saving; use more than {self.stop_seconds} s, or fewer than"
                f" {self.time_seconds} for stopping"
            )
        # hosts can be judged only if the number of ranks is known
        if not problems and self.hosts and (problem := hosts_problem(self.num_ranks, self.hosts)):
            problems.append(problem)
        refuse("this job cannot be launched", problems)

    @property
    def processes(self) -> tuple[int, ...]:
        """The number of processes of each island."""
        each = self.processes_per_island
        return (each,) * self.islands if isinstance(each, int) else each

    @property
    def num_ranks(self) -> int:
        """Total number of processes of all islands."""
        return sum(self.processes)

    @property
    def processes_text(self) -> str:
        """The value of `SHARDTRAIN_ISLAND_PROCESSES`."""
        each = self.processes_per_island
        return str(each) if isinstance(each, int) else ",".join(map(str, each))

    def rank_command(self, *options: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the command of a rank as two lines: `launch.rank`, which keeps its log, and the program.

        Args:
          options: options of `launch.rank`.
        """
        keeper = (sys.executable, "-m", "shardtrain.launch.rank", str(self.logs), *options, "--")
        return keeper, (*self.program, *self.arguments)

    def rank_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of every rank; values that the user has set are kept."""
        names = () if self.interface is None else (INTERFACE, *INTERFACES)
        return {
            PROCESSES: self.processes_text,
            TUNABLES: environ.get(TUNABLES) or THRESHOLDS,
            **{name: environ.get(name) or self.interface or "" for name in names},
        }
