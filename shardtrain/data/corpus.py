"""Train on a corpus: text or tokens in files of any format of `sources/`, cut into windows.

Text is tokenized into the run folder at the first start. Tokenize a large corpus before, with
`shardtrain data tokenize`. Next: `windows.py`, `tokenize.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shardtrain.data.bucketed import DocumentPieces
from shardtrain.data.documents import OnError, refuse_mixed
from shardtrain.data.samples import SplitData, find_split_problems
from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import SourceFile, drop_duplicates, find_files, summary
from shardtrain.data.token_manifest import (
    MANIFEST,
    PLAN,
    Manifest,
    check_shards,
    make_unfinished_error,
    read_manifest,
    read_whole_manifest,
    token_folders,
)
from shardtrain.data.tokenize import TokenizeOptions, plan_digest, tokenize
from shardtrain.data.tokenizer import BYTES, open_tokenizer
from shardtrain.data.tokens import TokenShards
from shardtrain.data.windows import Windows, split_windows
from shardtrain.errors.messages import refuse
from shardtrain.system.excerpts import some

Packing = Literal["joined", "separate", "bucketed"]
"""How documents are arranged in samples."""


@dataclass(frozen=True, kw_only=True)
class Corpus(SplitData[Windows | DocumentPieces]):
    """Train on documents in files of many formats, as text or as tokens.

    The format of a file is recognised by its name or content: text, JSON lines (also .gz, .zst), Parquet,
      Arrow
    and folders of Hugging Face datasets, ArrayRecord, TFRecord, tar shards; tokens in .npy and Megatron-LM
    files, and folders that `shardtrain data tokenize` wrote.

    Args:
      paths: files, folders, and patterns such as web/**/*.parquet, read in the order of their names.
      tokenizer: the tokenizer for text: bytes, a tokenizer.json of Hugging Face, or a folder that has one.
        Folders of tokens have their own tokenizer.
      seq: tokens per window.
      heldout_fraction: fraction of the corpus, at its end, that is held out of training.
      text: name of the field that has the text, in formats with fields.
      separator: the token after each document, as text. None means the tokenizer's end of a document.
      format: the format of all files. None means that the format of each file is recognised.
      vocab_size: size of the vocabulary, for token files without a manifest. None means the tokenizer's.
      on_error: what happens to a row or file that cannot be read: stop ends the run with an error, skip
        leaves it out and counts it.
      packing: how documents are packed. joined: windows run across documents, and so do attention and loss.
        separate: in each window every document is a sequence of its own, with restarted positions. bucketed:
        each document is a row; rows of similar length share a batch, padded to one of few lengths, and the
        batch size is counted in tokens.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    paths: tuple[Path, ...] = ()
    tokenizer: str = BYTES
    seq: int = 256
    heldout_fraction: float = 0.05
    text: str = "text"
    separator: str | None = None
    format: str | None = None
    vocab_size: int | None = None
    on_error: OnError = "stop"
    packing: Packing = "joined"

    def __post_init__(self) -> None:
        problems = find_split_problems(self)
        if self.vocab_size is not None and not 1 <= self.vocab_size <= 2**31:
            problems.append(f"vocab_size is {self.vocab_size}; use 1 to 2**31")
        refuse("this corpus cannot be used", problems)

    @property
    def vocab(self) -> int:
        """The size of the vocabulary.

        Raises:
          ValueError, FileNotFoundError: the tokenizer cannot be opened, or folders of tokens differ in
            theirs.
        """
        try:
            files = find_named_files(self.paths, self.format)
        except ValueError:
            # a run file may ask for the vocabulary before the command line gives the paths; `split` raises it
            files = []
        manifests = token_folders(files)
        if self.vocab_size is not None:
            return self.vocab_size
        if manifests:
            return manifests[0].vocab
        return open_tokenizer(self.tokenizer, self.separator).vocab

    def split(self, folder: Path) -> tuple[Windows | DocumentPieces, Windows | DocumentPieces | None]:
        """Return the windows to train on and the held-out windows; text is tokenized into `folder`.

        Raises:
          BadData: a row or file cannot be read, and `on_error` is "stop".
          ValueError: nothing is found, formats do not fit together, or there are too few tokens.
        """
        _, shards, manifests = self._open(folder)
        if self.packing != "joined" and (path := shards.without_ends):
            raise ValueError(
                f"packing is {self.packing!r}, and {path} does not say where documents end (a .ends file next"
                " to it does); make the tokens by shardtrain data tokenize, or use --data.packing joined"
            )
        name = self.paths[0] if len(self.paths) == 1 else Path(some(self.paths, 2))
        num_skipped = sum(manifest.num_skipped for manifest in manifests)
        windows = Windows(
            path=name,
            seq=self.seq,
            vocab=self.vocab,
            start=0,
            stop=shards.num_tokens,
            shards=shards,
            num_skipped=num_skipped if num_skipped or self.on_error == "skip" else None,
            separate=self.packing == "separate",
        )
        if self.packing == "bucketed":
            return DocumentPieces.of(windows).split(self.heldout_fraction)
        return split_windows(windows, self.heldout_fraction)

    def summary(self, folder: Path) -> str:
        """Return a line that says what is read and what was skipped."""
        files, shards, manifests = self._open(folder)
        if refuse_mixed(files):
            return f"corpus: {summary(files)}; {shards.num_tokens:,} tokens"
        [manifest] = manifests
        text = (
            f"corpus: {summary(files)}; {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens"
        )
        if manifest.num_skipped:
            text += f"; skipped {manifest.num_skipped:,} that cannot be read: {some(manifest.skipped, 3)}"
        return text

    def replace_tokenizer(self, tokenizer: str) -> "Corpus":
        """Return the same corpus with another tokenizer, which token files ignore."""
        has_tokens = self.paths and refuse_mixed(corpus_files(self.paths, self.format))
        return self if has_tokens else replace(self, tokenizer=tokenizer)

    def _open(self, folder: Path) -> tuple[list[SourceFile], TokenShards, list[Manifest]]:
        """Return files, tokens and manifests; text is tokenized at the first call."""
        if not self.paths:
            raise ValueError("this corpus has no paths; give files, folders or patterns: --data PATTERN")
        files = corpus_files(self.paths, self.format)
        if refuse_mixed(files):
            if self.tokenizer != BYTES:
                raise ValueError(
                    f"tokenizer is {self.tokenizer}, and {files[0].path} has tokens already; leave it out"
                )
            return files, token_shards(files), token_folders(files)
        options = TokenizeOptions(
            tokenizer=self.tokenizer, text=self.text, separator=self.separator, on_error=self.on_error
        )
        out = folder / f"tokens-{plan_digest(files, options)}"
        manifest = read_whole_manifest(out) or tokenize(files, out, options)
        return files, token_shards([SourceFile(path, "npy") for path in manifest.files()]), [manifest]


def corpus_files(paths: Sequence[Path | str], format_name: str | None = None) -> list[SourceFile]:
    """Find the files of paths and patterns, each once; a folder of tokens has the files of its manifest.

    Raises:
      ValueError: see `find_files` and `check_shards`; or tokens were not finished.
    """
    found = find_named_files(paths, format_name)
    check_shards(found)
    return found


def find_named_files(paths: Sequence[Path | str], format_name: str | None = None) -> list[SourceFile]:
    """Find files as `corpus_files` does, without a check that shards of tokens are complete."""
    found: list[SourceFile] = []
    for path in map(Path, paths):
        if (path / MANIFEST).is_file():
            found += [SourceFile(file, "npy") for file in read_manifest(path).files()]
        elif (path / PLAN).is_file():
            raise make_unfinished_error(path)
        else:
            found += find_files([path], format_name)
    return drop_duplicates(found)


def token_shards(files: Sequence[SourceFile]) -> TokenShards:
    """Open token files as one sequence."""
    finders = [(FORMATS[file.format].tokens, file.path) for file in files]
    return TokenShards([find(path) for find, path in finders if find is not None])
