"""Tokenize files into a folder of shards with a manifest: in parallel, and resumed where it was stopped.

The shards depend on files and options alone, not on processes or restarts. Next: `token_manifest.py`,
`corpus.py`.
"""

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardtrain.data.documents import OnError
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.row_offsets import remove_indices
from shardtrain.data.token_manifest import (
    MANIFEST,
    PLAN,
    TOTALS,
    VERSION,
    Manifest,
    read_manifest,
    tokenizer_hash,
    whole_manifest,
)
from shardtrain.data.token_units import INDEX, Unit, is_written, make_units, read_record, write_unit
from shardtrain.data.tokenizer import BYTES, TOKENIZER_FILE, Tokenizer, open_tokenizer
from shardtrain.data.workers import begin_worker
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse
from shardtrain.system.atomic_write import clear_parts, replace_file
from shardtrain.system.untrusted_files import parse_json, read_bytes, read_text

UNIT_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """How text becomes tokens.

    Args:
      tokenizer: bytes, or the path of a tokenizer.json of Hugging Face or of a folder with one.
      text: the field with the text, of formats with fields.
      separator: the token after each document, as text; None: the tokenizer's end of a document.
      on_error: what to do with a row or file that cannot be read: stop, or skip it and count it.
      shard_bytes: bytes of input in each shard, about.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    tokenizer: str = BYTES
    text: str = "text"
    separator: str | None = None
    on_error: OnError = "stop"
    shard_bytes: int = UNIT_BYTES

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.shard_bytes < 1:
            problems.append(f"shard_bytes is {self.shard_bytes}; use 1 or more, such as {UNIT_BYTES}")
        refuse("this text cannot be tokenized", problems)


def tokenize(
    files: Sequence[SourceFile],
    out: Path,
    options: TokenizeOptions,
    *,
    workers: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Tokenize files into a folder, or finish that where it was stopped.

    Args:
      files: of formats with rows.
      out: the folder; one that was written from the same files with the same options is completed.
      options: how.
      workers: number of processes; 1 works in this one.
      report: called with (units done, all units) at the beginning and after each.

    Raises:
      BadData: something cannot be read, and `on_error` is "stop"; file and row are named.
      ValueError: the folder has other data, there is no text in the files, or one changed meanwhile.
    """
    tokenizer = open_tokenizer(options.tokenizer, options.separator)
    plan = {"version": VERSION, "digest": plan_digest(files, options)}
    out.mkdir(parents=True, exist_ok=True)
    _check_plan(out, plan)
    if (manifest := whole_manifest(out)) is not None:
        return manifest
    clear_parts(out, "*")
    units = make_units(files, options.shard_bytes, out, options.on_error)
    waiting = [unit for unit in units if not is_written(out, unit)]
    report(len(units) - len(waiting), len(units))
    for done, _ in enumerate(_written(waiting, out, options, workers), start=len(units) - len(waiting) + 1):
        report(done, len(units))
    records = [read_record(out, unit) for unit in units]
    if not any(record["num_tokens"] for record in records):
        raise ValueError(
            f"there is no text in {len(files)} files, such as {files[0].path}; give files with text"
        )
    if plan_digest(files, options) != plan["digest"]:
        raise ValueError(
            f"files changed while they were tokenized; wait until they are complete, delete {out}, and give"
            " the command again"
        )
    _write_manifest(out, options.tokenizer, tokenizer, records)
    remove_indices(out / INDEX)  # of the text, which is not read again
    return read_manifest(out)


def _write_manifest(out: Path, name: str, tokenizer: Tokenizer, records: Sequence[dict[str, Any]]) -> None:
    own = BYTES
    if name != BYTES:
        own, path = TOKENIZER_FILE, Path(name)
        replace_file(out / own, read_bytes(path / TOKENIZER_FILE if path.is_dir() else path))
    totals = {name: sum(record[name] for record in records) for name in TOTALS}
    manifest = {
        "version": VERSION,
        "tokenizer": own,
        "tokenizer_hash": tokenizer_hash(name),
        "vocab": tokenizer.vocab,
        "separator": tokenizer.separator,
        **totals,
        "skipped": [line for record in records for line in record["skipped"]][:20],
        "shards": [{key: value for key, value in record.items() if key != "skipped"} for record in records],
    }
    replace_file(out / MANIFEST, json.dumps(manifest, indent=1).encode())


def plan_digest(files: Sequence[SourceFile], options: TokenizeOptions) -> str:
    """Return a hash of what the shards depend on: files with sizes and times, options, the tokenizer."""
    found = hashlib.sha256(json.dumps(asdict(options)).encode())
    for file in files:
        stat = os.stat(file.path)
        times = [str(file.path.absolute()), file.format, stat.st_size, stat.st_mtime_ns]
        found.update(json.dumps(times).encode())
    if options.tokenizer != BYTES:
        found.update(tokenizer_hash(options.tokenizer).encode())
        # the token after documents may come from a file beside it
        tokenizer = open_tokenizer(options.tokenizer, options.separator)
        found.update(json.dumps([tokenizer.vocab, tokenizer.separator]).encode())
    return found.hexdigest()[:24]


def _check_plan(out: Path, plan: dict[str, Any]) -> None:
    """Note what a folder is written from, or check that it is the same.

    Raises:
      ValueError: it is another, or the folder has something else in it.
    """
    path = out / PLAN
    if path.is_file():
        if parse_json(read_text(path), ours=True) != plan:
            raise ValueError(
                f"{out} was begun from other files or with other options (or a file has changed since); give"
                " another folder, or delete this one"
            )
        return
    if others := sorted(entry.name for entry in out.iterdir() if not entry.name.startswith(".")):
        raise ValueError(
            f"{out} has something else in it ({others[0]}); give a folder that is empty or not there"
        )
    replace_file(path, json.dumps(plan).encode())


def _written(units: Sequence[Unit], out: Path, options: TokenizeOptions, workers: int) -> Iterator[None]:
    """Write units, and yield after each."""
    if workers <= 1 or len(units) <= 1:
        tokenizer = open_tokenizer(options.tokenizer, options.separator)
        for unit in units:
            write_unit(unit, out, tokenizer, options.text, options.on_error)
            yield
        return
    # a fork of a process with threads may hang
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(units)), context, _begin_worker, (options,)) as pool:
        waiting = [pool.submit(_work, unit, out, options) for unit in units]
        try:
            for each in as_completed(waiting):
                each.result()
                yield
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_worker: dict[str, Any] = {}
"""The tokenizer of this worker process, opened once."""


def _begin_worker(options: TokenizeOptions) -> None:
    begin_worker(signal.SIGINT)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    _worker["tokenizer"] = open_tokenizer(options.tokenizer, options.separator)


def _work(unit: Unit, out: Path, options: TokenizeOptions) -> None:
    write_unit(unit, out, _worker["tokenizer"], options.text, options.on_error)
