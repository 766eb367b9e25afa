"""The command line `shardtrain COMMAND ...`: one file per command, with `main(arguments) -> exit code`.

Nothing here imports jax before a command runs: `--cpu-devices` must be set before that.
"""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from shardtrain.cli.arguments import check_words
from shardtrain.errors.exit_codes import DONE, FAILED, TEMPORARY_FAILURE, USAGE_ERROR
from shardtrain.system import terminal
from shardtrain.system.standard_streams import close_quietly, escape_unencodable, fill_closed
from shardtrain.system.stop_signals import StopSignals, write_raw

COMMANDS = {
    "train": "train a run, or resume it",
    "inspect": "show how a run is sharded over a mesh, without its devices",
    "plan": "rank the strategies of a run on devices that this machine need not have",
    "advise": "answer questions about devices, batches, saves and hosts by published formulas",
    "calibrate": "measure this machine's devices, for a plan",
    "launch": "start a command as islands: here, on other hosts, or as a batch job",
    "leave": "ask an island of an elastic run to leave, or list its islands",
    "doctor": "check what a run needs before it starts",
    "checkpoint": "list, show, compare, verify, prune, export and import checkpoints",
    "evaluate": "evaluate a trained model on other data, or by questions",
    "generate": "continue texts with a trained model",
    "report": "show what happened in a run whose islands came and went",
    "replay": "compute steps of such a run anew, and compare them bitwise",
    "data": "tokenize a corpus, train a tokenizer, list, show, measure and check data",
}
"""Command -> its description; the module of that name has its `main`."""

FORK = ("launch", "doctor")
"""Commands that fork processes, and therefore must not start threads before."""

CLEAN_UP = ("checkpoint", "data")
"""Commands that remove unfinished files if a signal ends them."""

END_TOGETHER = ("doctor",)
"""Commands whose ranks agree on an exit code, so that none has to end the others."""

POOL_THREADS, THREADS_OF_A_DEVICE = "PJRT_NPROC", 8
"""The variable that sets the number of threads of jax's CPU client, and the threads that a device needs.

Collectives of different groups of devices may run in any order, and each waits in a thread. With too few
threads all wait for a device that has no thread left, and XLA ends the process. Two devices are one group;
they keep XLA's number, one thread a core, which is the fastest.
"""

HELP = ("--help", "-h")
USER_ERROR = USAGE_ERROR
TRACEBACK = "SHARDTRAIN_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      arguments: the command line without the program's name; by default, the command line of this process.

    Returns:
      The exit code: 0 if done; 1 if the run, or the user's code in it, failed; 2 for a mistake in the
      arguments (one message, no traceback unless SHARDTRAIN_TRACEBACK=1); 75 if the run should be started
      again; 128 + the signal's number if a signal ended the run.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    fill_closed()
    escape_unencodable()
    command, *rest = arguments or HELP
    # before large imports, during which Ctrl-C would end the process at once
    stop = StopSignals(
        lambda number: end_at_once(command, number), listens=command not in FORK, unwinds=command in CLEAN_UP
    )
    with stop:
        code = _run(command, rest, stop) or (DONE if arguments else USER_ERROR)
    fine = (DONE, TEMPORARY_FAILURE, *(128 + number for number in signal.Signals))
    if code not in fine and command not in END_TOGETHER:
        _end_other_ranks(code)
    return code


def end_at_once(command: str, number: signal.Signals) -> None:
    """End this process and the other ranks because of a signal, without saving.

    It raises no exception: libraries may catch it, and the normal exit of the interpreter may crash while
    compiler threads run.
    """
    how = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    write_raw(f"shardtrain {command}: {how}; what was saved before is still there\n")
    with contextlib.suppress(Exception):  # MPI may be starting or finalizing
        _end_other_ranks(128 + number)
    os._exit(128 + number)


def _end_other_ranks(code: int) -> None:
    """Abort the other ranks of the job, which would wait for this one forever."""
    bridge: Any = sys.modules.get("shardtrain.islands.bridge")
    # a bridge that is being imported has no `end_all` yet
    if hasattr(bridge, "end_all") and bridge.MPI.COMM_WORLD.size > 1:
        bridge.end_all(code)


def _run(command: str, rest: list[str], stop: StopSignals) -> int:
    from shardtrain.errors.compiler_errors import compiler_text, platform_text
    from shardtrain.errors.messages import near
    from shardtrain.errors.user_code import UserCodeFailed, user_traceback

    if command not in (*COMMANDS, *HELP):
        terminal.err(f"shardtrain: unknown command {near(command, COMMANDS)}\n\n{usage()}")
        return USER_ERROR
    try:
        code = _command(command, rest, stop)
        sys.stdout.flush()
    except UserCodeFailed as failure:
        terminal.err(f"{user_traceback(failure)}shardtrain {command}: {failure}\n")
        return FAILED
    except KeyboardInterrupt:
        end_at_once(command, stop.received or signal.SIGINT)
        raise
    except Exception as error:
        text = compiler_text(error) or platform_text(error)
        if os.environ.get(TRACEBACK) or not (text or isinstance(error, ValueError | OSError)):
            raise
        return _report(command, error, text)
    return code


def _command(command: str, rest: list[str], stop: StopSignals) -> int:
    if command in HELP:
        terminal.out(usage())
        return DONE
    check_words(rest)
    given = list(rest)
    set_cpu_devices(rest)
    own = {"stop": stop, "given_arguments": given} if command == "train" else {}
    return importlib.import_module(f"shardtrain.cli.{command}").main(rest, **own)


def _report(command: str, error: Exception, text: str | None) -> int:
    """Print an error, or the text that explains it, and return its exit code."""
    code = exit_code(error)
    # no message if the reader closed the pipe (`| head`)
    if not isinstance(error, BrokenPipeError):
        terminal.err(f"shardtrain {command}: {text or error}\n(the traceback: {TRACEBACK}=1)\n")
    close_quietly(sys.stdout)
    return code


def exit_code(error: Exception) -> int:
    """Return the exit code for an error: 2 for a usage error, 1 for a failure of the machine.

    >>> [exit_code(each) for each in (ValueError("no"), FileNotFoundError(2, "no"), OSError(28, "full"))]
    [2, 2, 1]
    """
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    # an OSError without a number was raised by this package, for a usage error
    asked = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
    by_user = isinstance(error, (ValueError, *asked)) or (isinstance(error, OSError) and error.errno is None)
    return USER_ERROR if by_user else FAILED


def usage() -> str:
    """Return the text of --help."""
    lines = [f"  {name:10} {what}" for name, what in COMMANDS.items()]
    return (
        "usage: shardtrain COMMAND ...\n\n"
        + "\n".join(lines)
        + "\n\nshardtrain COMMAND --help shows its options.\n"
    )


def set_cpu_devices(arguments: list[str]) -> None:
    """Remove `--cpu-devices N` from the arguments and let jax simulate N devices on the CPU.

    `--cpu-devices 2,1` gives each island its own number; the island follows from the rank of this process.
    More than two have `THREADS_OF_A_DEVICE` threads each, unless the environment has a number of its own.
    Arguments after `--` belong to another program.

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
    # the last one counts, as of every option
    for name in reversed(names):
        del arguments[name : name + (1 if "=" in arguments[name] else 2)]
    number = numbers if "," not in numbers else _select_island_devices(word, numbers.split(","))
    flag = f"--xla_force_host_platform_device_count={number}"
    other_flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(flag.split("=")[0])]
    os.environ["XLA_FLAGS"] = " ".join([*other_flags, flag])
    os.environ["JAX_PLATFORMS"] = "cpu"
    # a device that waits in a collective keeps its thread
    if int(number) > 2:
        os.environ.setdefault(POOL_THREADS, str(THREADS_OF_A_DEVICE * int(number)))


def _select_island_devices(word: str, numbers: Sequence[str]) -> str:
    from shardtrain.islands.rank_environment import find_rank_environment
    from shardtrain.islands.rank_placement import (
        PROCESSES,
        find_placement,
        parse_processes,
        pick_number,
    )

    place = find_rank_environment(os.environ)
    placement = find_placement(place.rank, place.size, parse_processes(os.environ.get(PROCESSES, "1")))
    return pick_number(word, numbers, placement.island, placement.num_islands)
