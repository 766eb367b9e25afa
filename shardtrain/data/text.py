"""Text as the data of a run: files -> one token file of bytes -> windows.

Without paths it is the standard library of the Python that runs: real text that is always there.
Next: `windows.py`, `batches.py` (their order).
"""

import codecs
import hashlib
import json
import os
import sysconfig
import uuid
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from shardtrain.data.tokens import open_tokens, write_tokens
from shardtrain.data.windows import Windows, split_problems, split_tokens
from shardtrain.layout import problems_error

SEPARATOR = 0
"""The byte behind each document. No document holds it: a file with it counts as binary."""

NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "encodings"}
"""Folders of the standard library that are left out: others' code, tests, tables of numbers."""

CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A token file made from text.

    Args:
      path: the token file.
      num_tokens: how long it is.
      num_documents: files that are in it.
      skipped: files that are no text (UTF-8 without byte 0), or may not be read.
    """

    path: Path
    num_tokens: int
    num_documents: int
    skipped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Text:
    """The data of a run: the bytes of text files.

    Args:
      paths: text files, and folders of them, read in the order of their names; hidden names and
        empty files are passed over. Without paths: the sources of Python's standard library.
      seq: bytes in a window.
      heldout_fraction: the last part of the text, held out of training.

    Raises:
      ValueError: lists every value that is out of range.

    >>> Text(seq=128).vocab
    256
    """

    paths: tuple[Path, ...] = ()
    seq: int = 256
    heldout_fraction: float = 0.05

    def __post_init__(self) -> None:
        problems = split_problems(self.seq, self.heldout_fraction)
        if isinstance(self.paths, str | Path):
            problems.append(f"paths is one path; write paths=({str(self.paths)!r},)")
        if problems:
            raise problems_error("this text cannot be used", problems)

    @property
    def vocab(self) -> int:
        """A token is a byte."""
        return 256

    def pack(self, folder: Path) -> Packed:
        """Write the text into one token file, each document followed by byte 0.

        A file that is there is used again, unless the list of files, a size or a time has changed, or it
        is damaged: shorter than it was, or without its record.

        Args:
          folder: where the token file goes, such as the folder of the run. A walk over `paths` does
            not enter it.

        Raises:
          ValueError: lists every path that is not there or holds nothing; or no file is text.
        """
        files = [Path(path).absolute() for path in text_files(self.paths, folder)]
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        name = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]
        tokens, record = folder / f"text-{name}.npy", folder / f"text-{name}.json"
        packed = _packed(tokens, record)
        if packed is None:
            packed = _write_text(tokens, files)
            _write_record(record, packed)
        return packed

    def summary(self, folder: Path) -> str:
        """A line about what was read and what was left out, such as `text: 3 files, 12,345 bytes`."""
        packed = self.pack(folder)
        text = f"text: {packed.num_documents} files, {packed.num_tokens:,} bytes"
        if not packed.skipped:
            return text
        shown = ", ".join(packed.skipped[:3]) + (", ..." if len(packed.skipped) > 3 else "")
        return f"{text}; left out {len(packed.skipped)} that are no UTF-8 text, or not readable: {shown}"

    def train(self, folder: Path) -> Windows:
        """The windows to train on.

        Args:
          folder: where the token file goes, see `pack`.

        Raises:
          ValueError: see `pack`; or the text is too short.
        """
        return self._split(folder)[0]

    def heldout(self, folder: Path) -> Windows | None:
        """The windows held out, in the same way; None where nothing is held out."""
        return self._split(folder)[1]

    def _split(self, folder: Path) -> tuple[Windows, Windows | None]:
        return split_tokens(self.pack(folder).path, self.seq, self.heldout_fraction, self.vocab)


def text_files(paths: Sequence[Path], folder: Path) -> list[Path]:
    """The files that `Text` reads, in its order, whether they turn out to be text or not.

    Args:
      paths: files and folders; none is the standard library.
      folder: is not entered: what a run writes is not what it reads.

    Raises:
      ValueError: lists every path that is not there or holds nothing.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files, problems = [], []
    for path in map(Path, paths or (library,)):
        if path.is_dir():
            found = _walk(path, folder) if paths else _sources(library, folder)
        else:
            found = [path] if path.is_file() else []
        found = [file for file in found if file.stat().st_size]
        files += found
        if not found:
            why = f"holds nothing to read outside {folder}" if path.is_dir() else "is not there, or empty"
            problems.append(f"{path.absolute()} {why}; give a text file or a folder of them")
    if problems:
        raise problems_error("this text cannot be read", problems)
    return files


def _walk(path: Path, avoided: Path, not_read: Set[str] = frozenset()) -> list[Path]:
    found: list[Path] = []
    for root, folders, names in os.walk(path):
        if Path(root).resolve() == avoided.resolve():
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in not_read)
        files = (Path(root, name) for name in sorted(names) if not name.startswith("."))
        found += [file for file in files if file.is_file()]
    return found


def _sources(library: Path, avoided: Path) -> list[Path]:
    return [file for file in _walk(library, avoided, NOT_READ) if file.suffix == ".py"]


def _is_text(file: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _chunks(file):
            decoder.decode(chunk)
            if SEPARATOR in chunk:
                return False
        decoder.decode(b"", final=True)
    except (UnicodeDecodeError, PermissionError):
        return False
    return True


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _write_text(path: Path, files: Sequence[Path]) -> Packed:
    texts, others = [], []
    for file in files:
        (texts if _is_text(file) else others).append(file)
    if not texts:
        raise ValueError(
            f"none of {len(others)} files is UTF-8 text without byte 0, such as {others[0]}; give text files"
        )

    def parts() -> Iterator[np.ndarray]:
        for file in texts:
            for chunk in _chunks(file):
                yield np.frombuffer(chunk, np.uint8)
            yield np.array([SEPARATOR], np.uint8)

    num_tokens = write_tokens(path, parts(), dtype="uint8")
    return Packed(path=path, num_tokens=num_tokens, num_documents=len(texts), skipped=tuple(map(str, others)))


def _packed(tokens: Path, record: Path) -> Packed | None:
    """What was written before, where it is still there and as long as it was."""
    try:
        found = json.loads(record.read_text())
        packed = Packed(path=tokens, **found | {"skipped": tuple(found["skipped"])})
        whole = len(open_tokens(tokens)) == packed.num_tokens
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return packed if whole else None


def _write_record(path: Path, packed: Packed) -> None:
    values = {name: value for name, value in asdict(packed).items() if name != "path"}
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    part.write_text(json.dumps(values))
    part.replace(path)
