"""Check the fields of a dataclass against their type hints, and convert unambiguous values in place.

A dataclass calls `wrong_types(self)` first in its `__post_init__`, and checks ranges itself.
"""

import math
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", Path: "a path"}
"""Type -> its name in errors."""

MOST_SHOWN, MOST_SUGGESTIONS = 80, 4
"""Largest number of characters of a value in an error, and of suggestions."""

NEWLINE = "\n"


class WrongType(ValueError):
    """A value has another type than its field; the text says what to write instead."""


def wrong_types(value: Any) -> list[str]:
    """List the fields of a dataclass whose values do not have the types of their hints.

    Unambiguous values are converted in place: a numpy scalar, text for a path or `CompactOptions`, a list for
    a tuple, and the short form of a dataclass (its static method `short`: value -> fields). A wrong field
    gets its default, so that the caller can check the ranges of other fields before it raises.

    Args:
      value: the dataclass, in its `__post_init__`.

    Returns:
      One problem for each such field, in order.
    """
    problems = []
    hints = list_hints(type(value))
    for field in fields(value):
        given = getattr(value, field.name)
        try:
            object.__setattr__(value, field.name, convert_kind(given, hints[field.name], field.name))
        except WrongType as error:
            problems.append(str(error))
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if default is not MISSING:
                object.__setattr__(value, field.name, default)
    return problems


def too_small(value: Any, **least: int) -> list[str]:
    """List the attributes that are below their smallest allowed numbers.

    >>> too_small(slice(0, -1), start=0, stop=1)
    ['stop is -1; use 1 or more']
    """
    given = {name: getattr(value, name) for name in least}
    return [
        f"{name} is {number}; use {least[name]} or more"
        for name, number in given.items()
        if isinstance(number, int | float) and number < least[name]
    ]


@lru_cache
def list_hints(kind: type) -> dict[str, Any]:
    """Return the type hint of each field of a dataclass."""
    return typing.get_type_hints(kind)


def convert_kind(value: Any, hint: Any, name: str) -> Any:
    """Convert a value to its type hint.

    Raises:
      WrongType: it has another type; the text names the field, the value and what to write.

    >>> convert_kind("runs/a", Path | None, "run_dir")
    PosixPath('runs/a')
    >>> convert_kind("3e-4", float, "peak")
    Traceback (most recent call last):
    shardtrain.errors.field_types.WrongType: peak is '3e-4'; give a number: peak=0.0003
    """
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    # if numpy is not loaded, no value is one of its scalars; options alone must not load it
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.generic):
        value = value.item()
    for option in options:
        if _fits(value, option):
            return _convert(value, option, name)
    for option in options:
        if is_dataclass(option) and hasattr(option, "short") and (made := _from_short(option, value, name)):
            return made
    raise WrongType(_format_problem(value, options, name))


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value fits a type hint; strict for numbers: True is not 1, and nan is not a number.

    >>> fits(1, float), fits(True, int), fits(None, int | None), fits([1, "a"], tuple[int, ...])
    (True, False, True, False)
    """
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    return any(_fits(value, option) for option in options)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value fits a hint that is not a union."""
    origin = typing.get_origin(hint) or hint
    if origin is Any or isinstance(origin, typing.TypeVar):
        return True
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in typing.get_args(hint))
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if origin is int:
        return type(value) is int
    if origin is Path:
        return isinstance(value, str | Path) and bool(str(value))
    if origin is tuple:
        return isinstance(value, list | tuple) and not _wrong_items(value, hint)
    if origin is Callable:
        return callable(value)
    return isinstance(value, origin) or (hasattr(origin, "parse") and isinstance(value, str))


def _wrong_items(value: Sequence[Any], hint: Any) -> list[int]:
    """Return the indices of items that do not fit a `tuple[X, ...]` or `tuple[X, Y]`.

    For a list of another length this includes the first superfluous or missing index.
    """
    kinds = _kinds(hint, len(value))
    wrong = [i for i, (item, kind) in enumerate(zip(value, kinds, strict=False)) if not fits(item, kind)]
    return wrong if len(kinds) == len(value) else [*wrong, min(len(kinds), len(value))]


def _kinds(hint: Any, num_items: int) -> tuple[Any, ...]:
    """Return the type of each item of a tuple; `num_items` types for a tuple of any length.

    >>> _kinds(tuple[int, ...], 2), _kinds(tuple[int, str], 3)
    ((<class 'int'>, <class 'int'>), (<class 'int'>, <class 'str'>))
    """
    kinds = typing.get_args(hint)
    return kinds[:1] * num_items if kinds[-1:] == (...,) else kinds


def _convert(value: Any, hint: Any, name: str) -> Any:
    if hint is Path:
        return Path(value)
    if isinstance(value, str) and hasattr(hint, "parse"):
        with _naming(name):
            return hint.parse(value) if value else None
    if typing.get_origin(hint) is tuple:
        kinds = _kinds(hint, len(value))
        return tuple(convert_kind(item, kind, name) for item, kind in zip(value, kinds, strict=True))
    return value


def _from_short(kind: Any, value: Any, name: str) -> Any:
    """Return the dataclass of a short form; None if the value is not a short form."""
    with _naming(name):
        given = kind.short(value)
        return kind(**given) if isinstance(given, dict) else given


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the field in the errors of a dataclass that is made from another form."""
    try:
        yield
    except ValueError as error:
        raise WrongType(f"{name}: {str(error).replace(NEWLINE, NEWLINE + '  ')}") from error


def _format_problem(value: Any, options: Sequence[Any], name: str) -> str:
    """Format the error."""
    shown = f"{name} is {_shorten(value)}"
    # a number or a word, such as best, is described like other unions; so are a list or a word
    others = {int, float, tuple} & {typing.get_origin(option) or option for option in options}
    words = None if others else next(filter(_is_literal, options), None)
    if words is not None:
        allowed = ", ".join(_literals(words))
        return f"{shown}; allowed: {allowed}{' or None' if type(None) in options else ''}"
    if any(map(_is_literal, options)):  # a word after a list would read as one of its items
        options = sorted(options, key=lambda option: typing.get_origin(option) is tuple)
    wanted = " or ".join(_format_wanted(option) for option in options)
    return f"{shown}; give {wanted}{_suggest(value, options, name)}"


def _shorten(value: Any) -> str:
    brief = reprlib.Repr()
    brief.maxother = brief.maxstring = MOST_SHOWN
    return brief.repr(value)


def _is_literal(option: Any) -> bool:
    return typing.get_origin(option) is Literal


def _literals(option: Any) -> list[str]:
    return [word if isinstance(word, str) else repr(word) for word in typing.get_args(option)]


def _format_wanted(option: Any) -> str:
    if _is_union(option):
        return " or ".join(map(_format_wanted, typing.get_args(option)))
    if _is_literal(option):
        return " or ".join(_literals(option))
    origin: Any = typing.get_origin(option) or option
    if origin is type(None):
        return "None"
    if origin is Callable:
        return "a function"
    if origin is tuple:
        kinds = typing.get_args(option)
        length = "" if kinds[-1] is ... else f" of {len(kinds)}"
        return (
            f"a list{length}, each item {' or '.join(dict.fromkeys(map(_format_wanted, _kinds(option, 1))))}"
        )
    name: str = getattr(origin, "__name__", str(origin))
    if is_dataclass(origin):
        return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"
    if origin is Mapping:
        return "a dict"
    return WORDS.get(origin, f"a {name}")


def _suggest(value: Any, options: Sequence[Any], name: str) -> str:
    """Return a suggestion of what to write for this value; "" if there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return ", finite"
    for option in options:
        if option in (int, float) and (number := _parse_number(value, option)) is not None:
            return f": {name}={number!r}"
        if typing.get_origin(option) is tuple and _fits((value,), option):
            return f": {name}=({_shorten(value)},)"
        short: Any = getattr(option, "short", None)
        if short and isinstance(value, str) and (number := _parse_number(value, float)) is not None:
            return f": {name}={number!r}" if short(number) else ""
        if is_dataclass(option):
            fitting = _suggest_fields(option, value)
            return f": {' or '.join(f'{name}={text}' for text in fitting)}" if fitting else ""
    return ""


def _parse_number(value: Any, kind: type) -> Any:
    """Return the number that a text or float represents exactly; None if it represents none."""
    if not isinstance(value, str | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number) or (kind is int and number != int(number)):
        return None
    return kind(number)


def _suggest_fields(kind: Any, value: Any) -> list[str]:
    """Return ways to write this dataclass with the value: fields of a dict, or a field that fits."""
    hints = list_hints(kind)
    names = [field.name for field in fields(kind)]
    if isinstance(value, Mapping):
        if not value or any(name not in names for name in value):
            return []
        return [f"{kind.__name__}({', '.join(f'{key}={_shorten(item)}' for key, item in value.items())})"]
    if value is None or isinstance(value, bool):
        return []
    found = [f"{kind.__name__}({name}={_shorten(value)})" for name in names if _takes(hints[name], value)]
    return found if len(found) <= MOST_SUGGESTIONS else []


def _takes(hint: Any, value: Any) -> bool:
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    return any(_fits(value, option) and _reads(option, value) for option in options if option is not Any)


def _reads(option: Any, value: Any) -> bool:
    """Return whether a text is one that a class with a text form can read; True for all other values."""
    if not (isinstance(value, str) and hasattr(option, "parse")):
        return True
    try:
        option.parse(value)
    except ValueError:
        return False
    return True
