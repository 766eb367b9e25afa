"""Messages between islands, and their form as JSON: checked strictly, because a stranger may have sent them.

A message has a header, made here, and perhaps a payload, which the transport carries beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from shardtrain.elastic.epoch import IF_GIVEN, Epoch, Peer, Report

MOST_TEXT, MOST_ITEMS = 4096, 1 << 20
"""Largest number of characters of a text and of items of a list in a header."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A chunk of the sum of a step, in one hop of the ring; the payload is its numbers."""

    epoch: int
    step: int
    hop: int


@dataclass(frozen=True, kw_only=True)
class Vote:
    """The sender holds the whole sum of a step; and what it wants to happen once the step is applied.

    Args:
      epoch: the epoch of the sum.
      step: its step.
      saves: a checkpoint.
      stops: the end of the run.
      changes: a new epoch, to let islands in or out or to deal slots anew.
      digest: of its parameters before the step, KIND/HASH, see `epoch.find_wrong`; "" if it has none.
    """

    epoch: int
    step: int
    saves: bool = False
    stops: bool = False
    changes: bool = False
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Bye:
    """The sender has applied the last step of the run."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class Announce:
    """The sender has read this epoch in the folder, which may show new files late to others."""

    epoch: Epoch


@dataclass(frozen=True, kw_only=True)
class Join:
    """The sender wants to become a member.

    Args:
      peer: the sender.
      donor: the member that it wants the state from.
      has_state: whether it has received the state.
      ready: whether it has applied all steps that the donor has.
    """

    peer: Peer
    donor: str
    has_state: bool
    ready: bool


@dataclass(frozen=True, kw_only=True)
class Update:
    """The sum of a committed step for an island that watches; the payload is all of its numbers."""

    epoch: int
    step: int


Message = Chunk | Vote | Report | Bye | Announce | Join | Update
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Message)}


class HeaderError(ValueError):
    """A header is not that of a message."""


def to_header(message: Message) -> dict[str, Any]:
    """Return a message as values of JSON.

    >>> to_header(Chunk(epoch=3, step=20, hop=1))
    {'kind': 'chunk', 'epoch': 3, 'step': 20, 'hop': 1}
    """
    return {"kind": type(message).__name__.lower(), **to_json(message)}


def from_header(header: Any) -> Message:
    """Return the message of a header.

    Raises:
      HeaderError: the header has another form than `to_header` makes.

    >>> from_header({"kind": "bye", "epoch": "3"})
    Traceback (most recent call last):
    ...
    shardtrain.elastic.messages.HeaderError: bye.epoch must be int, not '3'
    """
    kind = header.get("kind") if isinstance(header, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise HeaderError(f"a header needs a kind, one of {', '.join(KINDS)}, not {_show(kind)}")
    values = {name: value for name, value in header.items() if name != "kind"}
    return from_json(values, KINDS[kind], kind)


def to_json(value: Any) -> Any:
    """Return a dataclass as values of JSON; an epoch file has this form."""
    if is_dataclass(value):
        return {
            field.name: to_json(found)
            for field in fields(value)
            if (found := getattr(value, field.name)) != field.default or field.metadata != IF_GIVEN
        }
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def from_json(value: Any, kind: Any, path: str) -> Any:
    """Return the value of a type that JSON holds.

    Args:
      value: what JSON holds.
      kind: int, str, bool, a tuple type of any length, or a dataclass.
      path: its name in errors.

    Raises:
      HeaderError: the value has another type, a field is missing or unknown, or a number is negative.
    """
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or len(value) > MOST_ITEMS:
            raise HeaderError(f"{path} must be a list of at most {MOST_ITEMS} items, not {_show(value)}")
        return tuple(from_json(item, get_args(kind)[0], f"{path}[{i}]") for i, item in enumerate(value))
    if not isinstance(kind, type) or not is_dataclass(kind):
        # the type itself: a bool is an int too
        if type(value) is not kind or (kind is int and value < 0) or (kind is str and len(value) > MOST_TEXT):
            raise HeaderError(f"{path} must be {kind.__name__}, not {_show(value)}")
        return value
    hints = _hints(kind)
    needed = {field.name for field in fields(kind) if field.metadata != IF_GIVEN}
    if not isinstance(value, dict) or not needed <= value.keys() <= hints.keys():
        raise HeaderError(f"{path} must have the fields {', '.join(hints)}, not {_show(value)}")
    values = {name: from_json(item, hints[name], f"{path}.{name}") for name, item in value.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise HeaderError(f"{path}: {error}") from None


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _show(value: Any) -> str:
    return repr(value)[:80]
