"""What data costs a step, fed from files beside one fed from memory; tokenizing beside the library alone.

Sides take turns in one process (`paired.py`). Figures: docs/benchmarks/data.md.

uv run --all-extras python benchmarks/data.py
"""

import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import tyro
from paired import markdown, ratios, take_turns, time_rounds
from PIL import Image
from stepper import Stepper

from shardtrain.data import Batches, Corpus, ImageFiles
from shardtrain.data.corpus import corpus_files
from shardtrain.data.huggingface_tokenizer import library, train_tokenizer
from shardtrain.data.samples import Batch
from shardtrain.data.tokenize import TokenizeOptions, tokenize
from shardtrain.functional.loss import classification_loss, next_token_loss
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.vit import VitConfig

MEMORY, MEMORY_AGAIN = "from memory", "from memory again"
READY = 16
"""Batches that stand ready in memory, in turn."""

Rows = list[tuple[object, ...]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      size: small, or tiny (for tests).
      steps: steps of a block.
      rounds: blocks of each side.
      megabytes: of text that is tokenized.
    """

    size: Literal["tiny", "small"] = "small"
    steps: int = 20
    rounds: int = 15
    megabytes: float = 24.0


def feed(stepper: Stepper, ticks: list[float], batches: Iterator[Batch], steps: int) -> None:
    """Run some steps, each waited for after the next one was given."""
    waiting = None
    for _ in range(steps):
        ticks.append(perf_counter())
        metrics = stepper(stepper.place(next(batches)))
        jax.block_until_ready(waiting)
        waiting = metrics["loss_sum"]
    jax.block_until_ready(waiting)


def compare_sources(stepper: Stepper, sources: dict[str, Any], batch: int, options: Options) -> Rows:
    """Feed a step from each source and from memory, in turn; return a row for each."""
    made = {name: Batches(source=each, batch=batch) for name, each in sources.items()}
    ready = [each for each, _ in islice(next(iter(made.values())).iterate(), READY)]
    with ExitStack() as stack:
        streams: dict[str, Iterator[Batch]] = {MEMORY: cycle(ready), MEMORY_AGAIN: cycle(ready)}
        for name, each in made.items():
            streams[name] = (found for found, _ in stack.enter_context(closing(each.iterate())))
        sides = {k: partial(feed, stepper, batches=v, steps=options.steps) for k, v in streams.items()}
        blocks = time_rounds(sides, options.rounds, 1, 0)
    return [
        (
            name,
            f"{1e3 * median(block.wall_seconds for block in found):.1f}",
            ratios("wall_seconds", found, blocks[MEMORY]),
            ratios("cpu_seconds", found, blocks[MEMORY]),
            f"{1e3 * time_loading(made[name], options.steps):.2f}" if name in made else "",
        )
        for name, found in blocks.items()
    ]


def time_loading(batches: Batches, num_batches: int) -> float:
    """Return the seconds to load a batch by one thread with nothing else under way."""
    start = perf_counter()
    with closing(replace(batches, prefetch=0).iterate()) as loaded:
        for _ in islice(loaded, num_batches):
            pass
    return (perf_counter() - start) / num_batches


FED = ("step", "fed from", "ms a step", "time over memory (95 %)", "processor time", "ms to load a batch")


def measure_tokens(folder: Path, options: Options) -> str:
    """Feed a decoder from Parquet and from shards of tokens."""
    tiny = options.size == "tiny"
    parquet = write_texts(folder / "parquet", 0.3 if tiny else 8, 2)
    tokenize(corpus_files([parquet]), folder / "ready", TokenizeOptions())
    seq, batch, embed, layers = (16, 4, 16, 1) if tiny else (128, 8, 128, 4)
    config = DecoderConfig(vocab=257, seq=seq, embed=embed, num_layers=layers, num_heads=2)
    paths = {"Parquet": parquet, "ready tokens": folder / "ready"}
    sources = {name: Corpus(paths=(path,), seq=seq).train(folder / "run") for name, path in paths.items()}
    rows = compare_sources(Stepper(config, next_token_loss), sources, batch, options)
    return markdown(FED, [(f"decoder, {batch} x {seq} tokens", *row) for row in rows])


def measure_images(folder: Path, options: Options) -> str:
    """Feed vision transformers from a folder of JPEG files."""
    tiny = options.size == "tiny"
    side, num_images, size, batch = (40, 48, 16, 4) if tiny else (256, 400, 64, 16)
    write_images(folder / "jpeg", side, num_images)
    source = ImageFiles(paths=(folder / "jpeg",), classes=4, size=size).train(folder / "run")
    rows: Rows = []
    for layers, embed in ((1, 16),) if tiny else ((2, 64), (6, 192)):
        config = VitConfig(
            height=size, width=size, classes=4, patch=8, embed=embed, num_layers=layers, num_heads=2
        )
        name = f"ViT of {layers} blocks, {batch} images of {side} to {size}"
        found = compare_sources(Stepper(config, classification_loss), {"JPEG": source}, batch, options)
        rows += [(name, *row) for row in found]
    return markdown(FED, rows)


def write_images(folder: Path, side: int, num_images: int) -> None:
    """Draw JPEG files of noise over slopes, four classes."""
    random, slope = np.random.default_rng(0), np.linspace(0, 160, side)
    for number in range(num_images):
        path = folder / f"class{number % 4}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = slope[:, None, None] + slope[None, :, None] / 2 + random.integers(0, 40, (side, side, 3))
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=90)


def read_texts(megabytes: float) -> Iterator[str]:
    """Yield Python files of the installation, again and again, until there are so many bytes."""
    left = megabytes * 1e6
    for path in cycle(sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))):
        text = path.read_text(errors="ignore")
        if 200 < len(text) < 200_000:
            yield text
            left -= len(text.encode())
        if left <= 0:
            return


def write_texts(folder: Path, megabytes: float, num_files: int) -> Path:
    """Write texts as Parquet files, a document for each."""
    folder.mkdir(parents=True)
    texts = [*read_texts(megabytes)]
    for number in range(num_files):
        table = pyarrow.table({"text": texts[number::num_files]})
        pyarrow.parquet.write_table(table, folder / f"{number:03}.parquet", row_group_size=64)
    return folder


def measure_tokenizing(folder: Path, options: Options) -> str:
    """Tokenize Parquet by one and more processes, beside the library alone on texts in memory."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in worker processes
    files, tokenizer = write_texts(folder / "text", options.megabytes, 4), folder / "tokenizer.json"
    train_tokenizer(read_texts(min(2, options.megabytes)), 8192, tokenizer)
    texts = [*read_texts(options.megabytes)]
    shard_bytes = max(1, sum(path.stat().st_size for path in files.iterdir()) // 16)
    settings = TokenizeOptions(tokenizer=str(tokenizer), shard_bytes=shard_bytes)

    def tokenize_files(workers: int) -> int:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            return tokenize(corpus_files([files]), Path(out, "out"), settings, workers=workers).num_tokens

    sides = {
        f"{name}, {workers}": partial(time_tokens, partial(side, workers))
        for workers in (1, 2)
        for name, side in (("shardtrain", tokenize_files), ("library", partial(encode, texts, tokenizer)))
    }
    found = take_turns(sides, max(2, options.rounds // 5), 0)
    rates = [(name, f"{median(each):,.0f}") for name, each in found.items()]
    return markdown(("by, processes", "tokens a second"), rates)


def time_tokens(side: Callable[[], int]) -> float:
    """Return tokens a second."""
    start = perf_counter()
    return side() / (perf_counter() - start)


def encode(texts: list[str], tokenizer: Path, workers: int) -> int:
    """Encode texts by the library alone, in as many processes; nothing is read or written."""
    if workers > 1:
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            parts = [texts[i::workers] for i in range(workers)]
            return sum(pool.map(encode, parts, [tokenizer] * workers, [1] * workers))
    encode_batch = library().Tokenizer.from_file(str(tokenizer)).encode_batch_fast
    # so many at a time as shardtrain gives, and the separator of each
    batches = (texts[i : i + 64] for i in range(0, len(texts), 64))
    return sum(
        len(each.ids) + 1 for batch in batches for each in encode_batch(batch, add_special_tokens=False)
    )


def main(options: Options) -> None:
    """Measure all parts, each in a folder of its own."""
    print(f"{os.cpu_count()} cores; jax {jax.__version__}; {options.rounds} rounds of {options.steps} steps")
    for measure in (measure_tokens, measure_images, measure_tokenizing):
        with tempfile.TemporaryDirectory() as folder:
            print(measure(Path(folder), options), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
