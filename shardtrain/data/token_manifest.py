"""Read the manifest of a folder of tokens, and check that the folder is complete.

Next: `tokenize.py`, which writes it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.data.sources.find import MOST_PROBLEMS, SourceFile
from shardtrain.data.sources.numpy_tokens import ENDS, find_tokens
from shardtrain.data.tokenizer import BYTES, TOKENIZER_FILE, tokenizer_file
from shardtrain.errors.messages import problems_error
from shardtrain.system.excerpts import some
from shardtrain.system.untrusted_files import (
    check_kind,
    check_whole_number,
    parse_json,
    read_bytes,
    read_text,
)

MANIFEST, PLAN = "manifest.json", "plan.json"
FIRST_SHARD = "shard-00000.npy"
VERSION = 1
MOST_TOKENS = 1 << 60
MOST_BYTES = 1 << 30
"""Limits for the values of a manifest, which is not trusted."""

TOTALS = ("num_tokens", "num_documents", "num_skipped")
END_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a folder of tokens.

    Args:
      folder: the folder.
      tokenizer: bytes, or the path of the folder's tokenizer.
      tokenizer_hash: a hash of the content of its tokenizer.json; bytes for bytes.
      vocab: number of tokens in the vocabulary.
      separator: the token after each document.
      num_tokens: number of tokens, with separators.
      num_documents: number of documents that are not empty.
      num_skipped: number of rows and files that could not be read and were left out.
      skipped: the first errors, as text.
      shards: records of the shards, in order.
    """

    folder: Path
    tokenizer: str
    tokenizer_hash: str
    vocab: int
    separator: int
    num_tokens: int
    num_documents: int
    num_skipped: int
    skipped: tuple[str, ...]
    shards: tuple[dict[str, Any], ...]

    def files(self) -> list[Path]:
        """Return the shards, in order."""
        return [self.folder / shard["file"] for shard in self.shards]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder of tokens, as an untrusted file.

    Raises:
      FileNotFoundError: the folder has no manifest.
      ValueError: the manifest is damaged.
    """
    path = folder / MANIFEST
    try:
        found = check_kind(parse_json(read_text(path, MOST_BYTES), ours=True), dict, MANIFEST)
        if found.get("version") != VERSION:
            raise ValueError(f"version is {found.get('version')!r}; version {VERSION} is read")
        counts = {name: check_whole_number(found.get(name), name, MOST_TOKENS) for name in TOTALS}
        shards = tuple(
            check_kind(each, dict, "a shard") for each in check_kind(found.get("shards"), list, "shards")
        )
        for shard in shards:
            name = check_kind(shard.get("file"), str, "file")
            if "/" in name or not name.endswith(".npy"):
                raise ValueError(f"file is {name!r}; it is the name of a .npy file in this folder")
            check_whole_number(shard.get("num_tokens"), "num_tokens", MOST_TOKENS)
            check_whole_number(shard.get("num_documents"), "num_documents", MOST_TOKENS)
        tokenizer = BYTES if found.get("tokenizer") == BYTES else str(folder / TOKENIZER_FILE)
        return Manifest(
            folder=folder,
            tokenizer=tokenizer,
            tokenizer_hash=check_kind(found.get("tokenizer_hash"), str, "tokenizer_hash"),
            vocab=check_whole_number(found.get("vocab"), "vocab", 1 << 32, 1),
            separator=check_whole_number(found.get("separator"), "separator", 1 << 32),
            skipped=tuple(map(str, check_kind(found.get("skipped"), list, "skipped"))),
            shards=shards,
            **counts,
        )
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no manifest of tokens: {error}; tokenize again") from None


def tokenizer_hash(name: Path | str) -> str:
    """Return a hash of the content of a tokenizer.json, which may be in a folder; bytes for bytes.

    Raises:
      OSError: it cannot be read.
    """
    if str(name) == BYTES:
        return BYTES
    return hashlib.sha256(read_bytes(tokenizer_file(name))).hexdigest()[:24]


def shard_problem(path: Path, record: Mapping[str, Any]) -> str:
    """Return why the size of a shard, or of its file of ends, differs from its record; "" if it does not."""
    try:
        num_tokens = find_tokens(path).num_tokens
        ends_bytes = path.with_suffix(ENDS).stat().st_size
    except (OSError, ValueError) as error:
        return str(error)
    if num_tokens != record["num_tokens"]:
        return f"{path} has {num_tokens:,} tokens; the manifest says {record['num_tokens']:,}"
    if ends_bytes != END_BYTES * record["num_documents"]:
        return (
            f"{path.with_suffix(ENDS)} has {ends_bytes:,} bytes; {record['num_documents']:,} documents need"
            f" {END_BYTES} bytes each"
        )
    return ""


def read_whole_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder if it is finished and has all shards, else None."""
    try:
        manifest = read_manifest(folder)
    except (FileNotFoundError, ValueError):
        return None
    pairs = zip(manifest.files(), manifest.shards, strict=True)
    return None if any(shard_problem(path, shard) for path, shard in pairs) else manifest


def token_folders(files: Sequence[SourceFile]) -> list[Manifest]:
    """Return the manifests of the folders of tokens that have these files.

    Raises:
      ValueError: a folder is not finished or has no readable manifest, or the tokenizers differ.
    """
    folders = dict.fromkeys(file.path.parent for file in files if file.format == "npy")
    found = []
    for folder in folders:
        if (folder / PLAN).is_file() and not (folder / MANIFEST).is_file():
            raise make_unfinished_error(folder)
        if (folder / MANIFEST).is_file() and any((folder / name).is_file() for name in (PLAN, FIRST_SHARD)):
            found.append(read_manifest(folder))
    kinds = {(each.vocab, each.separator, each.tokenizer_hash): str(each.folder) for each in found}
    if len(kinds) > 1:
        raise ValueError(
            f"{' and '.join(kinds.values())} have tokens of different tokenizers (vocabulary, separator, hash"
            f" of the tokenizer: {some(list(kinds))}); tokenize all by the same one"
        )
    return found


def make_unfinished_error(folder: Path) -> ValueError:
    """Return the error for a folder of tokens without a manifest."""
    return ValueError(f"{folder} is not finished; give the same shardtrain data tokenize command again")


def check_shards(files: Sequence[SourceFile]) -> None:
    """Check the files of folders of tokens against their manifests.

    Raises:
      ValueError: lists files of a folder that are gone, have another number of tokens or documents, or are
        not in its manifest; or see `token_folders`.
    """
    for manifest in token_folders(files):
        records = {shard["file"]: shard for shard in manifest.shards}
        problems = []
        for path in (file.path for file in files if file.path.parent == manifest.folder):
            known = path.name in records
            problem = shard_problem(path, records[path.name]) if known else f"{path} is not in its manifest"
            problems += [problem] if problem else []
        if problems:
            again = "bring its files back, or give the command that made it again"
            raise problems_error(f"{manifest.folder} is damaged; {again}", problems, MOST_PROBLEMS)
