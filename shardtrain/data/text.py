"""Train on the bytes of text files: write them into one token file, and cut that into windows.

Without paths the text is the source code of Python's standard library, which is always there.
Next: `windows.py`, `batches.py`.
"""

import codecs
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardtrain.data.samples import find_split_problems
from shardtrain.data.sources.find import walk_files
from shardtrain.data.tokens import open_tokens, write_tokens
from shardtrain.data.windows import Windows, split_tokens
from shardtrain.errors.messages import refuse
from shardtrain.system.atomic_write import clear_parts, replace_file
from shardtrain.system.excerpts import some
from shardtrain.system.plain_text import encoding_problem
from shardtrain.system.untrusted_files import (
    check_kind,
    check_whole_number,
    open_regular,
    parse_json,
    read_text,
)

SEPARATOR = 0
"""The byte after each document. A file that contains it counts as binary, and is left out."""

CHUNK_BYTES = 1 << 24
MAX_TOKENS = 1 << 60
"""Largest count in a record, which is read as an untrusted file."""

OWNER_ONLY = 0o600
"""File mode of packed text: it may be a copy of files that other users may not read."""


EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "encodings",
}
"""Folders of the standard library that are left out: installed packages, tests, tables of numbers."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A token file that was packed from text files.

    Args:
      path: the token file.
      num_tokens: number of its tokens.
      num_documents: number of text files in it.
      skipped: files that are not text (UTF-8 without byte 0) or not readable; for another encoding with the
        command that converts the file.
      left_out: folders that were not searched, each with the reason.
    """

    path: Path
    num_tokens: int
    num_documents: int
    skipped: tuple[str, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Text:
    """Train on the bytes of text files.

    Args:
      paths: text files, and folders of text files, read in the order of their names; hidden names and empty
        files are skipped. Without paths the text is the source code of Python's standard library.
      seq: bytes per window.
      heldout_fraction: fraction of the text, at its end, that is held out of training.

    Raises:
      ValueError: lists every value of a wrong type or out of range.

    >>> Text(seq=128).vocab
    256
    """

    paths: tuple[Path, ...] = ()
    seq: int = 256
    heldout_fraction: float = 0.05

    def __post_init__(self) -> None:
        refuse("this text cannot be used", find_split_problems(self))

    @property
    def vocab(self) -> int:
        """The size of the vocabulary: each token is a byte."""
        return 256

    def pack(self, folder: Path) -> Packed:
        """Write the text into one token file, each document followed by byte 0; only its owner may read it.

        An existing file is reused, unless it is damaged, or the list of files, a size or a time has changed
        (the time of modification, or ctime, which no user can set).

        Args:
          folder: the folder for the token file, such as the run folder. It is not searched for text.

        Raises:
          ValueError: lists every path that does not exist or has no text; or no file is text.
        """
        # the token file is named by a hash of the files, their sizes and times: a change makes a new one
        found = find_texts(self.paths, folder)
        files = [path.absolute() for path in found.files]
        # ctime only the system sets
        found_stats = [(str(file), file.stat()) for file in files]
        stats = [(name, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for name, each in found_stats]
        tokens = folder / f"text-{hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]}.npy"
        packed = _read_existing(tokens)
        if packed is None:
            packed = _write_text(tokens, files)
        clear_parts(folder, "text-*")
        return replace(packed, left_out=found.left_out)

    def summary(self, folder: Path) -> str:
        """Return a line that says what was read and skipped, such as `text: 3 files, 12,345 bytes`."""
        packed = self.pack(folder)
        text = f"text: {packed.num_documents} files, {packed.num_tokens:,} bytes"
        if skipped := packed.skipped:
            text += f"; left out {len(skipped)} that are not UTF-8 text, or not readable: {some(skipped, 3)}"
        if folders := packed.left_out:
            text += f"; not entered {len(folders)} folders: {some(folders, 3)}"
        return text

    def train(self, folder: Path) -> Windows:
        """Return the windows to train on; `folder` is that of the token file, see `pack`.

        Raises:
          ValueError: see `pack`; or the text is too short.
        """
        packed = self._trained_on[folder.resolve()] = self.pack(folder)
        return self._split(packed)[0]

    def heldout(self, folder: Path) -> Windows | None:
        """Return the held-out windows of the text that `train` found; None if nothing is held out."""
        return self._split(self._trained_on.get(folder.resolve()) or self.pack(folder))[1]

    @cached_property
    def _trained_on(self) -> dict[Path, Packed]:
        """Folder -> the text that `train` split, so that `heldout` splits the same even if files change."""
        return {}

    def _split(self, packed: Packed) -> tuple[Windows, Windows | None]:
        return split_tokens(packed.path, self.seq, self.heldout_fraction, self.vocab)


def _explain_binary(file: Path) -> str | None:
    """Return the name of a file that is no text, with its encoding if known; None if it is text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _read_chunks(file):
            if problem := encoding_problem(chunk):
                return f"{file} ({problem})"
            decoder.decode(chunk)
            if SEPARATOR in chunk:
                return str(file)
        decoder.decode(b"", final=True)
    except (UnicodeDecodeError, PermissionError):
        return str(file)
    return None


def _read_chunks(file: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in chunks, without a byte order mark."""
    with open_regular(file) as stream:
        mark = len(codecs.BOM_UTF8)
        stream.seek(mark if stream.read(mark) == codecs.BOM_UTF8 else 0)
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _write_text(path: Path, files: Sequence[Path]) -> Packed:
    # decide by the content which files are text, before anything is written
    texts, others = [], []
    for file in files:
        if (name := _explain_binary(file)) is not None:
            others.append(name)
        elif next(_read_chunks(file), b""):
            texts.append(file)
    if not texts and not others:
        raise ValueError(f"{files[0]} has a byte order mark, and no text; give text files")
    if not texts:
        raise ValueError(
            f"none of {len(others)} files is UTF-8 text without byte 0, such as {others[0]}; give text files"
        )

    def parts() -> Iterator[np.ndarray]:
        for file in texts:
            for chunk in _read_chunks(file):
                yield np.frombuffer(chunk, np.uint8)
            yield np.array([SEPARATOR], np.uint8)

    num_tokens = write_tokens(path, parts(), dtype="uint8", mode=OWNER_ONLY)
    counts = {"num_tokens": num_tokens, "num_documents": len(texts), "skipped": others}
    replace_file(path.with_suffix(".json"), json.dumps(counts).encode(), OWNER_ONLY)
    return Packed(path=path, num_tokens=num_tokens, num_documents=len(texts), skipped=tuple(others))


def _read_existing(tokens: Path) -> Packed | None:
    """Return the existing token file, if it has the recorded length."""
    # any doubt about the record or the file means that the text is packed again
    try:
        found = check_kind(parse_json(read_text(tokens.with_suffix(".json")), ours=True), dict, "a record")
        packed = Packed(
            path=tokens,
            num_tokens=check_whole_number(found["num_tokens"], "num_tokens", MAX_TOKENS),
            num_documents=check_whole_number(found["num_documents"], "num_documents", MAX_TOKENS),
            skipped=tuple(map(str, check_kind(found["skipped"], list, "skipped"))),
        )
        is_whole = len(open_tokens(tokens)) == packed.num_tokens
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return packed if is_whole else None


class TextPaths(NamedTuple):
    """The files that `Text` reads, in its order, text or not, and the folders that it does not search."""

    files: list[Path]
    left_out: tuple[str, ...]


def find_texts(paths: Sequence[Path], folder: Path) -> TextPaths:
    """Find the files that `Text` reads.

    Args:
      paths: files and folders; without any, the standard library is searched.
      folder: a folder that is not searched, as it holds files of the run.

    Raises:
      ValueError: lists every path that does not exist or has no files with content.
    """
    library = Path(sysconfig.get_path("stdlib"))
    if not paths:
        files = _walk(library, folder, EXCLUDED_FOLDERS).files
        return TextPaths([file for file in files if file.suffix == ".py" and file.stat().st_size], ())
    files, left_out, problems = [], [], []
    for path in map(Path, paths):
        found = _walk(path, folder) if path.is_dir() else TextPaths([path] if path.is_file() else [], ())
        filled = [file for file in found.files if file.stat().st_size]
        files += filled
        left_out += found.left_out
        if not filled:
            why = f"holds nothing to read outside {folder}" if path.is_dir() else "is not there, or empty"
            why += f" (not entered: {some(found.left_out, 3)})" if found.left_out else ""
            problems.append(f"{path.absolute()} {why}; give a text file or a folder of them")
    refuse("this text cannot be read", problems)
    return TextPaths(files, tuple(left_out))


def _walk(path: Path, excluded_folder: Path, excluded_names: Set[str] = frozenset()) -> TextPaths:
    files: list[Path] = []
    left_out: list[str] = []
    for root, folders, found in walk_files(path, left_out.append, lambda name: name not in excluded_names):
        if root.resolve() == excluded_folder.resolve():
            folders.clear()
        else:
            files += found
    return TextPaths(files, tuple(left_out))
