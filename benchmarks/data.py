"""What data costs a step: fed from Parquet, tokens and JPEG files, beside one fed from memory.

Sides take turns in one process (`paired.py`); `tokenizing.py` has what is done before a run. Figures:
docs/benchmarks/data.md.

uv run --all-extras python benchmarks/data.py --json figures.json
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro
from paired import Spread, ratios, rounds
from PIL import Image
from tokenizing import text_files

from shardtrain.data import Batches, Corpus, ImageFiles, place
from shardtrain.data.corpus import corpus_files
from shardtrain.data.samples import Batch
from shardtrain.data.tokenize import TokenizeOptions, tokenize
from shardtrain.functional.loss import classification_loss, next_token_loss
from shardtrain.functional.nnx_model import as_model
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.vit import VitConfig
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.placement import make_placement
from shardtrain.train_step.step import make_step

MEMORY, MEMORY_AGAIN = "from memory", "from memory again"
READY = 16
"""Batches that stand ready in memory, in turn."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      parts: tokens, images; by default all.
      size: small, or tiny (for tests).
      steps: steps of a block.
      rounds: blocks of each side.
      quiet: rounds in which other programs took more than this share of the processors are run again; 1 takes
        all.
      prefetch: batches that are loaded ahead.
      json: where to write all figures too.
    """

    parts: tuple[Literal["tokens", "images"], ...] = ("tokens", "images")
    size: Literal["tiny", "small"] = "small"
    steps: int = 20
    rounds: int = 15
    quiet: float = 1.0
    prefetch: int = 2
    json: Path | None = None


class Fed:
    """A compiled step that takes batches from wherever they come."""

    def __init__(self, config: Callable[..., Any], loss: Any, batch: Batch) -> None:
        model, layout = as_model(config), Layout()
        optimizer = optax.adamw(3e-4)
        self.mesh, self.axes = make_mesh(layout, jax.devices()[:1]), layout.batch_axes
        placement = make_placement(model, optimizer, layout, self.mesh)
        self.state = init_state(model, optimizer, placement, seed=0)
        self.step = make_step(model, loss, optimizer, placement)
        self.run(iter([batch]), 1, [])

    def run(self, batches: Iterator[Batch], steps: int, ticks: list[float]) -> list[float]:
        """Run some steps, each waited for after the next one was given; return their losses."""
        losses, waiting = [], None
        for _ in range(steps):
            ticks.append(perf_counter())
            placed = place(next(batches), self.mesh, self.axes)
            self.state, metrics = self.step(self.state, placed)
            if waiting is not None:
                losses.append(float(waiting))
            waiting = metrics["loss_sum"]
        return [*losses, float(waiting)] if waiting is not None else losses


def fed_ratios(fed: Fed, sources: dict[str, Any], batch: int, options: Options) -> dict[str, Any]:
    """Feed a step from each source and from memory, in turn.

    Args:
      fed: the step.
      sources: name -> samples.
      batch: rows of a batch.
      options: blocks.

    Returns:
      The ratios over memory, milliseconds of steps, and samples per second of a source alone.
    """
    made = {
        name: Batches(source=each, batch=batch, prefetch=options.prefetch) for name, each in sources.items()
    }
    first = next(iter(made.values()))
    ready = [each for each, _ in islice(first.iterate(), READY)]
    with ExitStack() as stack:
        streams: dict[str, Iterator[Batch]] = {MEMORY: cycle(ready), MEMORY_AGAIN: cycle(ready)}
        for name, each in made.items():
            streams[name] = (found for found, _ in stack.enter_context(closing(each.iterate())))
        sides = {name: partial(_side, fed, stream, options.steps) for name, stream in streams.items()}
        rounds(sides, 1, 1, 0)
        blocks = rounds(sides, options.rounds, 1, 0, options.quiet)
    over = {name: found for name, found in blocks.items() if name != MEMORY}
    return {
        "ratios": {name: ratios("wall_seconds", found, blocks[MEMORY]) for name, found in over.items()},
        "processor": {name: ratios("cpu_seconds", found, blocks[MEMORY]) for name, found in over.items()},
        "step_ms": {name: 1e3 * median(b.wall_seconds for b in found) for name, found in blocks.items()},
        "alone_ms": {name: 1e3 * loading_seconds(each, options.steps) for name, each in made.items()},
    }


def _side(fed: Fed, stream: Iterator[Batch], steps: int, ticks: list[float]) -> None:
    fed.run(stream, steps, ticks)


def loading_seconds(batches: Batches, num_batches: int) -> float:
    """Return the seconds to load a batch by one thread with nothing else under way."""
    position = {"epoch": 0, "index": 0}
    start = perf_counter()
    for _ in range(num_batches):
        batches.load(position)  # type: ignore[arg-type]
        position = batches.advance(position)  # type: ignore[arg-type]
    return (perf_counter() - start) / num_batches


def tokens_part(folder: Path, options: Options) -> dict[str, Any]:
    """Steps of a decoder fed from Parquet and from shards of tokens."""
    tiny = options.size == "tiny"
    parquet = text_files(folder / "parquet", 0.3 if tiny else 8, 2)
    tokenize(corpus_files([parquet]), folder / "ready", TokenizeOptions())
    seq, batch = (16, 4) if tiny else (128, 8)
    embed, layers, heads = (16, 1, 2) if tiny else (128, 4, 8)
    config = DecoderConfig(vocab=257, seq=seq, embed=embed, num_layers=layers, num_heads=heads)
    paths = {"Parquet": parquet, "ready tokens": folder / "ready"}
    sources = {name: Corpus(paths=(path,), seq=seq).train(folder / "run") for name, path in paths.items()}
    packed = Corpus(paths=(folder / "ready",), seq=seq, packing="separate").train(folder / "run")
    batches = Batches(source=sources["Parquet"], batch=batch)
    fed = Fed(config, next_token_loss, batches.load({"epoch": 0, "index": 0}))
    found = fed_ratios(fed, sources, batch, options)
    found["alone_ms"]["documents apart"] = 1e3 * loading_seconds(
        Batches(source=packed, batch=batch), options.steps
    )
    return found | {"what": f"decoder of {layers} blocks, embed {embed}, {batch} x {seq} tokens"}


def images_part(folder: Path, options: Options) -> dict[str, Any]:
    """Steps of vision transformers fed from a folder of JPEG files."""
    tiny = options.size == "tiny"
    side, num_images = (40, 48) if tiny else (256, 400)
    image_folder(folder / "jpeg", side, num_images)
    size, batch = (16, 4) if tiny else (64, 16)
    data = ImageFiles(paths=(folder / "jpeg",), classes=4, size=size)
    source = data.train(folder / "run")
    found = {}
    for layers, embed in ((1, 16),) if tiny else ((2, 64), (6, 192)):
        config = VitConfig(
            height=size, width=size, classes=4, patch=8, embed=embed, num_layers=layers, num_heads=2
        )
        first = Batches(source=source, batch=batch).load({"epoch": 0, "index": 0})
        fed = Fed(config, classification_loss, first)
        name = f"{layers} blocks, embed {embed}, {batch} images of {side} to {size}"
        found[name] = fed_ratios(fed, {"JPEG folder": source}, batch, options)
    return found


def image_folder(folder: Path, side: int, num_images: int) -> None:
    """Draw JPEG files of noise over slopes, four classes."""
    random, slope = np.random.default_rng(0), np.linspace(0, 160, side)
    for number in range(num_images):
        path = folder / f"class{number % 4}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = slope[:, None, None] + slope[None, :, None] / 2 + random.integers(0, 40, (side, side, 3))
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=90)


def report(name: str, found: dict[str, Any]) -> str:
    """Return the figures of a part as text."""
    if "ratios" in found:
        lines = [f"{name}: {found.get('what', '')}"]
        for side, each in found["ratios"].items():
            low, high = each.sure
            lines.append(
                f"  {side:20} {each.median:.3f} of memory ({low:.3f} - {high:.3f});"
                f" processor {found['processor'][side].median:.3f}; {found['step_ms'][side]:.1f} ms a step"
            )
        lines += [f"  {side:20} {ms:.2f} ms to load a batch alone" for side, ms in found["alone_ms"].items()]
        return "\n".join(lines)
    return "\n".join(report(f"images, {which}", each) for which, each in found.items())


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    return asdict(value) if isinstance(value, Spread) else float(value)


def main(options: Options) -> None:
    """Measure the parts that are asked for, each in a folder of its own."""
    parts = {"tokens": tokens_part, "images": images_part}
    print(f"{os.cpu_count()} cores; jax {jax.__version__}; {options.rounds} rounds of {options.steps} steps")
    found = {}
    for name in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = parts[name](Path(folder), options)
        print(report(name, found[name]), flush=True)
    if options.json is not None:
        plain = json.dumps(
            found, default=lambda x: asdict(x) if isinstance(x, Spread) else float(x), indent=1
        )
        options.json.write_text(plain + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
