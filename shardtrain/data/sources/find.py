"""Find the files of patterns, and recognise the format of each.

Next: `__init__.py`, the formats; `../corpus.py`, which cuts their tokens into windows.
"""

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.format import BadData
from shardtrain.data.sources.unread_files import explain_file, read_compressed_head
from shardtrain.errors.messages import near, needs_library, refuse
from shardtrain.system.excerpts import some
from shardtrain.system.plain_text import MARK
from shardtrain.system.untrusted_data import parse_record
from shardtrain.system.untrusted_files import kind_text, open_regular, read_text

HEAD_BYTES = 16
BESIDE = (
    "manifest.json",
    "plan.json",
    "tokenizer.json",
    "dataset_info.json",
    "state.json",
    "dataset_dict.json",
    "tokenizer_config.json",
)
"""Names of files in folders of data that are no data."""

DATASET_STATE, DATASET_SPLITS = "state.json", "dataset_dict.json"
README = "readme.md"
"""A description of a folder, which is no document if other files are of another format."""

RECORD = re.compile(r"shard-\d{5,}\.json")
MOST_PROBLEMS = 8


class SourceFile(NamedTuple):
    """A file of data, or a folder of images, and the name of its format."""

    path: Path
    format: str


def find_files(patterns: Sequence[Path | str], format_name: str | None = None) -> list[SourceFile]:
    """Find the files of paths and patterns.

    Args:
      patterns: files, folders (searched for files of known formats; hidden names are skipped), and patterns
        with *, ?, [] and ** (any folders). The files of each are in the order of their names.
      format_name: the format of all files. None means that each is recognised by its name, or else its
        content.

    Returns:
      The files; a folder with only images counts as one file.

    Raises:
      ValueError: lists each pattern that names nothing, each file that is not recognised, and each library
        that is missing.
    """
    if format_name is not None and format_name not in FORMATS:
        raise ValueError(f"there is no format {near(format_name, FORMATS)}")
    found: list[SourceFile] = []
    problems: list[str] = []
    for pattern in map(str, patterns):
        paths = [Path(pattern)] if os.path.lexists(pattern) else match_pattern(pattern)
        files: list[SourceFile] = []
        for path in paths:
            try:
                files += (
                    _find_in_folder(path, format_name) if path.is_dir() else [_recognise(path, format_name)]
                )
            except (OSError, ValueError) as error:
                problems.append(str(error))
                break
        found += files
        if not paths:
            problems.append(f"{Path(pattern).absolute()} matches no file; give a file, a folder or a pattern")
        elif not files and not any(str(path) in problem for path in paths for problem in problems):
            problems.append(
                f"{Path(pattern).absolute()} has no file of a known format ({', '.join(FORMATS)})"
            )
    problems += missing_libraries({file.format for file in found})
    refuse("this data cannot be read", problems, MOST_PROBLEMS)
    return drop_duplicates(found)


def match_pattern(pattern: str) -> list[Path]:
    """Return the paths that match a pattern, sorted, without files that are no data (`dataset_info.json`).

    A pattern for all files at any depth (`web/**`, `web/**/*`) returns no folders.
    """
    found = [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]
    *folders, last = Path(pattern).parts
    files_alone = last == "**" or (last == "*" and "**" in folders)
    return [path for path in found if not (_is_beside(path.name) or (files_alone and path.is_dir()))]


def drop_duplicates(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Drop duplicates: the same file by another path, or the second of a pair of .bin and .idx."""
    found: dict[str, SourceFile] = {}
    for file in files:
        real = os.path.realpath(file.path)
        found.setdefault(os.path.splitext(real)[0] if file.format == "megatron" else real, file)
    return list(found.values())


def recognise(path: Path) -> str | None:
    """Return the format of a file, by the longest matching suffix of its name, or else by its first bytes.

    >>> recognise(Path("web-00.jsonl.gz")), recognise(Path("web.PARQUET")), recognise(Path("no_such_file"))
    ('jsonl.gz', 'parquet', None)
    """
    name = path.name.lower()
    endings = {
        suffix: key for key, each in FORMATS.items() for suffix in each.suffixes if name.endswith(suffix)
    }
    if endings:
        return endings[max(endings, key=len)]
    try:
        with open_regular(path) as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return None
    found = next((key for key, each in FORMATS.items() if each.magic and head.startswith(each.magic)), None)
    # a compressed file may have any content; a damaged one keeps the format of its first bytes
    inside = read_compressed_head(path).lstrip(MARK.encode()).lstrip() if found else b""
    return None if inside and not inside.startswith(b"{") else found


def missing_libraries(names: set[str]) -> list[str]:
    """Return a line for each format whose library is not installed, with the command that installs it."""
    lines = []
    for name in sorted(names):
        needs = FORMATS[name].needs
        if needs is not None and find_spec(needs[0]) is None:
            lines.append(needs_library(f"{name} files are", *needs))
    return lines


def _recognise(path: Path, format_name: str | None) -> SourceFile:
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path.absolute()}")
    if not path.is_file():
        raise ValueError(f"{path.absolute()} is {kind_text(path.stat().st_mode)}; give a regular file")
    name = format_name or recognise(path)
    if name is None and (problem := explain_file(path)):
        raise ValueError(f"{path.absolute()} is read in no format: {problem}")
    if name is None:
        raise ValueError(
            f"{path.absolute()} is of no known format ({', '.join(FORMATS)}); give it the ending of its"
            " format"
        )
    return SourceFile(path, name)


def _find_in_folder(folder: Path, format_name: str | None) -> list[SourceFile]:
    if (folder / DATASET_SPLITS).is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{DATASET_STATE}"))
        raise ValueError(f"{folder.absolute()} has the splits {', '.join(splits)}; name one of these folders")
    if (folder / DATASET_STATE).is_file():
        return [SourceFile(path, "arrow") for path in _dataset_files(folder)]
    found: list[SourceFile] = []
    left_out: list[str] = []
    unread: list[str] = []
    with_images = False
    for root, folders, files in walk_files(folder, left_out.append, lambda name: not name.startswith("_")):
        if root != folder and any((root / name).is_file() for name in (DATASET_STATE, DATASET_SPLITS)):
            found += _find_in_folder(root, format_name)
            folders.clear()
            continue
        for path in files:
            # beside a shard of tokens is its record
            if path.name.startswith("_") or _is_beside(path.name) or RECORD.fullmatch(path.name):
                continue
            key = format_name or recognise(path)
            if key is None and read_compressed_head(path):
                unread.append(f"{path}: {explain_file(path)}")
            with_images |= key == "images"
            if key is not None and key != "images":
                found.append(SourceFile(path, key))
    if left_out:
        raise ValueError(
            f"{folder.absolute()} has folders that are not entered: {some(left_out, 3)}; make them readable,"
            f" or name them by paths or patterns, which"
            " follow links"
        )
    if unread:
        raise ValueError(f"{folder.absolute()} has files that are read in no format: {some(unread, 3)}")
    if any(file.format != "text" for file in found):
        found = [file for file in found if file.path.name.lower() != README]
    # the folder of images is one source: its folders are classes
    return [SourceFile(folder, "images")] if with_images and not found else found


def _is_beside(name: str) -> bool:
    return name in BESIDE or name.endswith(".ends")


def _dataset_files(folder: Path) -> list[Path]:
    """Return the files of a folder that `datasets` saved, in its order."""
    try:
        listed = parse_record(read_text(folder / DATASET_STATE))["_data_files"]
        return [folder / Path(each["filename"]).name for each in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(folder / DATASET_STATE, f"it lists no files of a dataset ({error!r})") from None


def summary(files: Sequence[SourceFile]) -> str:
    """Return the number of files of each format, such as `3 parquet, 1 jsonl`."""
    names = sorted(file.format for file in files)
    return some([f"{len(list(group))} {name}" for name, group in groupby(names)], 8)


def walk_files(
    folder: Path, left_out: Callable[[str], None], enter: Callable[[str], bool]
) -> Iterator[tuple[Path, list[str], list[Path]]]:
    """Yield (a folder, names of its subfolders, paths of its regular files), as `os.walk`, sorted.

    Hidden names are skipped, and so are files that are not regular: a FIFO would block. The caller may clear
      the
    names of subfolders, so that none is entered.

    Args:
      folder: the first folder.
      left_out: called with each folder that is not entered, and the reason: it is a link, or cannot be read.
        A link might lead in a circle, or to files that are not meant for training.
      enter: name of a folder -> whether to enter it; other folders are not reported.
    """

    def unreadable(error: OSError) -> None:
        left_out(f"{error.filename} ({error.strerror})")

    for name, folders, names in os.walk(folder, onerror=unreadable):
        root = Path(name)
        folders[:] = sorted(each for each in folders if not each.startswith(".") and enter(each))
        try:
            files = [root / each for each in sorted(names) if not each.startswith(".")]
            files = [file for file in files if file.is_file()]
        except OSError as error:
            unreadable(error)
            continue
        yield root, folders, files
        for each in folders:
            if (root / each).is_symlink():
                left_out(f"{root / each} (a link; name {(root / each).resolve()} itself)")
