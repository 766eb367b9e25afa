"""Held-out loss of ways to synchronise, at equal samples, beside what each replica gives to the combiner.

uv run python benchmarks/synchronisation.py [--replicas 2] [--steps 600] [--every 20] [--seeds 0,1]

Replicas are the indices of the mesh axis `data` of simulated devices; islands compute the same numbers
(tests/train_step/test_island_step.py). Bytes are those of the float32 arrays that a replica gives to the
combiner, which an all-reduce sends about twice. Over a slow link: slow_link.py. Figures:
docs/benchmarks/synchronisation.md.
"""

import argparse
import dataclasses
import io
import os
import sys
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple


class Row(NamedTuple):
    """Runs of one way to synchronise.

    Args:
      name: the way to synchronise.
      replicas: their number.
      losses: held-out loss after the last step, seed by seed.
      mean_bytes: bytes a replica gives to the combiner, per step.
      peak_bytes: the same of the step with most.
    """

    name: str
    replicas: int
    losses: tuple[float, ...]
    mean_bytes: float
    peak_bytes: int


def ways(every: int) -> dict[str, Any]:
    """Return name -> how replicas are synchronised."""
    from shardtrain.combine.synchronisation import PRESETS, Outer

    replace = dataclasses.replace

    def diloco(rate: float, momentum: float, fragments: int = 1) -> Any:
        outer = Outer(learning_rate=rate, momentum=momentum, nesterov=True)
        return replace(PRESETS["diloco"], every=every, outer=outer, fragments=fragments)

    return {
        "every-step": PRESETS["every-step"],
        "local-sgd": replace(PRESETS["local-sgd"], every=every),
        "diloco": replace(PRESETS["diloco"], every=every),
        "streaming-diloco": replace(PRESETS["streaming-diloco"], every=every),
        "diloco, outer rate 0.9, momentum 0.5": diloco(0.9, 0.5),
        # a fragment for each of the four layers, and one for the other arrays
        "streaming-diloco, 5 fragments, outer rate 0.9, momentum 0.5": diloco(0.9, 0.5, 5),
    }


def measured(name: str, synchronisation: Any, replicas: int, options: argparse.Namespace) -> Row:
    """Train on the text, once for each seed, and return the row."""
    from shardtrain.functional.nnx_model import as_model
    from shardtrain.optim.optimizer import make_optimizer
    from shardtrain.train_step.placement import state_specs
    from shardtrain.train_step.replica_state import fragments_of

    seeds = [int(each) for each in options.seeds.split(",")]
    losses = tuple(heldout_loss(synchronisation, replicas, seed, options) for seed in seeds)
    run = run_of(synchronisation, replicas, 0, options)
    model = as_model(run.model, run.names)
    optimizer, _ = make_optimizer(run.optimizer, run.steps, model.dims)
    sizes = {"data": replicas, "fsdp": 1, "tensor": 1, "pipeline": 1}
    specs = state_specs(model, optimizer, run.strategy.layout, sizes, synchronisation)
    parts = [each.take(specs.abstract.params) for each in fragments_of(synchronisation, specs)]
    found = [4 * sum(x.size for x in part.values()) for part in parts]
    return Row(name, replicas, losses, sum(found) / synchronisation.every, max(found))


def run_of(synchronisation: Any, replicas: int, seed: int, options: argparse.Namespace) -> Any:
    """Return the run: a small decoder on the text."""
    from shardtrain import Layout, Optimizer, Run, Schedule, Strategy, Text
    from shardtrain.models.decoder import DecoderConfig

    return Run(
        model=DecoderConfig(vocab=256, seq=64, embed=64, num_layers=4, num_heads=4, mlp=256),
        data=Text(seq=64) if options.text is None else Text(paths=(options.text,), seq=64),
        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=3e-3, warmup=options.warmup)),
        strategy=Strategy(layout=Layout(mesh={"data": replicas}), synchronisation=synchronisation),
        batch=16,
        steps=options.steps,
        seed=seed,
        evaluate_every=None,
        evaluate_batches=options.evaluate_batches,
    )


def heldout_loss(synchronisation: Any, replicas: int, seed: int, options: argparse.Namespace) -> float:
    """Train, and return the held-out loss after the last step."""
    from rich.console import Console

    from shardtrain import train
    from shardtrain.report.sinks.json_lines import read_jsonl

    run = run_of(synchronisation, replicas, seed, options)
    with TemporaryDirectory() as folder:
        train(dataclasses.replace(run, run_dir=Path(folder)), Console(file=io.StringIO()))
        return read_jsonl(Path(folder) / "metrics.jsonl")[-1]["heldout/loss"]


def table(rows: list[Row]) -> str:
    """Format the rows as a table, losses and bytes beside those of every-step with as many replicas.

    Losses are means over the seeds; their ratio is that of each seed's run to every-step's of the same seed.
    """
    lines = [
        "| replicas | synchronisation | held-out loss | ratio to every-step | seed by seed | bytes a step |"
        " ratio | bytes at most | ratio |",
        "| --: | --- | --: | --: | --- | --: | --: | --: | --: |",
    ]
    for row in rows:
        base = next(each for each in rows if (each.name, each.replicas) == ("every-step", row.replicas))
        ratios = [loss / other for loss, other in zip(row.losses, base.losses, strict=True)]
        lines.append(
            f"| {row.replicas} | {row.name} | {mean(row.losses):.4f} | {mean(ratios):.4f} |"
            f" {', '.join(f'{ratio:.4f}' for ratio in ratios)} |"
            f" {row.mean_bytes:,.0f} | {row.mean_bytes / base.mean_bytes:.4f} | {row.peak_bytes:,} |"
            f" {row.peak_bytes / base.peak_bytes:.3f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas")
    parser.add_argument("--steps", type=int, default=600, help="steps of each run, a multiple of --every")
    parser.add_argument("--every", type=int, default=20, help="steps between two merges")
    parser.add_argument("--seeds", default="0,1", help="seeds of parameters and data, such as 0,1")
    parser.add_argument("--warmup", type=int, default=30, help="steps of rising learning rate")
    parser.add_argument("--evaluate-batches", type=int, default=32, help="held-out batches of 16 rows")
    parser.add_argument("--ways", help="names of ways to synchronise, separated by semicolons; default: all")
    parser.add_argument("--text", type=Path, help="a text file; default: the sources of Python's library")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flag = f"--xla_force_host_platform_device_count={options.replicas}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    found = ways(options.every)
    names = list(found) if options.ways is None else ["every-step", *options.ways.split(";")]
    rows = []
    for name in dict.fromkeys(names):
        rows.append(measured(name, found[name], options.replicas, options))
        sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(table(rows) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
