"""Options that check themselves, and options that one text such as `rank=8,on=q+v` can give."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Self, get_args, get_origin

from shardtrain.errors.field_types import convert_kind, fits, list_hints, wrong_types
from shardtrain.errors.messages import near, problems_error, refuse


@dataclass(frozen=True, kw_only=True)
class CheckedOptions:
    """Options that check themselves: the types of all fields, and their values.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    def __post_init__(self) -> None:
        problems, hints = wrong_types(self), list_hints(type(self))
        # a wrong field has its default now, but without one values cannot be compared
        if all(fits(getattr(self, field.name), hints[field.name]) for field in fields(self)):
            problems += self.list_problems()
        refuse(type(self).__name__, problems)

    def list_problems(self) -> list[str]:
        """List the options that are out of range or do not fit another."""
        return []


@dataclass(frozen=True, kw_only=True)
class CompactOptions(CheckedOptions):
    """Options that one text can give.

    A field of this type also takes the text: `NAME=VALUE,...`, with `+` between the items of a list. If a
    class has subclasses, each with a `kind`, the text begins with `KIND:`. An empty text means None.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Adapters(CompactOptions):
    ...     rank: int
    ...     on: tuple[str, ...] = ("q", "v")
    >>> Adapters.parse("rank=8,on=k+o"), str(Adapters(rank=8))
    (Adapters(rank=8, on=('k', 'o')), 'rank=8')
    >>> Adapters.parse("rnk=8")
    Traceback (most recent call last):
    ValueError: 'rnk=8' cannot be read; write rank=VALUE, and if wanted on:
      - rank is missing
      - there is no 'rnk' (did you mean 'rank'?)
    """

    kind: ClassVar[str] = ""

    def __str__(self) -> str:
        given = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        text = ",".join(f"{name}={_write(value)}" for name, value, default in given if value != default)
        return f"{self.kind}:{text}" if self.kind else text

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form.

        Raises:
          ValueError: lists every unknown, missing and repeated name, and every wrong value.
        """
        if not cls.kind and (kinds := {each.kind: each for each in cls.__subclasses__()}):
            kind, _, text = text.partition(":")
            if kind not in kinds:
                raise ValueError(f"there is no kind {near(kind, kinds)}; write KIND:NAME=VALUE,...")
            return kinds[kind].parse(text)
        hints, known = list_hints(cls), {field.name: field.default for field in fields(cls)}
        parts = [part.partition("=") for part in text.split(",")] if text else []
        pairs = [(name, value) for name, _, value in parts]
        needed = [name for name, default in known.items() if default is MISSING]
        problems = [f"{name} is missing" for name in needed if name not in dict(pairs)]
        problems += [f"there is no {near(name, known)}" for name, _ in pairs if name not in known]
        counts = Counter(name for name, _ in pairs)
        problems += [f"{name} is given {n} times" for name, n in counts.items() if n > 1]
        if not problems:
            return cls(**{name: _read(value, hints[name]) for name, value in pairs})
        usage = ",".join(f"{name}=VALUE" for name in needed)
        more = ", ".join(name for name in known if name not in needed)
        before = f"{cls.kind}:" if cls.kind else ""
        usage = ", and if wanted ".join(filter(None, (before + usage, more)))
        told = f"{before + text!r} cannot be read; write {usage}"
        raise problems_error(told, problems)


def _read(text: str, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return tuple(_read(item, None) for item in text.split("+"))
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _write(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(_write, value))
    # the same for 16 and 16.0, and no + but between items
    return str(value).removesuffix(".0").replace("e+", "e")


def write_compact(value: Any) -> Any:
    """Return the text of compact options, and any other value unchanged."""
    return str(value) if isinstance(value, CompactOptions) else value


def list_plain_options(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, compact options as their texts."""
    return {field.name: _make_plain(getattr(config, field.name)) for field in fields(config)}


def _make_plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, CompactOptions | type):
        return list_plain_options(value)
    return write_compact(value)


def rewrite_texts(kind: type, saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return saved options, with the texts of compact options of a dataclass as they are written now.

    Earlier versions saved these texts as they were given, such as `alpha=16,rank=8` for `rank=8`, and an
    empty text for None.
    """
    found = dict(saved)
    for field, hint in list_hints(kind).items() if is_dataclass(kind) else ():
        text = found.get(name := prefix + field)
        if isinstance(text, str) and any(hasattr(each, "parse") for each in get_args(hint)):
            # a text of thousands of characters was saved as a digest
            with suppress(ValueError):
                found[name] = write_compact(convert_kind(text, hint, field))
    return found
