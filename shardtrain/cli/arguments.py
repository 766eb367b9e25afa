"""Read and check words of the command line before a parser reads them; run commands of a command. No jax."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardtrain.errors.exit_codes import DONE, USAGE_ERROR
from shardtrain.errors.messages import near
from shardtrain.system import terminal

_DASHED = re.compile("[\u2010-\u2015\u2212]+([a-z][a-z-]*)(=.*)?", re.DOTALL)
"""An option after a dash that is no hyphen; word processors and web pages replace two hyphens by one."""

_AXIS = re.compile(r"[a-z]+=-?\d+")


def check_words(words: Sequence[str]) -> None:
    """Refuse options that begin with a dash instead of hyphens, and mesh axes that spaces separate.

    Raises:
      ValueError: there is one.

    >>> check_words(["run.py", "--mesh", "data=2", "tensor=2"])
    Traceback (most recent call last):
      ...
    ValueError: --mesh has 'data=2' and 'tensor=2' as two words; join axes by commas: --mesh data=2,tensor=2
    """
    for word in words:
        if found := _DASHED.fullmatch(word):
            raise ValueError(
                f"{word!r} begins with a dash that is no hyphen; write --{found[1]}{found[2] or ''}"
            )
    parts = [
        part for word in words for part in (word.split("=", 1) if word.startswith("--mesh=") else [word])
    ]
    for name, first, after in zip(parts, parts[1:], parts[2:], strict=False):
        if name == "--mesh" and "=" in first and _AXIS.fullmatch(after):
            raise ValueError(
                f"--mesh has {first!r} and {after!r} as two words; join axes by commas:"
                f" --mesh {first.rstrip(',')},{after}"
            )


def find_values(words: Sequence[str], *names: str) -> list[str]:
    """Return the values of an option, given by any of its names, in the order of the command line.

    >>> find_values(["run.py", "--xla_preset=none", "--mesh", "data=2"], "--xla-preset")
    ['none']
    """
    return [
        value if equals else next(iter(words[number + 1 :]), "")
        for number, word in enumerate(words)
        for name, equals, value in [word.partition("=")]
        if name.replace("_", "-") in names
    ]


def list_too_small(values: Mapping[str, float | None], least: int = 1) -> list[str]:
    """Return a problem for each option below the least value; None means that it was not given.

    >>> list_too_small({"batch": 0, "top_k": None})
    ['--batch is 0; use 1 or more']
    """
    return [
        f"--{name.replace('_', '-')} is {value}; use {least} or more"
        for name, value in values.items()
        if value is not None and value < least
    ]


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
    import tyro  # most words are read without it

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
