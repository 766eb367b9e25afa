"""Tokenize conversations into the run folder, and mark the tokens that are trained on.

One process writes the files once, and all ranks read them. Next: `chat.py`, which packs them into windows.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardtrain.data.conversations import Conversation, read_conversations
from shardtrain.data.documents import OnError, Piece, encode_rows
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData
from shardtrain.data.sources.row_offsets import file_digest, remove_indices
from shardtrain.data.token_manifest import MOST_TOKENS
from shardtrain.data.tokenize import INDEX, MOST_LISTED
from shardtrain.data.tokenizer import Tokenizer
from shardtrain.data.tokens import TokenShards, token_file, write_tokens
from shardtrain.system.array_file import read_array
from shardtrain.system.atomic_write import clear_parts, new_file, replace_file
from shardtrain.system.untrusted_files import check_kind, check_whole_number, parse_json, read_text

if TYPE_CHECKING:
    from shardtrain.data.chat_template import ChatTemplate

VERSION = 4
TRAINED = 1 << 31
"""The bit that marks a stored token as trained on; tokens are below it."""

TOKENS, EXTENTS, RECORD = "tokens.npy", "extents.npy", "record.json"
OWNER_ONLY = 0o600
TOTALS = ("num_tokens", "num_trained", "num_conversations", "num_unanswered", "num_skipped")


class EncodedConversation(NamedTuple):
    """A conversation as tokens.

    Attributes:
      text: the text that was tokenized.
      tokens: uint32 (num_tokens,).
      trained: bool (num_tokens,), whether a token is part of an answer; never the first one.
      ends: where each token ends in the text, in characters, int (num_tokens,).
    """

    text: str
    tokens: np.ndarray
    trained: np.ndarray
    ends: np.ndarray


class ChatTokens(NamedTuple):
    """The tokens of all conversations that have an answer.

    Attributes:
      tokens: the tokens of all conversations, with the bit `TRAINED`.
      extents: for each conversation, the total number of tokens up to its end, and the number of its own
        tokens before the first trained one; int64 (num_conversations, 2).
      record: `TOTALS`, the first errors that were skipped, and a checksum of the tokens.
    """

    tokens: TokenShards
    extents: np.ndarray
    record: dict[str, Any]


def encode(
    given: Sequence[Conversation], template: "ChatTemplate", tokenizer: Tokenizer
) -> list[EncodedConversation]:
    """Tokenize conversations, each up to its last answer.

    A token is trained on if it ends within an answer, even if it begins before the answer.

    Raises:
      ValueError: the template or the tokenizer refuses a conversation.
    """
    rendered = [template.render(each.messages, each.tools, each.learned) for each in given]
    encoded = tokenizer.encode_with_ends([each.text for each in rendered])
    found = []
    for each, (tokens, ends) in zip(rendered, encoded, strict=True):
        trained = np.zeros(len(tokens), bool)
        for start, stop in each.answers:
            trained |= (ends > start) & (ends <= stop)
        trained[:1] = False  # no token predicts it
        found.append(EncodedConversation(each.text, tokens, trained, ends))
    return found


def tokenize_chat(
    files: Sequence[SourceFile],
    folder: Path,
    template: "ChatTemplate",
    tokenizer: Tokenizer,
    *,
    tokenizer_hash: str,
    messages: str,
    on_error: OnError,
) -> ChatTokens:
    """Return the tokens of all conversations in files, which are made at the first call.

    Args:
      files: files of formats with rows.
      folder: the run folder; the tokens are in a subfolder whose name is a hash of all inputs.
      template: turns a conversation into text.
      tokenizer: turns text into tokens.
      tokenizer_hash: a hash of the tokenizer's content.
      messages: name of the field that has the messages.
      on_error: what happens to a row or file that cannot be read.

    Raises:
      BadData: a row or file cannot be read, and `on_error` is "stop".
      ValueError: no conversation has an answer, or a file changed meanwhile.
    """

    def digest() -> str:
        states = [(file.format, file_digest(file.path)) for file in files]
        options = (messages, on_error, template.source, template.special, template.answers)
        return hashlib.sha256(json.dumps((VERSION, options, tokenizer_hash, states)).encode()).hexdigest()[
            :24
        ]

    before = digest()
    out = folder / f"chat-{before}"
    if (found := _open_files(out)) is not None:
        return found
    out.mkdir(parents=True, exist_ok=True)
    clear_parts(out, "*")
    rows = (
        (file.path, row, found)
        for file in files
        for row, found in read_conversations(Piece(file), messages, out / INDEX)
    )
    encoded = encode_rows(
        rows,
        lambda each: sum(len(message["content"]) for message in each.messages),
        lambda given: encode(given, template, tokenizer),
    )
    record, extents = _write(out, encoded, on_error)
    if not record["num_conversations"]:
        raise ValueError(
            f"no conversation in {len(files)} files, such as {files[0].path}, has an answer to train on"
            f" ({record['num_unanswered']:,} have no message of the role assistant that is learned,"
            f" {record['num_skipped']:,} cannot be read)"
        )
    if digest() != before:
        raise ValueError("files changed while they were tokenized; wait until they are complete")
    with new_file(out / EXTENTS, OWNER_ONLY) as file:
        np.lib.format.write_array(file, extents, allow_pickle=False)
    replace_file(out / RECORD, json.dumps(record).encode(), OWNER_ONLY)
    remove_indices(out / INDEX)
    found = _open_files(out)
    assert found is not None
    return found


def _open_files(out: Path) -> ChatTokens | None:
    """Open the files that were written before; None if they are incomplete."""
    try:
        record = check_kind(parse_json(read_text(out / RECORD), ours=True), dict, RECORD)
        for name in TOTALS:
            check_whole_number(record.get(name), name, MOST_TOKENS)
        check_kind(record.get("skipped"), list, "skipped")
        check_kind(record.get("checksum"), str, "checksum")
        tokens, extents = token_file(out / TOKENS), read_array(out / EXTENTS)
        whole = tokens.num_tokens == record["num_tokens"]
        whole = whole and extents.shape == (record["num_conversations"], 2) and len(extents) > 0
        whole = whole and extents.dtype == np.int64 and bool((np.diff(extents[:, 0], prepend=0) > 0).all())
        whole = whole and extents[-1, 0] == tokens.num_tokens and bool((extents[:, 1] >= 0).all())
        return ChatTokens(tokens, extents, record) if whole else None
    except (OSError, ValueError, KeyError):
        return None


def _write(
    out: Path, encoded: Iterable[EncodedConversation | BadData], on_error: OnError
) -> tuple[dict[str, Any], np.ndarray]:
    """Write the tokens, and return their record and extents."""
    counts = dict.fromkeys(TOTALS, 0)
    skipped: list[str] = []
    extents: list[tuple[int, int]] = []
    checksum = hashlib.sha256()

    def documents() -> Iterator[np.ndarray]:
        for each in encoded:
            if isinstance(each, BadData):
                if on_error == "stop":
                    raise each
                counts["num_skipped"] += 1
                skipped.extend([f"{each.place}: {each.why}"] if len(skipped) < MOST_LISTED else [])
            elif not each.trained.any():
                counts["num_unanswered"] += 1
            else:
                counts["num_tokens"] += len(each.tokens)
                counts["num_trained"] += int(each.trained.sum())
                counts["num_conversations"] += 1
                extents.append((counts["num_tokens"], int(each.trained.argmax())))
                stored = each.tokens.astype(np.uint32) | each.trained.astype(np.uint32) * np.uint32(TRAINED)
                checksum.update(stored.astype("<u4").tobytes())
                yield stored

    write_tokens(out / TOKENS, documents(), dtype="uint32", mode=OWNER_ONLY)
    ends = np.array(extents, np.int64).reshape(-1, 2)
    checksum.update(ends.astype("<i8").tobytes())
    return {**counts, "skipped": skipped, "checksum": checksum.hexdigest()[:16]}, ends
