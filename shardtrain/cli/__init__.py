"""The command line: `shardtrain COMMAND ...`, one file a command, each with `main(arguments) -> exit code`.

Nothing here imports jax before a command runs: `--cpu-devices` must be set before that.
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from shardtrain import terminal
from shardtrain.exit_codes import COME_AGAIN, DONE, FAILED, MISTAKE
from shardtrain.islands.place import PROCESSES, find_place, find_seat, parse_processes
from shardtrain.layout import near
from shardtrain.user_code import UserCodeFailed, user_traceback

COMMANDS = {
    "train": "train a run, or go on with it",
    "inspect": "show how a run lies on a mesh, without compiling",
    "launch": "start a command as islands: here, on other hosts, or by Slurm",
    "doctor": "look for what stands in the way of a run, before it starts",
    "checkpoint": "list, show, compare, check, thin out, export and import checkpoints",
}
"""Command -> what it does; the module of this package by that name has it."""

END_TOGETHER = ("doctor",)
"""Commands whose ranks all end by themselves, with the same exit code."""

USER_ERROR = MISTAKE
TRACEBACK = "SHARDTRAIN_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      arguments: without the program's name; by default those of this process.

    Returns:
      The exit code: 0 done, 1 when the run, or code of the user's in it, failed, 2 a mistake in what was
      asked (one message, no traceback unless SHARDTRAIN_TRACEBACK=1), 75 when the run shall be started
      again, 128 + the signal's number when a signal ended the run.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        terminal.out(usage())
        return 0 if arguments else USER_ERROR
    command, *rest = arguments
    if command not in COMMANDS:
        terminal.err(f"shardtrain: unknown command {near(command, COMMANDS)}\n\n{usage()}")
        return USER_ERROR
    code = _run(command, rest)
    fine = (DONE, COME_AGAIN, *(128 + number for number in signal.Signals))
    if code not in fine and command not in END_TOGETHER:
        _end_other_ranks(code)
    return code


def _end_other_ranks(code: int) -> None:
    """The others would wait for this one without end."""
    bridge = sys.modules.get("shardtrain.islands.bridge")
    if bridge is not None and bridge.world().size > 1:
        bridge.end_all(code)


def _run(command: str, rest: list[str]) -> int:
    try:
        set_cpu_devices(rest)
        return importlib.import_module(f"shardtrain.cli.{command}").main(rest)
    except (ValueError, OSError) as error:
        if os.environ.get(TRACEBACK):
            raise
        terminal.err(f"shardtrain {command}: {error}\n(the traceback: {TRACEBACK}=1)\n")
        return USER_ERROR
    except UserCodeFailed as failure:
        terminal.err(f"{user_traceback(failure)}shardtrain {command}: {failure}\n")
        return FAILED
    except KeyboardInterrupt:
        terminal.err(f"shardtrain {command}: interrupted; what was saved before is still there\n")
        sys.stderr.flush()
        _end_other_ranks(128 + signal.SIGINT)
        # not through the interpreter's end: compiler threads may be at work, and it would crash
        os._exit(128 + signal.SIGINT)


def usage() -> str:
    """The text of --help."""
    lines = [f"  {name:10} {what}" for name, what in COMMANDS.items()]
    return (
        "usage: shardtrain COMMAND ...\n\n"
        + "\n".join(lines)
        + "\n\nshardtrain COMMAND --help tells its options.\n"
    )


def set_cpu_devices(arguments: list[str]) -> None:
    """Take `--cpu-devices N` out of the arguments and have jax simulate N devices on the CPU.

    `--cpu-devices 2,1` gives each island its own number, by the rank that the launcher gave this process.
    What stands behind `--` is another program's.

    Raises:
      ValueError: N is not a number from 1, or not one number an island.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    names = [i for i in range(end) if arguments[i].split("=")[0] in ("--cpu-devices", "--cpu_devices")]
    if not names:
        return
    start = names[-1]
    word, equals, numbers = arguments[start].partition("=")
    if not equals:
        numbers = arguments[start + 1] if start + 1 < end else ""
    if not all(number.isdecimal() and int(number) for number in numbers.split(",")):
        raise ValueError(
            f"{word} needs a number of devices from 1, as in {word} 8 (or one an island, {word} 2,1);"
            f" got {numbers!r}"
        )
    del arguments[start : start + (1 if equals else 2)]
    number = numbers if "," not in numbers else _of_this_island(word, numbers.split(","))
    flag = f"--xla_force_host_platform_device_count={number}"
    kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(flag.split("=")[0])]
    os.environ["XLA_FLAGS"] = " ".join([*kept, flag])
    os.environ["JAX_PLATFORMS"] = "cpu"


def _of_this_island(word: str, numbers: Sequence[str]) -> str:
    place = find_place(os.environ)
    seat = find_seat(place.rank, place.size, parse_processes(os.environ.get(PROCESSES, "1")))
    if len(numbers) != seat.num_islands:
        raise ValueError(
            f"{word} {','.join(numbers)} is for {len(numbers)} islands, and there are {seat.num_islands};"
            f" give {seat.num_islands} numbers, or one for all"
        )
    return numbers[seat.island]
