"""`shardtrain data COMMAND ...`: tokenize a corpus, and train a tokenizer.

`data_views.py` lists, shows, measures and checks data. Next: `data/tokenize.py`.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from shardtrain.cli.data_views import (
    Check,
    Ls,
    Show,
    Stats,
    Texts,
    check_files,
    list_files,
    measure_documents,
    own_options,
    show_samples,
)
from shardtrain.cli.subcommands import Subcommands, run_subcommand
from shardtrain.data.documents import OnError, refuse_mixed, sample_texts
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData
from shardtrain.data.tokenize import UNIT_BYTES, TokenizeOptions, tokenize
from shardtrain.report.work_progress import work_progress
from shardtrain.system import terminal


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
