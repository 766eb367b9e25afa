"""What to launch: islands of so many processes, on which hosts, which program. Values only.

What a launcher is told is in `mpi.py`, `local.py` and `slurm.py`.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardtrain.errors.messages import problems_error
from shardtrain.islands.network import INTERFACE
from shardtrain.islands.rank_environment import PROCESSES

INTERFACES = (
    *("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE"),
    *("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "NCCL_SOCKET_IFNAME"),
)
"""Variables by which the transports of MPICH (UCX, libfabric), Open MPI and NCCL are told one interface."""

TUNABLES = "GLIBC_TUNABLES"
THRESHOLDS = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184"
"""Large buffers keep their pages between steps: page faults were most of what crossing cost on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host, and how many ranks may run there (None: an even share)."""

    name: str
    slots: int | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program to be started as many ranks.

    Args:
      arguments: of the program: `("train", "examples/gpt_text.py")`.
      islands: how many.
      processes_per_island: one number for all islands, or one each.
      hosts: where, in the order of the ranks; empty: this machine, or what a batch system gives.
      program: what each rank runs, before the arguments.
      logs: the folder for one log a rank.
      interface: the network interface on which all listen, such as eth1; None: as MPI chooses.
      time_seconds: the most it may take; None: no limit.
      stop_seconds: so long before the limit the ranks are asked to stop and save.

    Raises:
      ValueError: what does not fit, all of it at once.

    >>> Job(arguments=("train", "run.py"), islands=2, processes_per_island=(1, 3)).num_ranks
    4
    """

    arguments: tuple[str, ...]
    islands: int = 1
    processes_per_island: int | tuple[int, ...] = 1
    hosts: tuple[Host, ...] = ()
    program: tuple[str, ...] = (sys.executable, "-m", "shardtrain")
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
        if self.islands < 1:
            problems.append(f"islands is {self.islands}; use 1 or more")
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
        if self.time_seconds is not None and self.time_seconds <= self.stop_seconds:
            problems.append(
                f"the time limit of {self.time_seconds} s leaves nothing before the {self.stop_seconds} s for"
                f" stopping and saving; use more than {self.stop_seconds} s, or fewer than"
                f" {self.time_seconds} for stopping"
            )
        if not problems and self.hosts and (problem := hosts_problem(self.num_ranks, self.hosts)):
            problems.append(problem)
        if problems:
            raise problems_error("this job cannot be launched", problems)

    @property
    def num_ranks(self) -> int:
        """Processes of all islands together."""
        each = self.processes_per_island
        return self.islands * each if isinstance(each, int) else sum(each)

    @property
    def processes_text(self) -> str:
        """What `SHARDTRAIN_ISLAND_PROCESSES` says."""
        each = self.processes_per_island
        return str(each) if isinstance(each, int) else ",".join(map(str, each))

    def rank_command(self, *options: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What a rank runs, in two lines: the keeper of its log, and the program."""
        keeper = (sys.executable, "-m", "shardtrain.launch.rank", str(self.logs), *options, "--")
        return keeper, (*self.program, *self.arguments)

    def rank_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What every rank's environment must have; what the user has set there himself is kept."""
        names = () if self.interface is None else (INTERFACE, *INTERFACES)
        return {
            PROCESSES: self.processes_text,
            TUNABLES: environ.get(TUNABLES) or THRESHOLDS,
            **{name: environ.get(name) or self.interface or "" for name in names},
        }


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to be run for a job.

    Args:
      lines: the command's words, in the lines that a person reads.
      environment: what the command itself needs, beside the environment of this process.
      files: path -> text, to be written before.
    """

    lines: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command."""
        return tuple(word for line in self.lines for word in line)


def shell_text(launch: Launch) -> str:
    """A launch as text for a shell: can be pasted.

    >>> print(shell_text(Launch(lines=(("mpiexec", "-n", "2"), ("python", "a b.py")))), end="")
    mpiexec -n 2 \\
      python 'a b.py'
    """
    text = ""
    for path, content in launch.files.items():
        folder = shlex.quote(str(path.parent))
        text += f"mkdir -p {folder} && cat > {shlex.quote(str(path))} <<'END'\n{content}END\n"
    lines = [shlex.join(line) for line in launch.lines]
    if launch.environment:
        lines.insert(0, shlex.join(["env", *(f"{k}={v}" for k, v in launch.environment.items())]))
    return text + " \\\n  ".join(lines) + "\n"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts from `a,b` or `a:2,b:1`.

    Raises:
      ValueError: a name or a number is missing, or a name is there twice.

    >>> [(host.name, host.slots) for host in parse_hosts("a:2,b")]
    [('a', 2), ('b', None)]
    """
    return _hosts([word.strip() for word in text.split(",")], f"hosts {text!r}")


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Hosts from a file, one a line: `a`, `a:2` (MPICH, Intel MPI) or `a slots=2` (Open MPI); # comments.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line is not understood, or no host is in it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no hostfile {path}; write one host a line, a or a:2 or a slots=2")
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [re.sub(r"\s+slots\s*=\s*(\d+)(\s+max[-_]slots\s*=\s*\d+)?$", r":\1", line) for line in lines]
    if not any(lines):
        raise ValueError(f"hostfile {path} names no host; write one a line, a or a:2 or a slots=2")
    return _hosts([line for line in lines if line], f"hostfile {path}")


def _hosts(words: Sequence[str], where: str) -> tuple[Host, ...]:
    found = [re.fullmatch(r"([A-Za-z0-9][\w.-]*)(?::([1-9]\d*))?", word) for word in words]
    problems = [
        f"{word!r} is no host; write a name, or name:ranks"
        for word, match in zip(words, found, strict=True)
        if not match
    ]
    names = [match[1] for match in found if match]
    problems += [
        f"{name} is there {names.count(name)} times; write {name}:{names.count(name)} once"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if problems:
        raise problems_error(where, problems)
    return tuple(Host(name=m[1], slots=int(m[2]) if m[2] else None) for m in found if m)


def hosts_problem(num_ranks: int, hosts: Sequence[Host]) -> str | None:
    """Why so many ranks cannot be put on these hosts; None where they can."""
    slots = [host.slots for host in hosts if host.slots is not None]
    if len(slots) == len(hosts) and sum(slots) == num_ranks:
        return None
    each, more = divmod(num_ranks, len(hosts))
    if more:
        lower = each * len(hosts)
        fixes = " or ".join(str(n) for n in (lower, lower + len(hosts)) if n)
        counts = [each + (i < more) for i in range(len(hosts))]
        named = ",".join(f"{host.name}:{n}" for host, n in zip(hosts, counts, strict=True) if n)
        return (
            f"{num_ranks} ranks cannot be shared evenly by {len(hosts)} hosts: {num_ranks} % {len(hosts)} ="
            f" {more}. Use {fixes} ranks, or say how many each gets: {named}"
        )
    small = [f"{host.name}:{host.slots}" for host in hosts if host.slots is not None and host.slots < each]
    if small:
        return (
            f"an even share of {num_ranks} ranks over {len(hosts)} hosts is {each}, and {', '.join(small)}"
            f" take fewer; give slots that add up to {num_ranks}, or {each} or more to each"
        )
    return None


def ranks_by_host(job: Job) -> tuple[tuple[str, int], ...]:
    """(host, how many ranks), in the order of the ranks.

    Slots that add up to the ranks are taken as they are, for unequal hosts; otherwise (a hostfile names
    what a host can take) the ranks are shared evenly, so that islands do not pile up on the first.

    >>> ranks_by_host(Job(arguments=(), islands=2, hosts=parse_hosts("a:8,b:8")))
    (('a', 1), ('b', 1))
    """
    slots = [host.slots or 0 for host in job.hosts]
    if all(slots) and sum(slots) == job.num_ranks:
        return tuple((host.name, n) for host, n in zip(job.hosts, slots, strict=True))
    return tuple((host.name, job.num_ranks // len(job.hosts)) for host in job.hosts)
