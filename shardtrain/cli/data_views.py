"""`shardtrain data ls|show|stats|check`: what is in files of data.

Next: `data/inspection.py`, which reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tyro

from shardtrain.data.corpus import corpus_files, token_shards
from shardtrain.data.documents import refuse_mixed
from shardtrain.data.inspection import QUANTILES, file_facts, find_row, lengths, problems_of
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.token_manifest import token_folders
from shardtrain.data.tokenizer import open_tokenizer
from shardtrain.report.quantities import bytes_text
from shardtrain.report.work_progress import work_progress
from shardtrain.system import terminal
from shardtrain.system.excerpts import short

FOUND = 1
"""The exit code of `check` if something cannot be read."""

MOST_CHARACTERS = 2000
MOST_PROBLEMS = 100

Paths = tyro.conf.Positional[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List files of data: format, rows or documents, tokens, size.

    Args:
      paths: files, folders and patterns.
      format: the format of all files; None recognises each.
    """

    paths: Paths
    format: str | None = None


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show samples: the fields of a row, or a window of tokens, decoded.

    Args:
      paths: files, folders and patterns.
      number: the first row, or window, to show, counted over all files from 0.
      count: how many to show.
      seq: tokens of a window.
      tokenizer: decodes tokens without a manifest: bytes, or the path of a tokenizer.json.
      format: the format of all files; None recognises each.
    """

    paths: Paths
    number: int = 0
    count: int = 1
    seq: int = 256
    tokenizer: str = "bytes"
    format: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Measure documents: their number, and the quantiles of their lengths in characters or tokens.

    Args:
      paths: files, folders and patterns.
      text: the field with the text, of formats with fields.
      format: the format of all files; None recognises each.
    """

    paths: Paths
    text: str = "text"
    format: str | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """Read everything and list what cannot be read; exit code 1 if there is something.

    Args:
      paths: files, folders and patterns.
      text: the field with the text, of formats with fields.
      format: the format of all files; None recognises each.
    """

    paths: Paths
    text: str = "text"
    format: str | None = None


def ls(options: Ls) -> int:
    """Print a line for each file, and the sums."""
    facts = [file_facts(file) for file in corpus_files(options.paths, options.format)]
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


def show(options: Show) -> int:
    """Print rows, or windows."""
    problems = [
        f"{name} is {value}; use {least} or more"
        for name, least in (("number", 0), ("count", 1), ("seq", 1))
        if (value := getattr(options, name)) < least
    ]
    if problems:
        raise ValueError("; ".join(problems))
    files = corpus_files(options.paths, options.format)
    if refuse_mixed(files):
        return _show_windows(options, files)
    for number in range(options.number, options.number + options.count):
        file, row, record = find_row(files, number)
        terminal.out(f"row {number}: {file.path}, row {row}\n")
        for name, value in record.items():
            text = value if isinstance(value, str) else short(value, 200)
            more = "" if len(text) <= MOST_CHARACTERS else f"... ({len(text):,} characters)"
            terminal.out(f"  {name}: {text[:MOST_CHARACTERS]}{more}\n")
    return 0


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


def stats(options: Stats) -> int:
    """Print the number of documents and the quantiles of their lengths."""
    files = corpus_files(options.paths, options.format)
    unit = "tokens" if refuse_mixed(files) else "characters"
    found = list(lengths(files, options.text))
    good = np.concatenate([each for each, _ in found])
    terminal.out(f"{len(files):,} files, {len(good):,} documents, {good.sum():,} {unit}\n")
    if len(good):
        values = np.percentile(good, QUANTILES, method="nearest")
        quantiles = ", ".join(f"{q} %: {value:,}" for q, value in zip(QUANTILES, values, strict=True))
        terminal.out(f"{unit} of a document: mean {good.mean():,.1f}; {quantiles}\n")
    if num_bad := sum(bad for _, bad in found):
        terminal.out(f"{num_bad:,} rows or files cannot be read; shardtrain data check lists them\n")
    return 0


def check(options: Check) -> int:
    """Read everything, and print what cannot be read."""
    files = corpus_files(options.paths, options.format)
    refuse_mixed(files)
    num_problems = done = 0
    with work_progress("files") as report:
        for problem in problems_of(files, options.text, token_folders(files)):
            if problem:
                num_problems += 1
                if num_problems <= MOST_PROBLEMS:
                    terminal.out(f"{own_options(problem)}\n")
            else:
                done += 1
                report(done, len(files))
    if num_problems > MOST_PROBLEMS:
        terminal.out(f"and {num_problems - MOST_PROBLEMS:,} more\n")
    result = f"{num_problems:,} problems" if num_problems else "all can be read"
    terminal.out(f"{len(files):,} files: {result}\n")
    return FOUND if num_problems else 0


def own_options(text: str) -> str:
    """Return a message with the options of these commands in place of a run's.

    >>> own_options("leave out what cannot be read: --data.on-error skip")
    'leave out what cannot be read: --on-error skip'
    """
    return text.replace("--data.", "--")
