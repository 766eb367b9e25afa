"""`shardtrain replay RUN --from STEP --to STEP`: compute steps anew whose islands came and went."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardtrain.cli.compilation import cache_programs, set_xla_flags
from shardtrain.cli.run_options import parse_run
from shardtrain.cli.train import TrainOptions
from shardtrain.elastic.command_file import read_command
from shardtrain.elastic.history import ELASTIC, read_history
from shardtrain.errors.exit_codes import DONE, FAILED
from shardtrain.system import terminal

MOST_SHOWN = 10
"""Largest number of arrays that are listed."""

CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Compute steps of an elastic run anew, in one process, and compare the last one bitwise.

    The command of the run is read from its folder, and its run file is executed.

    Args:
      run: the folder of the run.
      first: the step to begin with, which has a checkpoint; or 0.
      last: the last step. If it has no checkpoint, the hash of its parameters is printed.
    """

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    first: Annotated[int, tyro.conf.arg(name="from")]
    last: Annotated[int, tyro.conf.arg(name="to")]


def main(arguments: Sequence[str]) -> int:
    """Replay steps; return 0 if they are equal or not saved, 1 if arrays differ."""
    from shardtrain.cli import set_cpu_devices

    options = tyro.cli(ReplayOptions, args=list(arguments), prog="shardtrain replay")
    folder = options.run.resolve()
    history = read_history(folder)
    command = read_command(folder / ELASTIC)
    words = list(command.arguments)
    set_cpu_devices(words)
    num_devices = max(math.prod(history.find_mesh(name).values()) for name in [*history.members, ""])
    if all(facts.get("device") == CPU for facts in history.members.values()):
        # islands with fewer devices use the first of them
        set_cpu_devices(["--cpu-devices", str(num_devices)])
    flags_text = set_xla_flags(words)
    if not Path(command.folder).is_dir():
        raise ValueError(
            f"the run was started in {command.folder}, which is not there; its run file and data are looked"
            f" for from there. Change folder in {folder / ELASTIC / 'command.json'}"
        )
    os.chdir(command.folder)
    run, _ = parse_run("train", words, TrainOptions)

    import jax

    from shardtrain.trainer.replayed_run import replay_run

    if jax.device_count() < num_devices:
        raise ValueError(f"an island had {num_devices} devices, and there are {jax.device_count()} here")
    with cache_programs(flags_text):
        found = replay_run(run, folder, history, options.first, options.last, _note)
    terminal.out(f"step {options.last}: parameters have the SHA-256 {found.digest}\n")
    where = f"the checkpoint of step {options.last}"
    if not found.has_checkpoint:
        terminal.out(f"there is no checkpoint of step {options.last} to compare with\n")
        return DONE
    if not found.differences:
        terminal.out(f"all arrays are those of {where}, bitwise\n")
        return DONE
    shown = "".join(f"  {text}\n" for text in found.differences[:MOST_SHOWN])
    reasons = "".join(f"  perhaps because of: {text}\n" for text in found.warnings)
    terminal.out(f"{len(found.differences)} arrays differ from {where}:\n{shown}{reasons}")
    return FAILED


def _note(text: str) -> None:
    terminal.err(f"{text}\n")
