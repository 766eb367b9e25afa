"""Make command line options of the fields of dataclasses, parse them (with tyro), and apply them.

The name of an option is the path of its field, its help is the field's entry in the docstring of its class,
and its default is the field's value. Next: `run_options.py`.
"""

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import docstring_parser
import tyro

from shardtrain.cli.arguments import parse_words
from shardtrain.errors.options import write_compact
from shardtrain.functional.model import Model
from shardtrain.functional.nnx_model import is_module


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldOption:
    """An option that sets one field.

    Args:
      path: names of the nested fields, such as "optimizer.learning_rate.peak".
      kind: the type that is parsed.
      default: the current value of the field.
      help: the help text.
      short: a short name, without the hyphens in front. None means that the path is the name.
    """

    path: str
    kind: Any
    default: Any
    help: str | None
    short: str | None = None

    @property
    def name(self) -> str:
        """The name that the help shows, with hyphens.

        >>> FieldOption(path="run_dir", kind=str, default="", help=None).name
        '--run-dir'
        """
        return format_flag(self.short or self.path)


def field_options(
    value: Any,
    prefix: str = "",
    skip: Sequence[str] = (),
    texts: Mapping[str, Callable[[Any], str | None]] = types.MappingProxyType({}),
) -> Iterator[FieldOption]:
    """Yield an option for each field of a dataclass and of nested dataclasses whose value text can express.

    Args:
      value: the dataclass.
      prefix: prefix of each path.
      skip: paths to leave out, with all paths below them.
      texts: path -> a function that formats the field's value as text; its option then takes text.
    """
    hints, helps = typing.get_type_hints(type(value), include_extras=True), field_helps(type(value))
    for field in dataclasses.fields(value):
        path, current = f"{prefix}{field.name}", write_compact(getattr(value, field.name))
        if path in skip or not field.init:
            continue
        kind = _plain_kind(hints[field.name], current)
        nested = {}
        if path in texts:
            current = texts[path](current)
            kind = str | None if type(None) in typing.get_args(kind) else str
        else:
            nested = _find_nested(current)
        for key, inner in nested.items():
            yield from field_options(inner, f"{path}.{key}", skip, texts)
        if not nested and is_plain(current) and kind is not type(None):
            yield FieldOption(path=path, kind=kind, default=current, help=helps.get(field.name))


def _find_nested(value: Any) -> dict[str, Any]:
    """Return prefix -> dataclass: the value itself, or the items of a list or dict, if they are options."""
    if isinstance(value, Mapping) and value and all(map(_has_options, value.values())):
        return {f"{name}.": item for name, item in value.items()}
    if isinstance(value, list | tuple) and value and all(map(_has_options, value)):
        return {f"{number}.": item for number, item in enumerate(value)}
    return {"": value} if _has_options(value) else {}


def _has_options(value: Any) -> bool:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    return not isinstance(value, Model) and not is_module(value)


def is_plain(value: Any) -> bool:
    """Return whether text can express a value: None, a number, text, a path, or a list or dict of them.

    >>> is_plain((1, "a")), is_plain([object()])
    (True, False)
    """
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    if isinstance(value, Mapping):
        return all(map(is_plain, [*value.keys(), *value.values()]))
    return value is None or isinstance(value, bool | int | float | str | Path | Enum)


def _plain_kind(hint: Any, current: Any) -> Any:
    """Remove functions and dataclasses, which text cannot express, from a type hint."""
    if hint is Any:
        return type(current)
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    kinds = [
        str if hasattr(kind, "parse") else kind
        for kind in typing.get_args(hint)
        if hasattr(kind, "parse")
        or (typing.get_origin(kind) is not Callable and not dataclasses.is_dataclass(kind))
    ]
    return functools.reduce(operator.or_, kinds) if kinds else hint


@functools.lru_cache
def field_helps(kind: type) -> dict[str, str]:
    """Return field -> its help text, from the docstrings of a class and its bases."""
    return {
        found.arg_name: " ".join(found.description.split())
        for base in reversed(kind.__mro__)
        if base is not object
        for found in docstring_parser.parse(base.__doc__ or "").params
        if found.description
    }


def parse_options(options: Sequence[FieldOption], words: Sequence[str], prog: str) -> dict[str, Any]:
    """Parse the command line.

    Args:
      options: the options.
      words: the command line; an option may be given by its name or its path.
      prog: the program's name in messages.

    Returns:
      The path of each option that changes its field -> the new value.

    Raises:
      SystemExit: with code 2 if the options cannot be parsed.
    """
    parsed = parse_words(
        dataclasses.make_dataclass("Options", map(_member, options), kw_only=True),
        _spell(options, words),
        # show the type that the run has of a union, and hide fields that only Python can set; a search for
        # help in comments would take as long as the rest, and these classes have no source
        config=(tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed, tyro.conf.HelptextFromCommentsOff),
        prog=prog,
    )
    found = {option.path: getattr(parsed, _identifier(option.path)) for option in options}
    return {option.path: found[option.path] for option in options if found[option.path] != option.default}


def _member(option: FieldOption) -> Any:
    """Return a field of the dataclass that tyro parses, for `make_dataclass`."""
    shown = tyro.conf.arg(name=option.short or option.path, help=option.help, prefix_name=False)
    field = dataclasses.field(default_factory=lambda: option.default)
    return _identifier(option.path), Annotated[option.kind, shown], field


def _identifier(name: str) -> str:
    return name.replace(".", "__").replace(" ", "_")


def format_flag(name: str) -> str:
    """Return the option of a path or a short name.

    >>> format_flag("run_dir")
    '--run-dir'
    """
    return f"--{name.replace('_', '-')}"


def _spell(options: Sequence[FieldOption], words: Sequence[str]) -> list[str]:
    """Replace paths by the names that tyro knows, and `True` or `False` after a flag by its two forms."""
    names = {format_flag(option.path): option.name for option in options}
    paths = {option.name for option in options if Path in (option.kind, *typing.get_args(option.kind))}
    flags = {option.name for option in options if option.kind is bool}
    spelled: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        before = spelled[-1] if spelled else ""
        if (before in paths and not word) or (names.get(name, name) in paths and equals and not value):
            raise ValueError(f"{name or before} is ''; give a path, such as . for the current folder")
        if spelled and spelled[-1] in flags and word in ("True", "False"):
            # the last dot is where a negated flag gets its "no-"
            scope, dot, last = spelled[-1].removeprefix("--").rpartition(".")
            spelled[-1] = f"--{scope}{dot}{'' if word == 'True' else 'no-'}{last}"
        elif name.startswith("--"):
            spelled.append(names.get(name.replace("_", "-"), name) + equals + value)
        else:
            spelled.append(word)
    return spelled


def replace_fields(value: Any, changes: Mapping[str, Any]) -> Any:
    """Return a dataclass, or list of dataclasses, with some of its nested fields replaced.

    Args:
      value: the dataclass.
      changes: path -> new value of the field.

    >>> option = FieldOption(path="a", kind=str, default="", help=None)
    >>> replace_fields(option, {"path": "b"}).path
    'b'
    """
    inner: dict[str, dict[str, Any]] = {}
    for path, new in changes.items():
        name, _, rest = path.partition(".")
        inner.setdefault(name, {})[rest] = new
    if isinstance(value, list | tuple):
        items = [replace_fields(item, inner.get(str(number), {})) for number, item in enumerate(value)]
        return type(value)(items)
    if isinstance(value, Mapping):
        return {name: replace_fields(item, inner.get(name, {})) for name, item in value.items()}
    replaced = {
        name: below[""] if "" in below else replace_fields(getattr(value, name), below)
        for name, below in inner.items()
    }
    return dataclasses.replace(value, **replaced) if replaced else value
