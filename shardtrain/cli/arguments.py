"""Read and check words of the command line before a parser reads them; run commands of a command. No jax."""

import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any

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


def parse_words(kind: Any, words: Sequence[str], **how: Any) -> Any:
    """Parse the options of a command with tyro; a list option that is given several times adds up.

    Args:
      kind: the class of the options.
      words: the command line.
      **how: further arguments of `tyro.cli`.

    Returns:
      An instance of the class.

    Raises:
      ValueError: see `join_lists`.
      SystemExit: after --help, or if the options cannot be parsed.
    """
    import tyro  # most words are read without it

    return tyro.cli(kind, args=join_lists(words, set(_list_options(kind))), **how)


_OPTION = re.compile("--?[A-Za-z].*", re.DOTALL)
"""A word that is an option, and no value such as -1."""


def join_lists(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Move the values of each list option behind its first occurrence; a parser keeps only the last one's.

    Args:
      words: the command line.
      names: names of the list options.

    Raises:
      ValueError: a value to move begins with a hyphen, so that it would be an option there.

    >>> join_lists(["--data", "a", "b", "--steps", "3", "--data=c"], {"--data"})
    ['--data', 'a', 'b', 'c', '--steps', '3']
    """
    groups: list[list[str]] = [[]]
    first: dict[str, list[str]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if not _OPTION.fullmatch(word):
            groups[-1].append(word)
        elif name in first:
            if _OPTION.fullmatch(value):
                raise ValueError(
                    f"{name} is given twice, and {value!r} begins with a hyphen; give that first:"
                    f" {name}={value}"
                )
            # the values that follow go there too
            groups.append(first[name])
            groups[-1] += [value] if equals else []
        else:
            groups.append([word])
            if name in names:
                first[name] = groups[-1]
    different = {id(group): group for group in groups}
    return [word for group in different.values() for word in group]


def _list_options(kind: Any) -> Iterator[str]:
    """Yield the names of the options of a class, and of classes in it, whose number of values is free."""
    import tyro

    kind = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
    for field, hint in typing.get_type_hints(kind, include_extras=True).items():
        own, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(own):
            yield from _list_options(own)
        elif tyro.conf.UseAppendAction not in notes and any(map(_is_free_list, [own, *typing.get_args(own)])):
            named = (getattr(note, "name", None) for note in notes)
            name = next((name for name in named if isinstance(name, str)), field)
            yield f"--{name.replace('_', '-')}"


def _is_free_list(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    return origin in (list, set, frozenset, dict) or (origin is tuple and ... in typing.get_args(kind))


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
    return run(parse_words(kind, rest, prog=f"{program} {name}"))


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
