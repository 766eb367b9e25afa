"""`shardtrain train RUN`: train a run, or go on with it."""

import logging
import os
import sys
from collections.abc import Sequence

from shardtrain.cli.run_options import parse_run
from shardtrain.islands.place import bind_cpus, device_environment, find_place


def main(arguments: Sequence[str]) -> int:
    """Train.

    Returns:
      0; 128 + the number of the signal that stopped it; 1 where a step was not finite and the run
      says to stop then, or the last checkpoint could not be written.
    """
    # before jax starts: the ranks of a host share its devices and cores
    place = find_place(os.environ)
    os.environ.update(device_environment(place, os.environ))
    if cores := bind_cpus(place):
        os.sched_setaffinity(0, cores)
    run, _ = parse_run("train", arguments)
    from rich.console import Console

    from shardtrain.checkpoint import SaveFailed  # jax starts here, after the options were read
    from shardtrain.islands.membership import join
    from shardtrain.trainer import train

    # Orbax logs a traceback for each array that it could not write; our own line says it once
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            """Nobody reads any more (`| head`): the run goes on, silently, where rich would end it."""
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    try:
        trained = train(run, Terminal(), join(report=_to_stderr))
    except (FloatingPointError, SaveFailed) as failure:
        sys.stderr.write(f"shardtrain train: {failure}\n")
        return 1
    return 0 if trained.stopped_by is None else 128 + trained.stopped_by


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"shardtrain train: {text}\n")
