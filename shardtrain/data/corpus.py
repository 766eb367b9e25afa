"""A corpus as the data of a run: text or tokens in files of any format of `sources/`, cut into windows.

Text is tokenized into the folder of the run at the first start; a large corpus is tokenized before, by
`shardtrain data tokenize`. Next: `windows.py`, `tokenize.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from shardtrain.data.documents import OnError, on_error_problems, refuse_mixed
from shardtrain.data.packed import PackedWindows
from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import MOST_PROBLEMS, SourceFile, find_files, once, summary
from shardtrain.data.sources.numpy_tokens import find_tokens
from shardtrain.data.token_shards import TokenShards
from shardtrain.data.tokenize import (
    MANIFEST,
    PLAN,
    Manifest,
    TokenizeOptions,
    plan_digest,
    read_manifest,
    tokenize,
)
from shardtrain.data.tokenizer import BYTES, open_tokenizer
from shardtrain.data.windows import Windows, split_problems, split_windows
from shardtrain.errors.messages import problems_error
from shardtrain.system.excerpts import some

Packing = Literal["joined", "separate"]
"""Whether documents of a window see each other."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The data of a run: documents in files of many formats, as text or as tokens, one after the other.

    Formats are recognised by name or content: text, JSON lines (also .gz, .zst), Parquet, Arrow and folders
    of Hugging Face datasets, ArrayRecord, TFRecord, tar shards; tokens in .npy and Megatron-LM files, and
    folders that `shardtrain data tokenize` wrote.

    Args:
      paths: files, folders, and patterns such as web/**/*.parquet; read in the order of their names.
      tokenizer: for text: bytes, or the path of a tokenizer.json of Hugging Face, or of a folder with one.
        Folders of tokens have their own.
      seq: tokens per window.
      heldout_fraction: fraction at the end of the corpus that is held out of training.
      text: the field with the text, of formats with fields.
      separator: the token after each document, as text; None: the tokenizer's end of a document.
      format: the format of all files; None recognises each.
      vocab_size: size of the vocabulary, for files of tokens without a manifest; None: that of the tokenizer.
      on_error: what to do with a row or file that cannot be read: stop, or skip it and count it.
      packing: whether attention and loss cross from one document of a window into the next (joined), or the
        model gets each as a sequence of its own, with restarted positions (separate).

    Raises:
      ValueError: lists every value that is out of range.
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
        problems = [*split_problems(self.seq, self.heldout_fraction), *on_error_problems(self.on_error)]
        if isinstance(self.paths, str | Path):
            problems.append(f"paths is one path; write paths=({str(self.paths)!r},)")
        if self.packing not in get_args(Packing):
            problems.append(f"packing is {self.packing!r}; allowed: {', '.join(get_args(Packing))}")
        if self.vocab_size is not None and not 1 <= self.vocab_size <= 2**31:
            problems.append(f"vocab_size is {self.vocab_size}; use 1 to 2**31")
        if problems:
            raise problems_error("this corpus cannot be used", problems)

    @property
    def vocab(self) -> int:
        """The size of the vocabulary.

        Raises:
          ValueError, FileNotFoundError: the tokenizer cannot be opened.
        """
        manifests = self._manifests()
        if self.vocab_size is not None:
            return self.vocab_size
        if manifests:
            return manifests[0].vocab
        return open_tokenizer(self.tokenizer, self.separator).vocab

    def train(self, folder: Path) -> Windows | PackedWindows:
        """Return the windows to train on.

        Args:
          folder: the folder of the run, where text is tokenized.

        Raises:
          BadData: a row or file cannot be read, and `on_error` is "stop".
          ValueError: nothing is found, formats do not fit together, or there are too few tokens.
        """
        return self._split(folder)[0]

    def heldout(self, folder: Path) -> Windows | PackedWindows | None:
        """Return the held-out windows; None if nothing is held out."""
        return self._split(folder)[1]

    def summary(self, folder: Path) -> str:
        """Return a line with what is read and what was skipped."""
        files = self._files()
        if refuse_mixed(files):
            num_tokens = self._shards(files, folder).num_tokens
            return f"corpus: {summary(files)}; {num_tokens:,} tokens"
        manifest = self._tokenized(files, folder)
        text = (
            f"corpus: {summary(files)}; {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens"
        )
        if manifest.num_skipped:
            text += f"; skipped {manifest.num_skipped:,} that cannot be read: {some(manifest.skipped, 3)}"
        return text

    def _split(self, folder: Path) -> tuple[Windows | PackedWindows, Windows | PackedWindows | None]:
        files = self._files()
        shards = self._shards(files, folder)
        name = self.paths[0] if len(self.paths) == 1 else Path(some(self.paths, 2))
        windows = Windows(
            path=name, seq=self.seq, vocab=self.vocab, start=0, stop=shards.num_tokens, shards=shards
        )
        if (num_skipped := self._num_skipped(files, folder)) or self.on_error == "skip":
            windows = replace(windows, num_skipped=num_skipped)
        train, heldout = split_windows(windows, self.heldout_fraction)
        if self.packing == "joined":
            return train, heldout
        packed = PackedWindows(windows=train, shards=shards)
        return packed, None if heldout is None else replace(packed, windows=heldout)

    def _files(self) -> list[SourceFile]:
        if not self.paths:
            raise ValueError("this corpus has no paths; give files, folders or patterns: --data PATTERN")
        return corpus_files(self.paths, self.format)

    def _shards(self, files: list[SourceFile], folder: Path) -> TokenShards:
        if not refuse_mixed(files):
            files = [SourceFile(path, "npy") for path in self._tokenized(files, folder).files()]
        elif self.tokenizer != BYTES:
            raise ValueError(
                f"tokenizer is {self.tokenizer}, and {files[0].path} has tokens already; leave it out"
            )
        return token_shards(files)

    def _tokenized(self, files: list[SourceFile], folder: Path) -> Manifest:
        """Return the tokens of text, in the folder of the run, made at the first call."""
        options = TokenizeOptions(
            tokenizer=self.tokenizer, text=self.text, separator=self.separator, on_error=self.on_error
        )
        out = folder / f"tokens-{plan_digest(files, options)}"
        if (out / MANIFEST).is_file():
            return read_manifest(out)
        return tokenize(files, out, options)

    def _num_skipped(self, files: list[SourceFile], folder: Path) -> int:
        """Return how many rows and files could not be read when the tokens were made."""
        made = self._manifests() if refuse_mixed(files) else [self._tokenized(files, folder)]
        return sum(manifest.num_skipped for manifest in made)

    def _manifests(self) -> list[Manifest]:
        """Return the manifests of the folders of tokens among the paths.

        Raises:
          ValueError: they were made by different tokenizers.
        """
        found = [read_manifest(Path(path)) for path in self.paths if (Path(path) / MANIFEST).is_file()]
        kinds = {(manifest.vocab, manifest.separator): str(manifest.folder) for manifest in found}
        if len(kinds) > 1:
            raise ValueError(
                f"{' and '.join(kinds.values())} have tokens of different tokenizers (vocabulary, separator:"
                f" {some(list(kinds))}); tokenize all by the same one"
            )
        return found


def corpus_files(paths: Sequence[Path | str], format_name: str | None = None) -> list[SourceFile]:
    """Find the files of paths and patterns; those of a folder of tokens are what its manifest says.

    A file that several paths and patterns name is read once.

    Raises:
      ValueError: see `find_files` and `whole_shards`; or tokens were not finished.
    """
    found: list[SourceFile] = []
    for path in map(Path, paths):
        if (path / MANIFEST).is_file():
            found += [SourceFile(file, "npy") for file in whole_shards(read_manifest(path))]
        elif (path / PLAN).is_file():
            raise ValueError(f"{path} is not finished; give the same shardtrain data tokenize command again")
        else:
            found += find_files([path], format_name)
    return once(found)


def token_shards(files: Sequence[SourceFile]) -> TokenShards:
    """Open files of tokens as one sequence."""
    finders = [(FORMATS[file.format].tokens, file.path) for file in files]
    return TokenShards([find(path) for find, path in finders if find is not None])


def whole_shards(manifest: Manifest) -> list[Path]:
    """Return the shards of a folder of tokens.

    Raises:
      ValueError: lists those that are gone or have another number of tokens than the manifest says.
    """
    problems = []
    for path, shard in zip(manifest.files(), manifest.shards, strict=True):
        try:
            num_tokens = find_tokens(path).num_tokens
            if num_tokens != shard["num_tokens"]:
                problems.append(
                    f"{path} has {num_tokens:,} tokens; the manifest says {shard['num_tokens']:,}"
                )
        except (OSError, ValueError) as error:
            problems.append(str(error))
    if problems:
        more = [f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
        raise problems_error(
            f"{manifest.folder} is damaged; bring its files back, or tokenize again",
            [*problems[:MOST_PROBLEMS], *more],
        )
    return manifest.files()
