"""Render conversations by chat templates as the text that a model reads, and locate the answers in it.

Only this module imports jinja2 (extra `chat`). Templates come from untrusted folders: they run in Jinja's
sandbox. Next: `conversations.py`, `chat_tokens.py`.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardtrain.data.conversations import Answers
from shardtrain.data.tokenizer import BYTES, Tokenizer
from shardtrain.errors.messages import near
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import read_json, read_text

OF_TOKENIZER = "tokenizer"
TOKENIZER_CONFIG, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
MOST_BYTES = 1 << 20

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around generated text: characters that Unicode reserves for internal use in a program."""

TODAY = datetime(2024, 7, 26)
"""The date that templates get: always the same, as tokens must not depend on the day."""

NAMED = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
        "{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
        "{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    ),
}
"""Name -> template. `plain` writes only the contents, with the end of a document after each answer."""


class RenderedConversation(NamedTuple):
    """A conversation as text.

    Attributes:
      text: the text.
      answers: (start, stop) of each answer in the text, in characters, rising.
    """

    text: str
    answers: list[tuple[int, int]]


class _Generation(Extension):
    """The block `{% generation %}`, by which a template marks text that the model generates."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            nodes.Output([nodes.TemplateData(mark, lineno=line)], lineno=line) for mark in (BEGIN, END)
        )
        return [begin, *body, end]


class ChatTemplate:
    """A chat template.

    Args:
      source: the template, in Jinja, with the variables of Hugging Face's templates.
      special: names of special tokens, such as `eos_token`, and their texts.
      answers: the answers that are trained on: all, or the last one of each conversation.

    Raises:
      ValueError: it is no template.
    """

    def __init__(self, source: str, special: dict[str, str], answers: Answers = "all") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": TODAY.strftime}
        self.source, self.special, self.answers = source, special, answers
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template cannot be read: line {error.lineno}: {error}") from None
        except (RecursionError, SyntaxError, ValueError) as error:
            raise ValueError(f"the chat template cannot be read: {error}") from None
        self._marks = any(BEGIN in data.data for data in tree.find_all(nodes.TemplateData))

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Any = None, learned: Sequence[bool] | None = None
    ) -> RenderedConversation:
        """Return a conversation as text, up to its last answer, and the spans of the answers.

        An answer begins where the text with the prompt for it ends, and ends where the text of the messages
        up to it ends, unless the template marks answers by `{% generation %}`.

        Args:
          messages: role, content and other fields for the template; contents are text.
          tools: descriptions of functions that the model may call, for the template.
          learned: whether each message is trained on, if it is an answer; None means all.

        Raises:
          ValueError: the template refuses the messages, or its text changes with later messages; or its marks
            cannot be assigned to answers.
        """
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not numbers:
            return RenderedConversation(self._text(messages, tools), [])
        messages = messages[: numbers[-1] + 1]
        text = self._text(messages, tools)
        wanted = numbers if self.answers == "all" else numbers[-1:]
        counted = [number for number in wanted if learned is None or learned[number]]
        if self._marks:
            text, spans = _remove_marks(text)
            if counted == wanted:
                return RenderedConversation(text, spans if self.answers == "all" else spans[-1:])
            if len(spans) != len(numbers):
                raise ValueError(
                    f"the chat template marks {len(spans)} answers of {len(numbers)}, so it is not known"
                    " which of them are not learned; use one that marks each: --data.template FILE.jinja"
                )
            return RenderedConversation(text, [spans[numbers.index(number)] for number in counted])
        spans = []
        for number in counted:
            before = self._text(messages[:number], tools, prompt=True)
            upto = text if number == numbers[-1] else self._text(messages[: number + 1], tools)
            if not (text.startswith(upto) and upto.startswith(before)):
                raise ValueError(self._explain_difference(number))
            spans.append((len(before), len(upto)))
        return RenderedConversation(text, spans)

    def _explain_difference(self, number: int) -> str:
        change = "" if self.answers == "last" else "train on last answers alone (--data.answers last), "
        return (
            f"the chat template writes the text up to message {number} in another way when that message is"
            f" followed by others, or answered, so the answer cannot be found in it; {change}mark answers in"
            " the template by {% generation %} and {% endgeneration %}, or use another one: --data.template"
            " FILE.jinja"
        )

    def _text(self, messages: Sequence[dict[str, Any]], tools: Any, prompt: bool = False) -> str:
        try:
            return self._template.render(
                **self.special, messages=messages, tools=tools, documents=None, add_generation_prompt=prompt
            )
        # a template can raise what Python can
        except Exception as error:
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ValueError(f"the chat template refuses the conversation ({kind}{error})") from None


def _remove_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks of answers from a text, and return the spans between them.

    Raises:
      ValueError: marks are nested.

    >>> _remove_marks(f"Hi{BEGIN}there{END}.")
    ('Hithere.', [(2, 7)])
    """
    parts, spans, length = [], [], 0
    first, *marked = text.split(BEGIN)
    parts.append(first)
    length += len(first)
    for each in marked:
        answer, ended, after = each.partition(END)
        if not ended or END in after:
            raise ValueError("the chat template marks an answer within an answer; mark each by itself")
        spans.append((length, length + len(answer)))
        parts += [answer, after]
        length += len(answer) + len(after)
    return "".join(parts), spans


def open_template(name: str, tokenizer_name: str, tokenizer: Tokenizer, answers: Answers) -> ChatTemplate:
    """Open a chat template.

    Args:
      name: one of `NAMED`, a file that ends in .jinja, or `tokenizer` for the template in the tokenizer's
        folder.
      tokenizer_name: bytes, a tokenizer.json, or a folder that has one.
      tokenizer: the tokenizer.
      answers: the answers that are trained on.

    Raises:
      ValueError: there is no such template, or it cannot be read.
    """
    folder = None if tokenizer_name == BYTES else Path(tokenizer_name)
    if folder is not None and not folder.is_dir():
        folder = folder.parent
    config = _read_config(folder)
    special = {
        key: text for key, value in config.items() if (text := _get_token_text(key, value)) is not None
    }
    if folder is None:
        special["eos_token"] = "\0"
    special.setdefault("eos_token", tokenizer.decode([tokenizer.separator]))
    return ChatTemplate(_find_source(name, folder, config), {"bos_token": "", **special}, answers)


def _find_source(name: str, folder: Path | None, config: dict[str, Any]) -> str:
    if name in NAMED:
        return NAMED[name]
    if name.endswith(".jinja"):
        return read_text(Path(name), MOST_BYTES)
    known = [OF_TOKENIZER, *NAMED, "FILE.jinja"]
    if name != OF_TOKENIZER:
        raise ValueError(f"there is no chat template {near(name, known)}")
    if folder is not None and (folder / TEMPLATE_FILE).is_file():
        return read_text(folder / TEMPLATE_FILE, MOST_BYTES)
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name, in files of earlier versions
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[-1].get("template") if named else None
    if isinstance(found, str):
        return found
    where = "the tokenizer bytes has" if folder is None else f"{folder} has"
    raise ValueError(
        f"{where} no chat template ({TEMPLATE_FILE}, or chat_template in {TOKENIZER_CONFIG}); name one:"
        f" --data.template {', '.join(known[1:])}"
    )


def _read_config(folder: Path | None) -> dict[str, Any]:
    """Read the tokenizer_config.json of a folder; return {} if there is none."""
    if folder is None or not (folder / TOKENIZER_CONFIG).is_file():
        return {}
    found = read_json(folder / TOKENIZER_CONFIG)
    if not isinstance(found, dict):
        raise ValueError(f"{folder / TOKENIZER_CONFIG} is {short(found)}; it is an object")
    return found


def _get_token_text(name: str, value: Any) -> str | None:
    """Return the text of a special token in a tokenizer_config.json; None for other entries."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if name.endswith("_token") and isinstance(value, str) else None


def _refuse(message: str) -> None:
    raise TemplateError(message)
