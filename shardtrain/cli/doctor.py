"""`shardtrain doctor`: check what a run needs before it starts, in one process or in all ranks of a run."""

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shardtrain.cli.arguments import find_values, parse_words
from shardtrain.errors.exit_codes import DONE, FAILED
from shardtrain.errors.messages import near
from shardtrain.islands.binding import bind_cpus, device_environment
from shardtrain.islands.rank_environment import find_rank_environment

if TYPE_CHECKING:
    from shardtrain.doctor.check import RankContext
    from shardtrain.doctor.runner import CheckResults

NAMES = ("names", "ports", "mpi", "versions", "devices", "binding", "files", "rates", "links")
"""Names of the checks, which are repeated here so that the help needs no jax."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the doctor.

    Args:
      run_dir: folder for runs, whose file system is checked. It need not exist.
      only: run only these checks, separated by commas, such as names,files. All checks are names, ports, mpi,
        versions, devices, binding, files, rates and links.
      quick: skip the slow measurements: rates, links, and writing a large file.
      as_json: print JSON with all collected facts instead of a table.
      patience: seconds to wait for the other ranks at the start and before each check.
    """

    run_dir: Path = Path("runs")
    only: str | None = None
    quick: bool = False
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    patience: float = 60.0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.names if name not in NAMES]:
            raise ValueError(f"there is no check {near(unknown[0], NAMES)}")
        if not 0 < self.patience < math.inf:
            raise ValueError(f"--patience is {self.patience:g}; use seconds above 0, such as 60")

    @property
    def names(self) -> list[str]:
        """Names of the checks to run."""
        asked = NAMES if self.only is None else [word.strip() for word in self.only.split(",")]
        return list(dict.fromkeys(asked))


def main(arguments: Sequence[str]) -> int:
    """Run the checks and print one table for all ranks.

    Returns:
      0, or 1 if something is wrong: on every rank; only on rank 0 if ranks cannot connect.

    Raises:
      ValueError: the name of a check is unknown.
    """
    if find_values(arguments, "--sweep"):
        raise ValueError(
            "there is no --sweep; the OSU micro-benchmarks measure links by message size (mpiexec -n 2"
            " osu_bw, osu_latency), and `shardtrain doctor --only links` compares pairs of ranks"
        )
    options = parse_words(
        tyro.conf.FlagCreatePairsOff[Options],
        list(arguments),
        prog="shardtrain doctor",
        description="Check what a run needs before it starts, and print how to fix what is wrong. Start it as"
        " one process, or as the ranks of a run: mpiexec -n 3 shardtrain doctor, srun shardtrain doctor,"
        " shardtrain launch --islands 2 -- doctor. Exit code 0: nothing is wrong (there may be warnings),"
        " 1: something is wrong, 2: a mistake in the arguments.",
    )
    # the same environment and cores as in `train`: the doctor sees what a run would see
    environment = find_rank_environment(os.environ)
    os.environ.update(device_environment(environment, os.environ))
    given = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    if cores := bind_cpus(environment):
        os.sched_setaffinity(0, cores)
    # a child process watches the start of MPI; it is forked before there are threads
    from shardtrain.doctor.check import RankContext, SingleProcess
    from shardtrain.doctor.start import connect_ranks

    rank, host = environment.rank, environment.host
    alone = RankContext(
        environment=environment,
        hosts=(host,),
        control=SingleProcess(f"rank {rank} (host {host})" if environment.size > 1 else host),
        environ=os.environ,
        run_dir=options.run_dir,
        quick=options.quick,
        given_cores=given,
    )
    contexts = connect_ranks(alone, 1 + len(options.names), options.patience)
    if contexts[0].problem is not None and rank > 0:
        # rank 0 prints the problem; an exit code other than 0 here would make the launcher end rank 0
        return 0
    from shardtrain.doctor.runner import CHECKS, run_checks

    assert tuple(CHECKS) == NAMES, "the help names all checks"
    chosen = {
        n: CHECKS[n] for n in NAMES if n in options.names and not (options.quick and CHECKS[n].measures)
    }
    return _finish(run_checks(chosen, contexts[: 1 + len(chosen)]), contexts[0], options)


def _finish(results: "CheckResults", context: "RankContext", options: Options) -> int:
    """Print the result on one rank, and end all ranks together with the same exit code."""
    if context.rank == min(results.present):
        if options.as_json:
            sys.stdout.write(json_text(results, context))
        else:
            _print(results)
        sys.stdout.flush()
    code = FAILED if results.status == "wrong" else DONE
    if not results.hung:
        return code
    # a check that hangs would block the exit of this process, or MPI_Finalize in all of them
    sys.stdout.flush()
    if context.control.size > 1:
        import time

        from shardtrain.islands.bridge import end_all

        if context.rank != min(results.present):
            time.sleep(5.0)
        end_all(code)
    os._exit(code)


def _print(results: "CheckResults") -> None:
    from rich.console import Console

    from shardtrain.doctor.runner import doctor_table

    width, _ = shutil.get_terminal_size(fallback=(140, 24))
    console = Console() if sys.stdout.isatty() else Console(width=width)
    console.print(doctor_table(results.rows, results.seconds))


def json_text(results: "CheckResults", context: "RankContext") -> str:
    """Format the overall result, the rows and the collected facts as JSON."""
    # scripts may rely on these keys
    rows = [
        {"check": row.check, "what": row.item, "found": row.finding, "verdict": row.status, "do": row.fix}
        for row in results.rows
    ]
    data = {
        "verdict": results.status,
        "ranks": [{"name": n, "host": h} for n, h in zip(context.control.names, context.hosts, strict=True)],
        "present": results.present,
        "rows": rows,
        "seconds": results.seconds,
        "facts": results.facts,
    }
    return json.dumps(data, indent=1) + "\n"
