"""Held-out loss of gradients that are sent between islands in 16 bits, beside float32, at equal samples.

mpiexec -n 2 uv run python benchmarks/reduce_dtype.py [--steps 600] [--seeds 0 1]

Each way trains a small decoder on the sources of Python's library, from the same parameters on the same
samples: gradients in float32, rounded to bfloat16 where they are computed, and by a codec, which adds what it
rounds off to the next step. What a step costs: bridge.py. Figures: docs/benchmarks/bridge.md.
"""

import io
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import mkdtemp
from typing import Any

import tyro

FLOAT32 = "float32"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train.

    Args:
      steps: of each run.
      seeds: of parameters and data.
      batch, seq, embed, num_layers: of the decoder that is trained.
      rate: highest learning rate, of a cosine.
      evaluate_batches: held-out batches.
    """

    steps: int = 600
    seeds: tuple[int, ...] = (0, 1)
    batch: int = 16
    seq: int = 64
    embed: int = 64
    num_layers: int = 4
    rate: float = 3e-3
    evaluate_batches: int = 32


def ways() -> dict[str, Any]:
    """Return name -> the strategy of a way to send gradients."""
    from shardtrain import Across, Strategy, Synchronisation

    return {
        FLOAT32: Strategy(),
        "reduce-dtype bfloat16": Strategy(across=Across(reduce_dtype="bfloat16")),
        "codec bfloat16+mean": Strategy(synchronisation=Synchronisation(by="bfloat16+mean")),
    }


def run_of(options: Options, strategy: Any, seed: int, folder: Path) -> Any:
    """Return the run of a way and seed."""
    from shardtrain import CheckpointPolicy, Optimizer, Run, Schedule, Text
    from shardtrain.models.decoder import DecoderConfig

    embed = options.embed
    return Run(
        model=DecoderConfig(
            vocab=256, seq=options.seq, embed=embed, num_layers=options.num_layers, num_heads=4, mlp=4 * embed
        ),
        data=Text(seq=options.seq),
        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=options.rate, warmup=30)),
        strategy=strategy,
        batch=options.batch,
        steps=options.steps,
        seed=seed,
        evaluate_every=None,
        evaluate_batches=options.evaluate_batches,
        checkpoints=CheckpointPolicy(every_steps=None),
        run_dir=folder,
    )


def table(losses: dict[str, list[float]]) -> str:
    """Format held-out losses, means over seeds, beside those of float32 seed by seed.

    >>> print(table({"float32": [2.0, 4.0], "other": [2.1, 4.0]}).splitlines()[-1])
    | other | 3.0500 | 1.0250 | 1.0500, 1.0000 |
    """
    lines = ["| gradients | held-out loss | ratio | seed by seed |", "|---|--:|--:|---|"]
    for name, found in losses.items():
        ratios = [loss / other for loss, other in zip(found, losses[FLOAT32], strict=True)]
        each = ", ".join(f"{ratio:.4f}" for ratio in ratios)
        lines.append(f"| {name} | {mean(found):.4f} | {mean(ratios):.4f} | {each} |")
    return "\n".join(lines)


def main(options: Options) -> None:
    """Train all ways on the launched islands, and print the table."""
    from rich.console import Console

    from shardtrain import train
    from shardtrain.islands.membership import join
    from shardtrain.report.sinks.json_lines import read_jsonl

    islands = join()
    if islands is None:
        raise SystemExit("start several islands: mpiexec -n 2 python benchmarks/reduce_dtype.py")
    folder = Path(islands.broadcast("folder", mkdtemp() if islands.is_first else None))
    losses: dict[str, list[float]] = {name: [] for name in ways()}
    for seed in options.seeds:
        for name, strategy in ways().items():
            run_dir = folder / f"{name}-{seed}".replace(" ", "_")
            train(run_of(options, strategy, seed, run_dir), Console(file=io.StringIO()), islands)
            islands.all_gather_islands(f"{name} is there", None)
            losses[name].append(read_jsonl(run_dir / "metrics.jsonl")[-1]["heldout/loss"])
    islands.all_gather_islands("all read", None)
    if islands.is_first:
        sys.stdout.write(f"{islands.seat.num_islands} islands, {options.steps} steps\n{table(losses)}\n")
        shutil.rmtree(folder)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main(tyro.cli(Options, description=__doc__))
