"""Conversations in records of files: messages with roles, or a prompt and its completion.

Next: `chat_template.py`, which makes text of them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardtrain.data.documents import Piece, read_rows
from shardtrain.data.sources.format import BadData, Record
from shardtrain.errors.messages import near
from shardtrain.system.excerpts import short
from shardtrain.system.plain_text import decode_text
from shardtrain.system.untrusted_data import parse_record

Answers = Literal["all", "last"]
"""Which answers of a conversation are trained on."""

PROMPT, COMPLETION, TOOLS = "prompt", "completion", "tools"
ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "bing", "bard"), "assistant"),
}
"""Names of roles in ShareGPT's conversations and data sets like them -> those that templates know."""

LEARNED = {
    *("weight", "lossweight", "lossscale", "loss", "computeloss", "calculateloss", "lossmask"),
    *("train", "training", "trainable", "istrainable", "trainon", "learn", "learned", "learnable"),
}
"""Names of marks that are true for a message that is learned, in lower case without _ and -."""

NOT_LEARNED = {"masked", "ismasked", "maskloss", "ignoreloss", "noloss", "skiploss", "notrain"}
"""Names of marks that are true for a message that is not learned."""

UNCLEAR = {"mask", "traindetail", "trainingdetail", "trainondetail"}
"""Names of marks of which no value is read: what they say differs, or is about parts of a message."""

TEXTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
ASSISTANT = "assistant"

RESERVED = "\0\ufdd0\ufdd1"
"""Characters that no content has: the separator of bytes, and the marks of answers."""


class Conversation(NamedTuple):
    """A conversation.

    Attributes:
      messages: each with role, content, and whatever else its record has.
      tools: functions that the model may call; None if there are none.
      learned: whether each message is an answer that is learned, as its own marks or those of its row say.
    """

    messages: list[dict[str, Any]]
    tools: Any
    learned: list[bool]


def conversations(
    piece: Piece, field: str, folder: Path | None
) -> Iterator[tuple[int, Conversation | BadData]]:
    """Yield (row, conversation or error) of the rows of a piece; see `read_rows` and `make_conversation`."""
    return read_rows(piece, lambda record: make_conversation(record, field), folder)


def make_conversation(record: Record, field: str) -> Conversation:
    """Return the conversation in a record.

    Args:
      record: it has a list of messages, each with `role` and `content` (or `from` and `value`); or `prompt`
        and `completion`, each such a list, or a text, which is the content of one message. The list of
        messages, and `tools`, may also be text or bytes: JSON.
      field: the name of the list.

    Raises:
      ValueError: it has none, a message lacks something, it or the row says wrongly whether it is learned
        (see `take_learned`), or a text in it has a reserved character.

    >>> make_conversation({"prompt": "Hi", "completion": "Hello"}, "messages").messages
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if field in record:
        messages = _messages(_parse(record[field], field), field)
    elif PROMPT in record and COMPLETION in record:
        messages = [
            message
            for name, role in ((PROMPT, "user"), (COMPLETION, "assistant"))
            for message in _side(record[name], name, role)
        ]
    else:
        raise ValueError(
            f"it has no field {near(field, record)}, nor {PROMPT} and {COMPLETION}; name that of the"
            " messages: --data.messages"
        )
    learned = [take_learned(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not is_row_learned(record):
        learned = [False] * len(learned)
    tools = _parse(given, TOOLS) if (given := record.get(TOOLS)) else None
    _check_texts(tools, TOOLS)
    return Conversation(messages, tools, learned)


def _side(value: Any, name: str, role: str) -> list[dict[str, Any]]:
    """Return a prompt or a completion as messages."""
    value = decode_text(value) if isinstance(value, bytes) else value
    given = [{"role": role, "content": value}] if isinstance(value, str) else value
    return _messages(given, name)


def _parse(value: Any, name: str) -> Any:
    if not isinstance(value, str | bytes):
        return value
    try:
        return parse_record(value)
    except ValueError as error:
        raise ValueError(f"{name} is text, and no JSON ({error})") from None


def _messages(given: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise ValueError(f"{name} is {short(given)}; it is a list of messages, with role and content each")
    return [_message(each, f"{name}[{i}]") for i, each in enumerate(given)]


def _message(given: Any, name: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{name} is {short(given)}; it is an object with role and content")
    # columns of files have None where other messages have a value
    message = {key: value for key, value in given.items() if value is not None}
    if "role" not in message and "from" in message:
        message |= {"role": message.pop("from"), "content": message.pop("value", None)}
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        content = _join(content, name)
    elif content is None and ("tool_calls" in message or "function_call" in message):
        content = ""
    for key, value in (("role", role), ("content", content)):
        if not isinstance(value, str):
            raise ValueError(f"{name} has {key} {short(value)}; it is text")
    message |= {"role": ROLES.get(str(role), role), "content": content}
    # a template may write any field, such as tool_calls
    for key, value in message.items():
        _check_texts(value, f"{key} of {name}")
    return message


def _check_texts(value: Any, name: str) -> None:
    """Check the texts of a value, however deep in lists and dicts.

    Raises:
      ValueError: one has a reserved character, or is no valid Unicode.
    """
    if isinstance(value, Mapping):
        _check_texts([*value.keys(), *value.values()], name)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_texts(item, name)
    elif isinstance(value, str):
        if any(character in value for character in RESERVED):
            raise ValueError(
                f"{name} has a character that no text has (U+0000, U+FDD0 or U+FDD1); leave it out"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} is no valid Unicode at character {error.start:,}") from None


def _join(parts: list[Any], name: str) -> str:
    """Return the text of a content that is a list of parts."""
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if wrong := [part for part, text in zip(parts, texts, strict=True) if not isinstance(text, str)]:
        raise ValueError(f"{name} has content {short(wrong[0])}; parts of it that are text are read alone")
    return "".join(map(str, texts))


def take_learned(message: dict[str, Any], name: str) -> bool:
    """Remove the marks of a message, and return whether it is learned; without marks answers are.

    Args:
      message: with the role that templates know.
      name: of the message, for errors.

    Raises:
      ValueError: a mark is neither true nor false, marks contradict each other, or a message is marked as
        learned that is no answer.

    >>> take_learned({"role": "assistant", "content": "a", "weight": 0.0}, "messages[0]")
    False
    """
    marks = _marks(message, name)
    said = {f"{key} {short(message.pop(key))}": learned for key, learned in marks.items()}
    is_answer = message["role"] == ASSISTANT
    if said and not is_answer and True in said.values():
        raise ValueError(
            f"{name} has {next(iter(said))} and role {message['role']}, and only messages of the role"
            f" {ASSISTANT} are learned; write 0, or leave it out"
        )
    return is_answer and all(said.values())


def is_row_learned(record: Mapping[str, Any]) -> bool:
    """Return whether the answers of a row are learned, by marks beside its messages; without marks they are.

    Raises:
      ValueError: a mark is neither true nor false, or marks contradict each other.

    >>> is_row_learned({"messages": [], "weight": 0}), is_row_learned({"messages": [], "train": None})
    (False, True)
    """
    return all(_marks(record, "the row").values())


def _marks(fields: Mapping[str, Any], name: str) -> dict[str, bool]:
    """Return whether each mark says that its message or row is learned; None says nothing.

    Raises:
      ValueError: see `is_row_learned`.
    """
    marks: dict[str, bool] = {}
    for key in fields:
        word = str(key).lower().replace("_", "").replace("-", "")
        if word not in LEARNED | NOT_LEARNED | UNCLEAR or fields[key] is None:
            continue
        value = fields[key]
        flag = TEXTS.get(value.strip().lower()) if isinstance(value, str) else value
        if word in UNCLEAR or not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise ValueError(
                f"{name} has {key} {short(value)}; say whether it is learned by weight 1 or 0, or leave"
                f" {key} out"
            )
        marks[key] = bool(flag) == (word in LEARNED)
    if len(set(marks.values())) > 1:
        said = " and ".join(f"{key} {short(fields[key])}" for key in marks)
        raise ValueError(f"{name} has {said}, which contradict each other; keep one of them")
    return marks
