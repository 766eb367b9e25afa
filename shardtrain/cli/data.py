"""`shardtrain data COMMAND ...`: tokenize a corpus, train a tokenizer; list, show, measure and check data.

Next: `data/tokenize.py`; `data/inspection.py`, which reads the files.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro

from shardtrain.cli.arguments import Subcommands, run_subcommand
from shardtrain.data.chat import Chat
from shardtrain.data.conversations import Answers, make_conversation
from shardtrain.data.corpus import corpus_files, token_shards
from shardtrain.data.documents import OnError, refuse_mixed, sample_texts
from shardtrain.data.inspection import QUANTILES, file_facts, find_problems, find_row, read_lengths
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData
from shardtrain.data.token_manifest import token_folders
from shardtrain.data.tokenize import UNIT_BYTES, TokenizeOptions, tokenize
from shardtrain.data.tokenizer import open_tokenizer
from shardtrain.report.quantities import bytes_text
from shardtrain.report.work_progress import work_progress
from shardtrain.system import terminal
from shardtrain.system.excerpts import short

if TYPE_CHECKING:
    from shardtrain.data.chat_tokens import EncodedConversation

FOUND = 1
"""Exit code of `check` if something cannot be read."""

MOST_CHARACTERS = 2000
MOST_PROBLEMS = 100


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files of data.

    Args:
      paths: files, folders and patterns.
      format: format of all files. None means that each is recognised.
    """

    paths: tyro.conf.Positional[tuple[str, ...]]
    format: str | None = None

    def find(self) -> list[SourceFile]:
        """Find the files.

        Raises:
          ValueError: no path was given, or there are no files.
        """
        if not self.paths:
            raise ValueError("no data was given; name files, folders or patterns")
        return corpus_files(self.paths, self.format)


@dataclass(frozen=True, kw_only=True)
class Texts(Files):
    """Files of text.

    Args:
      text: name of the field with the text, in formats with fields.
    """

    text: str = "text"


@dataclass(frozen=True, kw_only=True)
class Ls(Files):
    """List the format, rows or documents, tokens and size of each file."""


@dataclass(frozen=True, kw_only=True)
class Show(Files):
    """Show samples: the fields of a row, a window of tokens, or a conversation with trained text in brackets.

    Args:
      number: first row or window to show, counted over all files from 0.
      count: number of rows or windows to show.
      seq: tokens of a window.
      tokenizer: tokenizer of conversations, and of tokens without a manifest: bytes, or the path of a
        tokenizer.json or of a folder with one.
      template: show conversations in this chat template, with trained text in brackets: tokenizer,
        chatml, llama3, plain, or a .jinja file.
      answers: whether all answers of a conversation are trained on, or the last one only.
      messages: name of the field with the messages of a conversation.
    """

    number: int = 0
    count: int = 1
    seq: int = 256
    tokenizer: str = "bytes"
    template: str | None = None
    answers: Answers = "all"
    messages: str = "messages"


@dataclass(frozen=True, kw_only=True)
class Stats(Texts):
    """Count documents, and show the quantiles of their lengths in characters or tokens."""


@dataclass(frozen=True, kw_only=True)
class Check(Texts):
    """Read everything and list what cannot be read; exit with code 1 if there is something."""


def list_files(options: Ls) -> int:
    """Print a line for each file, and their sums."""
    facts = [file_facts(file) for file in options.find()]
    lines = [
        f"{each.file.format:13}"
        f"{'' if each.num_rows is None else f'{each.num_rows:,}':>14}"
        f"{'' if each.num_tokens is None else f'{each.num_tokens:,}':>18}"
        f"{bytes_text(each.num_bytes):>12}  {each.file.path}"
        f"{each.problem and f': {own_options(each.problem)}'}\n"
        for each in facts
    ]
    terminal.out(f"{'format':13}{'rows':>14}{'tokens':>18}{'size':>12}  file\n" + "".join(lines))
    rows, tokens = sum(each.num_rows or 0 for each in facts), sum(each.num_tokens or 0 for each in facts)
    size, shown = bytes_text(sum(each.num_bytes for each in facts)), f"{tokens:,}" if tokens else ""
    terminal.out(f"{'sum':13}{rows:>14,}{shown:>18}{size:>12}  {len(facts):,} files\n")
    return 0


def show_samples(options: Show) -> int:
    """Print rows, windows of tokens or conversations."""
    problems = [
        f"{name} is {value}; use {least} or more"
        for name, least in (("number", 0), ("count", 1), ("seq", 1))
        if (value := getattr(options, name)) < least
    ]
    if problems:
        raise ValueError("; ".join(problems))
    files = options.find()
    if refuse_mixed(files):
        return _show_windows(options, files)
    if options.template is not None:
        return _show_conversations(options, options.template, files)
    for number in range(options.number, options.number + options.count):
        file, row, record = find_row(files, number)
        terminal.out(f"row {number}: {file.path}, row {row}\n")
        for name, value in record.items():
            text = value if isinstance(value, str) else short(value, 200)
            more = "" if len(text) <= MOST_CHARACTERS else f"... ({len(text):,} characters)"
            terminal.out(f"  {name}: {text[:MOST_CHARACTERS]}{more}\n")
    return 0


def _show_conversations(options: Show, template_name: str, files: Sequence[SourceFile]) -> int:
    chat = Chat(tokenizer=options.tokenizer, template=template_name, answers=options.answers)
    template, tokenizer = chat.open_template()
    from shardtrain.data.chat_tokens import encode  # imports jinja2

    for number in range(options.number, options.number + options.count):
        file, row, record = find_row(files, number)
        try:
            (found,) = encode([make_conversation(record, options.messages)], template, tokenizer)
        except ValueError as error:
            raise ValueError(f"{file.path}, row {row}: {error}") from error
        terminal.out(
            f"conversation {number}: {file.path}, row {row}: {len(found.tokens):,} tokens,"
            f" {found.trained.sum():,} of them are learned\n{bracket_trained_text(found)}\n"
        )
    return 0


def bracket_trained_text(found: "EncodedConversation") -> str:
    """Return the text of a conversation with ⟦ and ⟧ around the text of trained tokens."""
    steps = np.diff(found.trained.astype(np.int8), prepend=0, append=0)
    starts = np.concatenate([[0], found.ends])
    text, last = "", 0
    # the first trained token of an answer begins where the token before it ends
    for first, after in zip(np.flatnonzero(steps == 1), np.flatnonzero(steps == -1), strict=True):
        begin, end = int(starts[first]), int(found.ends[after - 1])
        text += f"{found.text[last:begin]}⟦{found.text[begin:end]}⟧"
        last = end
    return text + found.text[last:]


def _show_windows(options: Show, files: Sequence[SourceFile]) -> int:
    shards, manifests = token_shards(files), token_folders(files)
    if manifests:
        tokenizer = open_tokenizer(manifests[0].tokenizer, manifests[0].separator)
    else:
        tokenizer = open_tokenizer(options.tokenizer)
    num_windows = max(0, shards.num_tokens - 1) // options.seq
    if options.number + options.count > num_windows:
        raise ValueError(
            f"there are {num_windows:,} windows of seq {options.seq}, numbered from 0; windows"
            f" {options.number} to {options.number + options.count - 1} were asked for: use a smaller number"
        )
    for number in range(options.number, options.number + options.count):
        start, stop = number * options.seq, (number + 1) * options.seq + 1
        tokens = shards.read(start, stop)
        terminal.out(f"window {number}: {shards.place(start)}\n")
        borders = shards.ends_in(start + 1, stop) - start
        terminal.out(f"  tokens: {short(tokens.tolist(), 200)}\n")
        if shards.without_ends is None:
            terminal.out(f"  documents end before tokens: {', '.join(map(str, borders)) or 'none'}\n")
        terminal.out(f"  text: {tokenizer.decode(tokens.tolist())}\n")
    return 0


def measure_documents(options: Stats) -> int:
    """Print the number of documents and the quantiles of their lengths."""
    files = options.find()
    unit = "tokens" if refuse_mixed(files) else "characters"
    found = list(read_lengths(files, options.text))
    good = np.concatenate([each for each, _ in found])
    terminal.out(f"{len(files):,} files, {len(good):,} documents, {good.sum():,} {unit}\n")
    if len(good):
        values = np.percentile(good, QUANTILES, method="nearest")
        quantiles = ", ".join(f"{q} %: {value:,}" for q, value in zip(QUANTILES, values, strict=True))
        terminal.out(f"{unit} of a document: mean {good.mean():,.1f}; {quantiles}\n")
    if num_bad := sum(bad for _, bad in found):
        terminal.out(f"{num_bad:,} rows or files cannot be read; shardtrain data check lists them\n")
    return 0


def check_files(options: Check) -> int:
    """Read all files, and print what cannot be read."""
    files = options.find()
    refuse_mixed(files)
    num_problems = done = 0
    kinds: Counter[str] = Counter()
    with work_progress("files") as report:
        for problem in find_problems(files, options.text, token_folders(files)):
            if problem:
                num_problems += 1
                # the same problem of many rows of a file is printed once
                kind = re.sub(r", row \d+(?=: )", "", problem, count=1)
                if kind in kinds or len(kinds) < MOST_PROBLEMS:
                    kinds[kind] += 1
                    terminal.out(f"{own_options(problem)}\n" if kinds[kind] == 1 else "")
            else:
                done += 1
                report(done, len(files))
    for kind, count in kinds.items():
        terminal.out(f"the same in {count - 1:,} more rows: {own_options(kind)}\n" if count > 1 else "")
    if num_more := num_problems - kinds.total():
        terminal.out(f"and {num_more:,} more\n")
    result = f"{num_problems:,} problems" if num_problems else "all can be read"
    terminal.out(f"{len(files):,} files: {result}\n")
    return FOUND if num_problems else 0


def own_options(text: str) -> str:
    """Replace the names of a run's options in a message by the names of these commands' options.

    >>> own_options("leave out what cannot be read: --data.on-error skip")
    'leave out what cannot be read: --on-error skip'
    """
    return text.replace("--data.", "--")


@dataclass(frozen=True, kw_only=True)
class Tokenize(Texts):
    """Convert text to shards of tokens; the same command resumes a conversion that was stopped.

    Args:
      out: folder to write: the shards, their manifest and the tokenizer.
      tokenizer: bytes, or the path of a tokenizer.json of Hugging Face, or of a folder with one.
      separator: text of the token to put after each document. None means the tokenizer's end of a document.
      on_error: what to do with a row or file that cannot be read: stop, or skip and count it.
      shard_bytes: approximate bytes of input in each shard.
      workers: number of processes. None means one for each core.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    tokenizer: str = "bytes"
    separator: str | None = None
    on_error: OnError = "stop"
    shard_bytes: int = UNIT_BYTES
    workers: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer(Texts):
    """Train a byte-level BPE tokenizer on a sample of the documents.

    Args:
      out: the tokenizer.json to write.
      vocab: largest number of tokens, 257 or more.
      sample_bytes: bytes of text to train on, taken equally from the first documents of each file.
      on_error: what to do with a row or file that cannot be read: stop, or skip it.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    vocab: int = 32_768
    sample_bytes: int = 100_000_000
    on_error: OnError = "stop"


def main(arguments: Sequence[str]) -> int:
    """Run one of `COMMANDS`.

    Returns:
      0; 1 if `check` found something that cannot be read.
    """
    try:
        return run_subcommand("shardtrain data", "COMMAND", COMMANDS, arguments)
    except BadData as error:
        # the other commands have no option that skips what cannot be read
        skips = arguments[0] in ("tokenize", "train-tokenizer")
        raise ValueError(own_options(str(error) if skips else f"{error.place}: {error.why}")) from error
    except ValueError as error:
        raise ValueError(own_options(str(error))) from error


def _find_texts(options: Texts) -> list[SourceFile]:
    """Return the files that options name.

    Raises:
      ValueError: they contain tokens.
    """
    files = options.find()
    if refuse_mixed(files):
        raise ValueError(f"{files[0].path} has tokens already; give text")
    return files


def _tokenize(options: Tokenize) -> int:
    files = _find_texts(options)
    how = TokenizeOptions(**{each.name: getattr(options, each.name) for each in fields(TokenizeOptions)})
    workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    if workers < 1:
        raise ValueError(f"workers is {workers}; use 1 or more")
    with work_progress("shards") as report:
        manifest = tokenize(files, options.out, how, workers=workers, report=report)
    terminal.out(
        f"{options.out}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens"
        f" in {len(manifest.shards)} shards, vocabulary {manifest.vocab:,}\n"
    )
    if manifest.num_skipped:
        terminal.out(f"skipped {manifest.num_skipped:,} that cannot be read:\n")
        terminal.out("".join(f"  {own_options(line)}\n" for line in manifest.skipped))
    return 0


def _train_tokenizer(options: TrainTokenizer) -> int:
    from shardtrain.data.huggingface_tokenizer import HuggingFaceTokenizer, train_tokenizer

    if options.sample_bytes < 1:
        raise ValueError(f"sample_bytes is {options.sample_bytes}; use 1 or more, such as 100000000")
    files = _find_texts(options)
    sample = sample_texts(files, options.text, options.sample_bytes, options.on_error)
    train_tokenizer(sample, options.vocab, options.out)
    vocab = HuggingFaceTokenizer(options.out).vocab
    terminal.out(f"{options.out}: vocabulary {vocab:,}, trained on documents of {len(files):,} files\n")
    return 0


COMMANDS: Subcommands = {
    "tokenize": (Tokenize, _tokenize),
    "train-tokenizer": (TrainTokenizer, _train_tokenizer),
    "ls": (Ls, list_files),
    "show": (Show, show_samples),
    "stats": (Stats, measure_documents),
    "check": (Check, check_files),
}
