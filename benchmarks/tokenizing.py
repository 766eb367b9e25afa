"""Tokenizing beside the tokenizers library alone, how full windows are packed, opening an index.

No jax: worker processes import what they import for a user. Figures: docs/benchmarks/data.md.

uv run --all-extras python benchmarks/tokenizing.py --json figures.json
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet
import tyro

from shardtrain.data.best_fit import best_fit
from shardtrain.data.corpus import Corpus, corpus_files
from shardtrain.data.huggingface_tokenizer import library, train_tokenizer
from shardtrain.data.tokenize import TokenizeOptions, tokenize


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      parts: which of tokenize, packing, index; by default all.
      megabytes: of text that is tokenized.
      workers: numbers of processes that tokenize.
      rounds: how often each number of processes tokenizes the text.
      documents: that are packed.
      shards: of the index.
      windows: of the index, all together.
      json: where to write all figures too.
    """

    parts: tuple[Literal["tokenize", "packing", "index"], ...] = ("tokenize", "packing", "index")
    megabytes: float = 24.0
    workers: tuple[int, ...] = (1, 2)
    rounds: int = 3
    documents: int = 100_000
    shards: int = 1000
    windows: int = 10_000_000
    json: Path | None = None


def text_files(folder: Path, megabytes: float, num_files: int) -> Path:
    """Write the source code of the installed packages as Parquet files, a document for each file."""
    folder.mkdir(parents=True)
    texts = [*first_bytes(source_files(), int(megabytes * 1e6))]
    for number in range(num_files):
        table = pyarrow.table({"text": texts[number::num_files]})
        pyarrow.parquet.write_table(table, folder / f"{number:03}.parquet", row_group_size=64)
    return folder


def source_files() -> Iterator[str]:
    """Yield Python files of the installation, again and again."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    for path in cycle(paths):
        text = path.read_text(errors="ignore")
        if 200 < len(text) < 200_000:
            yield text


def first_bytes(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    """Yield texts until there are so many bytes."""
    for text in texts:
        yield text
        num_bytes -= len(text.encode())
        if num_bytes <= 0:
            return


def tokenize_part(folder: Path, options: Options) -> dict[str, Any]:
    """Tokenizing by one and more processes, beside the library alone on texts in memory."""
    files = text_files(folder / "text", options.megabytes, 4)
    tokenizer = folder / "tokenizer.json"
    train_tokenizer(first_bytes(source_files(), 2_000_000), 8192, tokenizer)
    texts = [text for path in sorted(files.iterdir()) for text in _column(path)]
    settings = TokenizeOptions(tokenizer=str(tokenizer), shard_bytes=_shard_bytes(files))
    found: dict[str, list[float]] = {}
    num_tokens = 0
    for number in range(options.rounds):
        sides: dict[str, Callable[[], int]] = {}
        for workers in options.workers:
            out = folder / f"out-{workers}-{number}"
            sides[f"shardtrain, {workers}"] = partial(_tokenized, files, out, settings, workers)
            sides[f"library, {workers}"] = partial(_library, texts, str(tokenizer), workers)
        for name, side in sides.items():
            start = perf_counter()
            num_tokens = side()
            found.setdefault(name, []).append(perf_counter() - start)
    first, last = options.workers[0], options.workers[-1]
    times = {name: median(each) for name, each in found.items()}

    def linear(who: str) -> float:
        return median(
            a / b * first / last
            for a, b in zip(found[f"{who}, {first}"], found[f"{who}, {last}"], strict=True)
        )

    return {
        "text": f"{sum(len(t.encode()) for t in texts) / 1e6:.0f} MB, {num_tokens:,} tokens",
        "tokens_per_second": {name: num_tokens / seconds for name, seconds in times.items()},
        "of_linear": {who: linear(who) for who in ("shardtrain", "library")},
        "over_library": {w: times[f"library, {w}"] / times[f"shardtrain, {w}"] for w in options.workers},
    }


def _shard_bytes(files: Path) -> int:
    return max(1, sum(path.stat().st_size for path in files.iterdir()) // 16)


def _column(path: Path) -> list[str]:
    return pyarrow.parquet.read_table(path)["text"].to_pylist()


def _tokenized(files: Path, out: Path, settings: TokenizeOptions, workers: int) -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in worker processes
    return tokenize(corpus_files([files]), out, settings, workers=workers).num_tokens


def _library(texts: list[str], tokenizer: str, workers: int) -> int:
    """Encode texts by the library alone, in as many processes; nothing is read or written."""
    if workers == 1:
        return _encoded(texts, tokenizer)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        parts = [texts[i::workers] for i in range(workers)]
        return sum(pool.map(_encoded, parts, [tokenizer] * workers))


def _encoded(texts: list[str], tokenizer: str) -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encode = library().Tokenizer.from_file(tokenizer).encode_batch_fast
    # so many at a time as shardtrain gives, and the separator of each
    batches = (texts[i : i + 64] for i in range(0, len(texts), 64))
    return sum(len(each.ids) + 1 for batch in batches for each in encode(batch, add_special_tokens=False))


def packing_part(folder: Path, options: Options) -> dict[str, Any]:
    """How full windows are, of documents of log-normal lengths."""
    random = np.random.default_rng(0)
    found = {}
    for capacity in (1024, 2048, 4096):
        lengths = np.clip(np.exp(random.normal(5.5, 1.0, options.documents)), 10, capacity).astype(int)
        start = perf_counter()
        _, ends = best_fit(lengths, capacity)
        seconds = perf_counter() - start
        found[str(capacity)] = {"filled": float(lengths.sum() / (len(ends) * capacity)), "seconds": seconds}
    return found


def index_part(folder: Path, options: Options) -> dict[str, Any]:
    """Open shards with holes for tokens, in a process of its own; its time and memory."""
    seq = 512
    each = -(-options.windows // options.shards) * seq
    header = {"descr": "<u2", "fortran_order": False, "shape": (each,)}
    (folder / "index").mkdir()
    for number in range(options.shards):
        with (folder / "index" / f"{number:05}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + each * 2)
    command = [sys.executable, __file__, "--open-index", str(folder / "index"), str(seq)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def open_index(folder: str, seq: int) -> None:
    """Print seconds and bytes of opening an index and of reading a batch at its end."""
    before = _resident_bytes()
    start = perf_counter()
    windows = Corpus(paths=(Path(folder),), seq=seq, vocab_size=2, heldout_fraction=0).train(Path(folder))
    opened = perf_counter() - start
    from shardtrain.data.batches import Batches  # Grain: the time of its import is not that of an index

    batches = Batches(source=windows, batch=64, seed=1)
    batches.load({"epoch": 1, "index": len(windows) - 64})
    first = perf_counter() - start - opened
    found = {"windows": len(windows), "open_seconds": opened, "first_batch_seconds": first}
    found |= {"resident_megabytes": _resident_bytes() / 1e6}
    print(json.dumps(found | {"index_megabytes": (_resident_bytes() - before) / 1e6}))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


PARTS = {"tokenize": tokenize_part, "packing": packing_part, "index": index_part}


def main(options: Options) -> None:
    """Measure the parts that are asked for, each in a folder of its own."""
    found = {}
    print(f"{os.cpu_count()} cores")
    for name in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = PARTS[name](Path(folder), options)
        print(f"{name}:")
        for what, value in found[name].items():
            print(f"  {what:20} {value}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--open-index"]:
        open_index(sys.argv[2], int(sys.argv[3]))
    else:
        main(tyro.cli(Options, description=__doc__))
