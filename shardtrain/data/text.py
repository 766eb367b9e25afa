"""Text files as the data of a run: packed into one token file of bytes, then cut into windows.

Without paths it is the sources of Python's standard library: real text that is always there.
Next: `windows.py`, `batches.py` (their order).
"""

import codecs
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.data.text_files import find_texts
from shardtrain.data.tokens import open_tokens, write_tokens
from shardtrain.data.windows import Windows, split_problems, split_tokens
from shardtrain.errors.messages import refuse
from shardtrain.system.atomic_write import clear_parts, replace_file, unlink_unlocked
from shardtrain.system.excerpts import some
from shardtrain.system.plain_text import encoding_problem
from shardtrain.system.untrusted_files import of_kind, open_regular, parse_json, read_text, whole_number

SEPARATOR = 0
"""The byte after each document. No document contains it: a file that does counts as binary."""

CHUNK_BYTES = 1 << 24
MAX_TOKENS = 1 << 60
"""Upper limit of the counts in a record, which is read as an untrusted file."""

OWNER_ONLY = 0o600
"""File mode of packed text: it may be a copy of files that other users may not read."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A token file packed from text files.

    Args:
      path: the token file.
      num_tokens: its length.
      num_documents: number of files in it.
      skipped: files that are not text (UTF-8 without byte 0), or without permission to read; of those in
        another encoding with what to do.
      left_out: folders that were not searched, each with the reason.
    """

    path: Path
    num_tokens: int
    num_documents: int
    skipped: tuple[str, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Text:
    """The data of a run: the bytes of text files.

    Args:
      paths: text files, and folders of them, read in the order of their names; hidden names and
        empty files are skipped. Without paths: the sources of Python's standard library.
      seq: bytes per window.
      heldout_fraction: fraction at the end of the text that is held out of training.

    Raises:
      ValueError: lists every value of a wrong type or out of range.

    >>> Text(seq=128).vocab
    256
    """

    paths: tuple[Path, ...] = ()
    seq: int = 256
    heldout_fraction: float = 0.05

    def __post_init__(self) -> None:
        refuse("this text cannot be used", split_problems(self))

    @property
    def vocab(self) -> int:
        """The size of the vocabulary: a token is a byte."""
        return 256

    def pack(self, folder: Path) -> Packed:
        """Write the text into one token file, each document followed by byte 0; only its owner may read it.

        An existing file is reused, unless it is damaged, or the list of files, a size or a time has changed
        (the time of modification, or ctime, which no user can set). Token files that this host packed from
        an earlier state of the same paths are deleted, except those that windows in any process are open on.

        Args:
          folder: the folder of the token file, such as that of the run. It is not searched for text.

        Raises:
          ValueError: lists every path that does not exist or has no text in it; or no file is text.
        """
        # 1. name the token file by a hash of the files, their sizes and times: a change makes a new one
        found = find_texts(self.paths, folder)
        files = [path.absolute() for path in found.files]
        stats = [(str(file), *_identity(file.stat())) for file in files]
        tokens = folder / f"text-{_digest(stats)}.npy"
        made_by = {
            "host": socket.gethostname(),
            "paths": _digest([str(Path(p).absolute()) for p in self.paths]),
        }
        # 2. pack the text unless that was done before
        packed = _existing(tokens)
        if packed is None:
            packed = _write_text(tokens, files)
            _write_record(packed, made_by)
        # 3. delete what interrupted calls and earlier states of the same text have left
        clear_parts(folder, "text-*")
        _delete_older(tokens, made_by)
        return replace(packed, left_out=found.left_out)

    def summary(self, folder: Path) -> str:
        """Return a line with what was read and what was skipped, such as `text: 3 files, 12,345 bytes`."""
        packed = self.pack(folder)
        text = f"text: {packed.num_documents} files, {packed.num_tokens:,} bytes"
        if skipped := packed.skipped:
            text += f"; left out {len(skipped)} that are not UTF-8 text, or not readable: {some(skipped, 3)}"
        if folders := packed.left_out:
            text += f"; not entered {len(folders)} folders: {some(folders, 3)}"
        return text

    def train(self, folder: Path) -> Windows:
        """Return the windows to train on.

        Args:
          folder: the folder of the token file, see `pack`.

        Raises:
          ValueError: see `pack`; or the text is too short.
        """
        packed = self._trained_on[folder.resolve()] = self.pack(folder)
        return self._split(packed)[0]

    def heldout(self, folder: Path) -> Windows | None:
        """Return the held-out windows; None if nothing is held out.

        They are of the text that `train` has found, also where it has changed since, as long as its windows
        are in use.
        """
        packed = self._trained_on.get(folder.resolve())
        if packed is None or _existing(packed.path) is None:
            packed = self.pack(folder)
        return self._split(packed)[1]

    @cached_property
    def _trained_on(self) -> dict[Path, Packed]:
        """By folder what `train` has returned windows of: two calls must not split two states of a text."""
        return {}

    def _split(self, packed: Packed) -> tuple[Windows, Windows | None]:
        return split_tokens(packed.path, self.seq, self.heldout_fraction, self.vocab)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Return values that change with a file's content: size, mtime, and ctime, which only the system sets."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _left_out(file: Path) -> str | None:
    """Return the name of a file that is no text, with its encoding if a mark says it; None for a text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _chunks(file):
            if problem := encoding_problem(chunk):
                return f"{file} ({problem})"
            decoder.decode(chunk)
            if SEPARATOR in chunk:
                return str(file)
        decoder.decode(b"", final=True)
    except (UnicodeDecodeError, PermissionError):
        return str(file)
    return None


def _chunks(file: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, without the byte order mark at its beginning."""
    with open_regular(file) as stream:
        mark = len(codecs.BOM_UTF8)
        stream.seek(mark if stream.read(mark) == codecs.BOM_UTF8 else 0)
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _write_text(path: Path, files: Sequence[Path]) -> Packed:
    # decide by the content which files are text, before anything is written
    texts, others = [], []
    for file in files:
        if (name := _left_out(file)) is not None:
            others.append(name)
        elif next(_chunks(file), b""):
            texts.append(file)
    if not texts and not others:
        raise ValueError(f"{files[0]} has a byte order mark, and no text; give text files")
    if not texts:
        raise ValueError(
            f"none of {len(others)} files is UTF-8 text without byte 0, such as {others[0]}; give text files"
        )

    def parts() -> Iterator[np.ndarray]:
        for file in texts:
            for chunk in _chunks(file):
                yield np.frombuffer(chunk, np.uint8)
            yield np.array([SEPARATOR], np.uint8)

    num_tokens = write_tokens(path, parts(), dtype="uint8", mode=OWNER_ONLY)
    return Packed(path=path, num_tokens=num_tokens, num_documents=len(texts), skipped=tuple(others))


def _existing(tokens: Path) -> Packed | None:
    """Return the token file that was packed before, if it is there and has the recorded length."""
    # any doubt about the record or the file means that the text is packed again
    try:
        found = _read_record(tokens.with_suffix(".json"))
        packed = Packed(
            path=tokens,
            num_tokens=whole_number(found["num_tokens"], "num_tokens", MAX_TOKENS),
            num_documents=whole_number(found["num_documents"], "num_documents", MAX_TOKENS),
            skipped=tuple(map(str, of_kind(found["skipped"], list, "skipped"))),
        )
        is_whole = len(open_tokens(tokens)) == packed.num_tokens
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return packed if is_whole else None


def _read_record(path: Path) -> dict[str, Any]:
    return of_kind(parse_json(read_text(path), ours=True), dict, str(path))


def _write_record(packed: Packed, made_by: dict[str, str]) -> None:
    values = {"num_tokens": packed.num_tokens, "num_documents": packed.num_documents}
    record = {**values, "skipped": packed.skipped, "made_by": made_by}
    replace_file(packed.path.with_suffix(".json"), json.dumps(record).encode(), OWNER_ONLY)


def _delete_older(tokens: Path, made_by: dict[str, str]) -> None:
    """Delete token files of the same paths, packed by this host before they changed."""
    for record in tokens.parent.glob("text-????????????????.json"):
        try:
            is_older = record.stem != tokens.stem and _read_record(record).get("made_by") == made_by
        except (OSError, ValueError):
            continue  # not written by `_write_record`
        if is_older:
            unlink_unlocked(record.with_suffix(".npy"))
            if not record.with_suffix(".npy").exists():
                record.unlink(missing_ok=True)
