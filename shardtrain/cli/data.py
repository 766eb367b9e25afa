"""`shardtrain data COMMAND ...`: tokenize a corpus, train a tokenizer, list, show, measure and check data.

Next: `data_views.py` (what is shown), `data/tokenize.py`.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shardtrain.cli.command_help import usage_text
from shardtrain.cli.data_views import Check, Ls, Show, Stats, check, ls, own_options, show, stats
from shardtrain.data.corpus import corpus_files
from shardtrain.data.documents import OnError, refuse_mixed, sample_texts
from shardtrain.data.sources.format import BadData
from shardtrain.data.tokenize import UNIT_BYTES, TokenizeOptions, tokenize
from shardtrain.errors.messages import near
from shardtrain.report.work_progress import work_progress
from shardtrain.system import terminal

Paths = tyro.conf.Positional[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Tokenize:
    """Make shards of tokens of text; the same command finishes what was stopped.

    Args:
      paths: files, folders and patterns of text in any format.
      out: the folder of the shards, their manifest and the tokenizer.
      tokenizer: bytes, or the path of a tokenizer.json of Hugging Face or of a folder with one.
      text: the field with the text, of formats with fields.
      separator: the token after each document, as text; None: the tokenizer's end of a document.
      format: the format of all files; None recognises each.
      on_error: what to do with a row or file that cannot be read: stop, or skip it and count it.
      shard_bytes: bytes of input in each shard, about.
      workers: number of processes; None: one for each core.
    """

    paths: Paths
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    tokenizer: str = "bytes"
    text: str = "text"
    separator: str | None = None
    format: str | None = None
    on_error: OnError = "stop"
    shard_bytes: int = UNIT_BYTES
    workers: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer:
    """Train a byte-level BPE tokenizer on a sample of the documents.

    Args:
      paths: files, folders and patterns of text in any format.
      out: the tokenizer.json to write.
      vocab: number of tokens at most, 257 or more.
      sample_bytes: bytes of text to train on: the first documents of each file, as much of each.
      text: the field with the text, of formats with fields.
      format: the format of all files; None recognises each.
      on_error: what to do with a row or file that cannot be read: stop, or skip it.
    """

    paths: Paths
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    vocab: int = 32_768
    sample_bytes: int = 100_000_000
    text: str = "text"
    format: str | None = None
    on_error: OnError = "stop"


def main(arguments: Sequence[str]) -> int:
    """Run one of `COMMANDS`.

    Returns:
      0; 1 if `check` found something that cannot be read.
    """
    wants_help = bool({"-h", "--help"} & set(arguments))
    if not arguments or (wants_help and arguments[0] not in COMMANDS):
        terminal.out(usage())
        return 0 if wants_help else 2
    name, *rest = arguments
    if name not in COMMANDS:
        raise ValueError(f"there is no command {near(name, COMMANDS)}\n{usage()}")
    kind, work = COMMANDS[name]
    options = tyro.cli(kind, args=rest, prog=f"shardtrain data {name}")
    if not options.paths:
        raise ValueError("no data was given; name files, folders or patterns")
    try:
        return work(options)
    except BadData as error:
        skips = hasattr(options, "on_error")
        raise ValueError(own_options(str(error) if skips else f"{error.place}: {error.why}")) from error
    except ValueError as error:
        raise ValueError(own_options(str(error))) from error


def usage() -> str:
    """Return the text of --help."""
    kinds = {name: kind for name, (kind, _) in COMMANDS.items()}
    return usage_text("shardtrain data", "COMMAND", kinds)


def _tokenize(options: Tokenize) -> int:
    files = corpus_files(options.paths, options.format)
    if refuse_mixed(files):
        raise ValueError(f"{files[0].path} has tokens already; give text")
    how = TokenizeOptions(
        tokenizer=options.tokenizer,
        text=options.text,
        separator=options.separator,
        on_error=options.on_error,
        shard_bytes=options.shard_bytes,
    )
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
    files = corpus_files(options.paths, options.format)
    if refuse_mixed(files):
        raise ValueError(f"{files[0].path} has tokens already; give text")
    sample = sample_texts(files, options.text, options.sample_bytes, options.on_error)
    train_tokenizer(sample, options.vocab, options.out)
    vocab = HuggingFaceTokenizer(options.out).vocab
    terminal.out(f"{options.out}: vocabulary {vocab:,}, trained on documents of {len(files):,} files\n")
    return 0


COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "tokenize": (Tokenize, _tokenize),
    "train-tokenizer": (TrainTokenizer, _train_tokenizer),
    "ls": (Ls, ls),
    "show": (Show, show),
    "stats": (Stats, stats),
    "check": (Check, check),
}
"""Name -> the class of its options, and the function that runs it and returns the exit code."""
