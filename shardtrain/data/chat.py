"""Train on conversations; only the tokens of answers count in the loss.

A window has several conversations, each a sequence of its own. Next: `chat_tokens.py`, `best_fit.py`.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardtrain.data.best_fit import best_fit
from shardtrain.data.chat_tokens import TRAINED, ChatTokens, tokenize_chat
from shardtrain.data.conversations import Answers
from shardtrain.data.corpus import corpus_files
from shardtrain.data.documents import OnError, refuse_mixed
from shardtrain.data.samples import SplitData, find_split_problems
from shardtrain.data.sources.find import SourceFile, summary
from shardtrain.data.token_manifest import tokenizer_hash
from shardtrain.data.tokenizer import BYTES, Tokenizer, open_tokenizer
from shardtrain.errors.messages import needs_library, refuse
from shardtrain.system.excerpts import some

if TYPE_CHECKING:
    from shardtrain.data.chat_template import ChatTemplate

TooLong = Literal["truncate", "skip"]
"""What happens to a conversation that is longer than a window."""

ChatPacking = Literal["separate", "alone"]
"""Whether a window has several conversations, or only one."""


@dataclass(frozen=True, kw_only=True)
class Chat(SplitData["ChatWindows"]):
    """Train on the answers in conversations, in files of many formats.

    A row has a list of messages, each with role and content, or a prompt and its completion. A chat template
    turns it into text. Tokens that the role assistant wrote have weight 1 in the loss, all others 0.

    Args:
      paths: files, folders, and patterns such as chats/**/*.parquet, read in the order of their names.
      tokenizer: bytes, a tokenizer.json of Hugging Face, or a folder that has one.
      template: the chat template: tokenizer takes the template in the tokenizer's folder; chatml, llama3 and
        plain (only the contents) are built in; or the path of a file that ends in .jinja.
      answers: which answers of a conversation are trained on: all, or only the last.
      seq: tokens per window.
      too_long: what happens to a conversation that is longer than a window: truncate cuts its end off, skip
        leaves it out.
      packing: separate packs several conversations into a window, where they do not see each other; alone
        puts one conversation and padding into each window.
      heldout_fraction: fraction of the conversations, at the end, that is held out of training.
      messages: name of the field that has the messages.
      format: the format of all files. None means that the format of each file is recognised.
      on_error: what happens to a row or file that cannot be read: stop ends the run with an error, skip
        leaves it out and counts it.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    paths: tuple[Path, ...] = ()
    tokenizer: str = BYTES
    template: str = "tokenizer"
    answers: Answers = "all"
    seq: int = 1024
    too_long: TooLong = "truncate"
    packing: ChatPacking = "separate"
    heldout_fraction: float = 0.05
    messages: str = "messages"
    format: str | None = None
    on_error: OnError = "stop"

    def __post_init__(self) -> None:
        refuse("these conversations cannot be used", find_split_problems(self))

    @property
    def vocab(self) -> int:
        """The size of the tokenizer's vocabulary.

        Raises:
          ValueError, FileNotFoundError: the tokenizer cannot be opened.
        """
        return open_tokenizer(self.tokenizer).vocab

    def split(self, folder: Path) -> "tuple[ChatWindows, ChatWindows | None]":
        """Return the windows to train on and the held-out windows; conversations are tokenized into `folder`.

        Raises:
          BadData: a row or file cannot be read, and `on_error` is "stop".
          ValueError: nothing is found, there is no chat template, or there are too few conversations.
        """
        tokens, pad = self._tokens(folder)
        train, heldout = self._split_numbers(tokens)
        if not len(train):
            longest = int(np.diff(tokens.extents[:, 0], prepend=0).max())
            raise ValueError(
                f"none of {len(tokens.extents):,} conversations is left to train on ({len(heldout):,} are"
                f" held out; a window of seq {self.seq} holds {self.seq + 1:,} tokens, the longest has"
                f" {longest:,}); give more, use a longer seq, or hold out less: --data.heldout-fraction 0"
            )
        windows = self._windows(tokens, train, pad)
        return windows, self._windows(tokens, heldout, pad) if len(heldout) else None

    def summary(self, folder: Path) -> str:
        """Return a line that says what is read and trained on, and what was truncated or left out."""
        tokens, _ = self._tokens(folder)
        record, train = tokens.record, self.train(folder)
        lengths = np.diff(tokens.extents[:, 0], prepend=0)
        num_long = int((lengths > self.seq + 1).sum())
        num_lost = len(lengths) - sum(map(len, self._split_numbers(tokens)))
        parts = [
            f"chat: {summary(self._files())}; {record['num_conversations']:,} conversations,"
            f" {record['num_tokens']:,} tokens, {record['num_trained']:,} of them in answers",
            f"{len(train):,} windows of {self.seq:,} tokens, {train.filled:.1%} full",
        ]
        if num_long:
            done = "truncated" if self.too_long == "truncate" else "left out"
            parts.append(f"{done} {num_long:,} that are longer than a window")
        if self.too_long == "truncate" and num_lost:
            parts.append(f"{num_lost:,} of these have no answer within it and are left out")
        if record["num_unanswered"]:
            parts.append(f"left out {record['num_unanswered']:,} without an answer that is learned")
        if record["num_skipped"]:
            parts.append(
                f"skipped {record['num_skipped']:,} that cannot be read: {some(record['skipped'], 3)}"
            )
        return "; ".join(parts)

    def replace_tokenizer(self, tokenizer: str) -> "Chat":
        """Return the same data with another tokenizer."""
        return replace(self, tokenizer=tokenizer)

    def open_template(self) -> "tuple[ChatTemplate, Tokenizer]":
        """Return the chat template and the tokenizer.

        Raises:
          ValueError: jinja2 is not installed, or one of them cannot be read.
        """
        if find_spec("jinja2") is None:
            raise ValueError(needs_library("chat templates are", "jinja2", "chat"))
        from shardtrain.data.chat_template import open_template

        tokenizer = open_tokenizer(self.tokenizer)
        return open_template(self.template, self.tokenizer, tokenizer, self.answers), tokenizer

    def _files(self) -> list[SourceFile]:
        if not self.paths:
            raise ValueError("there are no paths; give files, folders or patterns: --data PATTERN")
        files = corpus_files(self.paths, self.format)
        if refuse_mixed(files):
            raise ValueError(f"{files[0].path} has tokens, and no conversations; give rows of messages")
        return files

    def _tokens(self, folder: Path) -> tuple[ChatTokens, int]:
        """Return the tokens of all conversations, made at the first call, and the token of padding."""
        template, tokenizer = self.open_template()
        tokens = tokenize_chat(
            self._files(),
            folder,
            template,
            tokenizer,
            tokenizer_hash=tokenizer_hash(self.tokenizer),
            messages=self.messages,
            on_error=self.on_error,
        )
        return tokens, tokenizer.separator

    def _split_numbers(self, tokens: ChatTokens) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the conversations to train on, and of the held-out conversations."""
        lengths = np.diff(tokens.extents[:, 0], prepend=0)
        fits = lengths <= self.seq + 1
        if self.too_long == "truncate":
            fits |= tokens.extents[:, 1] <= self.seq
        usable = np.flatnonzero(fits)
        num_heldout = 0
        if self.heldout_fraction and len(usable):
            num_heldout = max(1, round(self.heldout_fraction * len(usable)))
        border = len(usable) - num_heldout
        return usable[:border], usable[border:]

    def _windows(self, tokens: ChatTokens, numbers: np.ndarray, pad: int) -> "ChatWindows":
        stops = tokens.extents[:, 0]
        lengths = np.minimum(np.diff(stops, prepend=0), self.seq + 1)[numbers]
        if self.packing == "separate":
            order, ends = best_fit(lengths, self.seq + 1)
        else:
            order = np.arange(len(numbers))
            ends = order + 1
        starts = np.concatenate([[0], stops[:-1]])[numbers]
        skips = tokens.record["num_skipped"] if self.on_error == "skip" else None
        return ChatWindows(
            tokens=tokens,
            starts=starts[order],
            lengths=lengths[order],
            ends=ends,
            seq=self.seq,
            pad=pad,
            segmented=self.packing == "separate",
            num_skipped=skips,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatWindows:
    """A random-access source: windows of conversations, with weights of their tokens.

    Args:
      tokens: the tokens of all conversations.
      starts: the first token of each conversation, window after window, int64 (n,).
      lengths: the number of tokens of each conversation, int64 (n,).
      ends: number of conversations up to the end of each window, int64 (num_windows,).
      seq: number of tokens that a model reads in one window; a sample has one more, the last target.
      pad: the token after the last conversation of a window.
      segmented: whether samples have segments.
      num_skipped: number of rows that were left out; None means that none may be left out.
    """

    tokens: ChatTokens
    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    seq: int
    pad: int
    segmented: bool
    num_skipped: int | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`.

        Returns:
          {"tokens": int32 (seq + 1,); "weights": float32 (seq,), 1 where the target is part of an answer; and
          with segments "segments": int32 (seq,), the number of each input's conversation in this window, from
          0; padding has the next number}

        Raises:
          IndexError: no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first, last = (int(self.ends[index - 1]) if index else 0), int(self.ends[index])
        tokens = np.full(self.seq + 1, self.pad, np.int32)
        weights = np.zeros(self.seq + 1, np.float32)
        segments = np.full(self.seq + 1, last - first, np.int32)
        filled = 0
        for number in range(first, last):
            start, length = int(self.starts[number]), int(self.lengths[number])
            stored = self.tokens.tokens.read(start, start + length)
            inside = slice(filled, filled + length)
            tokens[inside] = stored & np.uint32(TRAINED - 1)
            weights[inside] = stored >= TRAINED
            segments[inside] = number - first
            filled += length
        # a weight belongs to the target, which is one further; the first token of a conversation has none
        sample = {"tokens": tokens, "weights": weights[1:]}
        return {**sample, "segments": segments[:-1]} if self.segmented else sample

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens of all conversations, uint32 (stop - start,)."""
        return self.tokens.tokens.read(start, stop) & np.uint32(TRAINED - 1)

    @property
    def filled(self) -> float:
        """The fraction of the windows that is not padding."""
        return float(self.lengths.sum()) / (len(self) * (self.seq + 1))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens and of the contents of each window."""
        found = hashlib.sha256(f"{self.tokens.record['checksum']} {self.seq} {self.segmented}".encode())
        for each in (self.starts, self.lengths, self.ends):
            found.update(each.astype("<i8").tobytes())
        return found.hexdigest()[:16]
