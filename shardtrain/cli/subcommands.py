"""Run a command that consists of commands, such as `shardtrain data ls`, and print its help."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro

from shardtrain.errors.exit_codes import DONE, USAGE_ERROR
from shardtrain.errors.messages import near
from shardtrain.system import terminal

Subcommands = Mapping[str, tuple[type, Callable[[Any], int]]]
"""Name -> the class of its options, and the function that runs it and returns the exit code."""


def run_subcommand(program: str, word: str, commands: Subcommands, arguments: Sequence[str]) -> int:
    """Run the command that the first argument names; return its exit code, or 2 if there is no argument.

    Args:
      program: the words before the arguments, such as "shardtrain data".
      word: name of the first argument in the help, such as "COMMAND".
      commands: the commands.
      arguments: the command line after `program`.

    Raises:
      ValueError: there is no command of that name.
    """
    wants_help = bool({"-h", "--help"} & set(arguments))
    usage = usage_text(program, word, {name: kind for name, (kind, _) in commands.items()})
    if not arguments or (wants_help and arguments[0] not in commands):
        terminal.out(usage)
        return DONE if wants_help else USAGE_ERROR
    name, *rest = arguments
    if name not in commands:
        raise ValueError(f"there is no {word.lower()} {near(name, commands)}\n{usage}")
    kind, run = commands[name]
    return run(tyro.cli(kind, args=rest, prog=f"{program} {name}"))


def usage_text(program: str, word: str, kinds: Mapping[str, type]) -> str:
    """Return the usage of a program: each of its commands with the first line of its options' docstring.

    >>> class Ls:
    ...     "List the files."
    >>> print(usage_text("shardtrain data", "COMMAND", {"ls": Ls}))
    usage: shardtrain data COMMAND ...
    <BLANKLINE>
      ls List the files.
    <BLANKLINE>
    shardtrain data COMMAND --help shows its options.
    <BLANKLINE>
    """
    width = max(map(len, kinds))
    lines = [f"  {name:{width}} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in kinds.items()]
    shown = "\n".join(lines)
    return f"usage: {program} {word} ...\n\n{shown}\n\n{program} {word} --help shows its options.\n"
