"""Tokenize files into a folder of shards with a manifest, in parallel and resumable.

Files are cut into units; each unit becomes one shard, whichever process writes it. A shard that exists is not
written again. So the shards depend only on files and options. Next: `token_manifest.py`, `corpus.py`.
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
from typing import Any, NamedTuple

import numpy as np

from shardtrain.data.documents import OnError, Piece, encode_rows, open_rows, read_texts
from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData
from shardtrain.data.sources.numpy_tokens import ENDS
from shardtrain.data.sources.row_offsets import remove_indices
from shardtrain.data.token_manifest import (
    MANIFEST,
    MOST_TOKENS,
    PLAN,
    TOTALS,
    VERSION,
    Manifest,
    read_manifest,
    read_whole_manifest,
    shard_problem,
    tokenizer_hash,
)
from shardtrain.data.tokenizer import BYTES, TOKENIZER_FILE, Tokenizer, open_tokenizer, tokenizer_file
from shardtrain.data.tokens import write_tokens
from shardtrain.data.workers import begin_worker
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse
from shardtrain.system.atomic_write import clear_parts, new_file, replace_file
from shardtrain.system.untrusted_files import (
    check_kind,
    check_whole_number,
    crc32_of,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_text,
)

UNIT_BYTES = 1 << 26

INDEX = ".index"
"""Hidden folder, next to the shards, with indices of the rows of files."""

MOST_LISTED = 20
"""Largest number of errors in the record of a unit; all are counted."""


class Unit(NamedTuple):
    """The part of the input that becomes one shard.

    Attributes:
      number: number of the shard, from 0.
      pieces: rows of files, in order.
    """

    number: int
    pieces: list[Piece]

    @property
    def name(self) -> str:
        """The name of the shard, without a suffix."""
        return f"shard-{self.number:05}"


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """How text is tokenized.

    Args:
      tokenizer: bytes, a tokenizer.json of Hugging Face, or a folder that has one.
      text: name of the field that has the text, in formats with fields.
      separator: the token after each document, as text. None means the tokenizer's end of a document.
      on_error: what happens to a row or file that cannot be read: stop ends with an error, skip leaves it out
        and counts it.
      shard_bytes: approximate number of bytes of input in each shard.

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
    """Tokenize files into a folder, or complete a folder that was begun.

    Args:
      files: files of formats with rows.
      out: the folder; it may have been begun with the same files and options.
      options: how text is tokenized.
      workers: number of processes; 1 means this process.
      report: called with (units done, all units) at the beginning and after each unit.

    Raises:
      BadData: something cannot be read, and `on_error` is "stop"; file and row are named.
      ValueError: the folder has other data, there is no text in the files, or a file changed meanwhile.
    """
    tokenizer = open_tokenizer(options.tokenizer, options.separator)
    plan = {"version": VERSION, "digest": plan_digest(files, options)}
    out.mkdir(parents=True, exist_ok=True)
    _check_plan(out, plan)
    if (manifest := read_whole_manifest(out)) is not None:
        return manifest
    clear_parts(out, "*")
    units = make_units(files, options.shard_bytes, out, options.on_error)
    waiting = [unit for unit in units if not is_written(out, unit)]
    report(len(units) - len(waiting), len(units))
    for done, _ in enumerate(
        _write_units(waiting, out, options, workers), start=len(units) - len(waiting) + 1
    ):
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
        own = TOKENIZER_FILE
        replace_file(out / own, read_bytes(tokenizer_file(name)))
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
    """Return a hash of everything that shards depend on: files with sizes and times, options, tokenizer."""
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
    """Write the plan of a folder, or check that the folder has the same plan.

    Raises:
      ValueError: the plan differs, or the folder has other contents.
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


def _write_units(units: Sequence[Unit], out: Path, options: TokenizeOptions, workers: int) -> Iterator[None]:
    """Write the shards of units, and yield after each."""
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


def make_units(files: Sequence[SourceFile], unit_bytes: int, folder: Path, on_error: OnError) -> list[Unit]:
    """Cut files into units of similar size; small files share a unit, large files are cut at rows.

    Raises:
      BadData: a file that has to be cut is damaged, and `on_error` is "stop".
    """
    units: list[Unit] = []
    pieces: list[Piece] = []
    filled = 0
    for file in files:
        for piece, size in _cut_file(file, unit_bytes, folder, on_error):
            if pieces and filled + size > unit_bytes:
                units.append(Unit(len(units), pieces))
                pieces, filled = [], 0
            pieces.append(piece)
            filled += size
    return [*units, Unit(len(units), pieces)] if pieces else units


def _cut_file(
    file: SourceFile, unit_bytes: int, folder: Path, on_error: OnError
) -> Iterator[tuple[Piece, int]]:
    """Yield the pieces of a file, and the bytes of each."""
    whole = Piece(file)
    num_bytes = file.path.stat().st_size
    if num_bytes <= 1.5 * unit_bytes or FORMATS[file.format].whole:
        yield whole, num_bytes
        return
    try:
        num_rows = len(open_rows(file, folder / INDEX))
    except BadData:
        if on_error == "stop":
            raise
        yield whole, num_bytes  # writing the unit reports the error
        return
    rows = max(1, num_rows * unit_bytes // num_bytes)
    for start in range(0, num_rows, rows):
        stop = min(start + rows, num_rows)
        yield whole._replace(start=start, stop=stop), num_bytes * (stop - start) // num_rows


def write_unit(unit: Unit, out: Path, tokenizer: Tokenizer, field: str, on_error: OnError) -> dict[str, Any]:
    """Write the shard of a unit: its tokens, the ends of its documents, and last its record.

    Args:
      unit: the rows to read.
      out: the folder of the shards.
      tokenizer: the tokenizer.
      field: name of the field that has the text.
      on_error: "stop" raises an error; "skip" leaves the row out and counts it.

    Returns:
      The record.

    Raises:
      BadData: a row cannot be read, and `on_error` is "stop".
    """
    rows = (
        (piece.file.path, row, text)
        for piece in unit.pieces
        for row, text in read_texts(piece, field, out / INDEX)
    )
    skipped: list[str] = []
    num_skipped, last = 0, (Path(), "")
    ends: list[int] = []
    total = 0

    def documents() -> Iterator[np.ndarray]:
        nonlocal total, num_skipped, last
        for tokens in encode_rows(rows, len, tokenizer.encode):
            if isinstance(tokens, BadData):
                if on_error == "stop":
                    raise tokens
                num_skipped += 1
                # all rows of a damaged group have the same error
                if (tokens.path, tokens.why) != last and len(skipped) < MOST_LISTED:
                    extent = " (the whole file is left out)" if tokens.row is None else ""
                    skipped.append(f"{tokens.place}: {tokens.why}{extent}")
                last = tokens.path, tokens.why
            elif len(tokens):
                total += len(tokens) + 1
                ends.append(total)
                yield tokens

    path = out / f"{unit.name}.npy"
    dtype = next(name for name in ("uint8", "uint16", "uint32") if tokenizer.vocab <= np.iinfo(name).max + 1)
    write_tokens(path, documents(), dtype=dtype, separator=tokenizer.separator)
    with new_file(path.with_suffix(ENDS)) as file:
        file.write(np.array(ends, "<u8").tobytes())
    record = {
        "file": path.name,
        "num_tokens": total,
        "num_documents": len(ends),
        "num_skipped": num_skipped,
        "skipped": skipped,
        "checksum": checksum(path),
        "ends_checksum": checksum(path.with_suffix(ENDS)),
    }
    replace_file(out / f"{unit.name}.json", json.dumps(record).encode())
    return record


def is_written(out: Path, unit: Unit) -> bool:
    """Return whether the shard of a unit is complete, with the ends of its documents and its record."""
    try:
        return not shard_problem(out / f"{unit.name}.npy", read_record(out, unit))
    except (OSError, ValueError):
        return False


def read_record(out: Path, unit: Unit) -> dict[str, Any]:
    """Read the record of a unit, as an untrusted file.

    Raises:
      OSError, ValueError: there is none, or it is damaged.
    """
    record = check_kind(read_json(out / f"{unit.name}.json"), dict, "a record")
    for name in (*TOTALS, "checksum", "ends_checksum"):
        check_whole_number(record.get(name), name, MOST_TOKENS)
    skipped = check_kind(record.get("skipped"), list, "skipped")
    return {**record, "file": f"{unit.name}.npy", "skipped": list(map(str, skipped))}


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    with open_regular(path) as file:
        return crc32_of(file)
