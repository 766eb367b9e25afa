"""Held-out loss of ways to synchronise, at equal samples, beside what each replica gives to the combiner.

uv run python benchmarks/synchronisation.py [--replicas 2] [--steps 600] [--every 20] [--seeds 0,1]
    [--base-steps 2000] [--synchronous-steps 100] [--folder runs/synchronisation]

With --base-steps every way continues from one model, which every-step has trained at a constant rate, with
samples in another order and a new inner optimizer, as Douillard et al. 2023 do; else from random parameters.
With --synchronous-steps every way is there once more, with as many first steps that average gradients.
Replicas are the indices of the mesh axis `data` of simulated devices; islands compute the same numbers
(tests/train_step/test_island_step.py). Bytes are those of the float32 arrays that a replica gives to the
combiner, which an all-reduce sends about twice. Runs that --folder has from before are not repeated. Over a
slow link: slow_link.py. Figures: docs/benchmarks/synchronisation.md.
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

BASE = "every-step"

OTHER_ORDER = 1000
"""Added to the seed of a base model: ways that continue from it see the samples in another order."""


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


def ways(every: int, rate: float, momentum: float, synchronous_steps: int = 0) -> dict[str, Any]:
    """Return name -> how replicas are synchronised.

    Args:
      every: steps between two merges.
      rate: of the outer optimizer that stands beside the presets'.
      momentum: the same.
      synchronous_steps: first steps in which gradients are averaged, in a second form of each; 0: none.
    """
    from shardtrain.combine.synchronisation import PRESETS, Outer

    outer = Outer(learning_rate=rate, momentum=momentum, nesterov=momentum > 0)
    local = {
        name: dataclasses.replace(PRESETS[name], every=every)
        for name in ("local-sgd", "diloco", "streaming-diloco")
    }
    beside = {
        f"{name}, outer rate {rate:g}, momentum {momentum:g}": dataclasses.replace(local[name], outer=outer)
        for name in ("diloco", "streaming-diloco")
    }
    found = {**local, **beside}
    later = {
        f"{name}, after {synchronous_steps} synchronous steps": dataclasses.replace(
            way, synchronous_steps=synchronous_steps
        )
        for name, way in found.items()
        if synchronous_steps
    }
    return {BASE: PRESETS[BASE], **found, **later}


def measured(
    name: str, synchronisation: Any, replicas: int, options: argparse.Namespace, folder: Path
) -> Row:
    """Train on the text, once for each seed, and return the row."""
    from shardtrain import StartFrom
    from shardtrain.functional.nnx_model import as_model
    from shardtrain.optim.optimizer import make_optimizer
    from shardtrain.train_step.placement import state_specs
    from shardtrain.train_step.replica_state import fragments_of

    # every-step gives the same with any number of replicas (tests/test_central.py), so it is trained once
    label = name if name == BASE else f"{name}, {replicas} replicas"
    losses = []
    for seed in seeds_of(options):
        run = run_of(synchronisation, replicas, seed, options)
        if options.base_steps:
            base_seed = seed if options.base_seed is None else options.base_seed
            base = folder / f"base,_seed_{base_seed}"
            trained(base_run(replicas, base_seed, options), base)
            run = dataclasses.replace(run, seed=seed + OTHER_ORDER, start_from=StartFrom(checkpoint=base))
        losses.append(trained(run, folder / f"{label}, seed {seed}".replace(" ", "_")))
    run = run_of(synchronisation, replicas, 0, options)
    model = as_model(run.model, run.names)
    optimizer, _ = make_optimizer(run.optimizer, run.steps, model.dims)
    sizes = {"data": replicas, "fsdp": 1, "tensor": 1, "pipeline": 1}
    specs = state_specs(model, optimizer, run.strategy.layout, sizes, synchronisation)
    parts = [each.take(specs.abstract.params) for each in fragments_of(synchronisation, specs)]
    found = [4 * sum(x.size for x in part.values()) for part in parts]
    # in synchronous steps all gradients are sent, and later all deltas in a round
    num_first = min(synchronisation.synchronous_steps, run.steps)
    times = num_first + (run.steps - num_first) / synchronisation.every
    most = sum(found) if num_first else max(found)
    return Row(name, replicas, tuple(losses), sum(found) * times / run.steps, most)


def seeds_of(options: argparse.Namespace) -> list[int]:
    """Return the seeds."""
    return [int(each) for each in options.seeds.split(",")]


def run_of(synchronisation: Any, replicas: int, seed: int, options: argparse.Namespace) -> Any:
    """Return the run: a small decoder on the text, from random parameters."""
    from shardtrain import Layout, Optimizer, Run, Schedule, Strategy, Text
    from shardtrain.models.decoder import DecoderConfig

    return Run(
        model=DecoderConfig(vocab=256, seq=64, embed=64, num_layers=4, num_heads=4, mlp=256),
        data=Text(seq=64) if options.text is None else Text(paths=(options.text,), seq=64),
        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=options.rate, warmup=options.warmup)),
        strategy=Strategy(layout=Layout(mesh={"data": replicas}), synchronisation=synchronisation),
        batch=options.batch,
        steps=options.steps,
        seed=seed,
        evaluate_every=None,
        evaluate_batches=options.evaluate_batches,
    )


def base_run(replicas: int, seed: int, options: argparse.Namespace) -> Any:
    """Return the run that trains the base model of a seed."""
    from shardtrain import Optimizer, Schedule
    from shardtrain.combine.synchronisation import PRESETS

    constant = Schedule(name="constant", peak=options.base_rate, warmup=options.warmup)
    return dataclasses.replace(
        run_of(PRESETS[BASE], replicas, seed, options),
        optimizer=Optimizer(learning_rate=constant),
        steps=options.base_steps,
    )


def trained(run: Any, folder: Path) -> float:
    """Train unless the folder has the whole run, and return the held-out loss after the last step."""
    from rich.console import Console

    from shardtrain import train

    loss = heldout_loss(folder, run.steps)
    if loss is None:
        train(dataclasses.replace(run, run_dir=folder), Console(file=io.StringIO()))
        loss = heldout_loss(folder, run.steps)
        assert loss is not None
        sys.stderr.write(f"{folder.name}: {loss:.4f}\n")
    return loss


def heldout_loss(folder: Path, steps: int) -> float | None:
    """Return the held-out loss after the last step of a run; None if the folder has no such run."""
    from shardtrain.report.sinks.json_lines import read_jsonl

    metrics = folder / "metrics.jsonl"
    lines = read_jsonl(metrics) if metrics.is_file() else []
    return lines[-1].get("heldout/loss") if lines and lines[-1]["step"] == steps else None


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
    parser.add_argument("--batch", type=int, default=16, help="rows of 64 bytes in a step, over all replicas")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate, of a cosine")
    parser.add_argument("--warmup", type=int, default=30, help="steps of rising learning rate")
    parser.add_argument("--base-steps", type=int, default=0, help="steps of a base model; 0: none")
    parser.add_argument("--base-seed", type=int, help="of the base model of all seeds; default: each its own")
    parser.add_argument("--base-rate", type=float, default=3e-3, help="learning rate of the base model")
    parser.add_argument("--outer-rate", type=float, default=0.9, help="beside the presets' outer optimizer")
    parser.add_argument("--outer-momentum", type=float, default=0.5, help="the same")
    parser.add_argument("--synchronous-steps", type=int, default=0, help="of a second form of each way")
    parser.add_argument("--evaluate-batches", type=int, default=32, help="held-out batches")
    parser.add_argument("--ways", help="names of ways to synchronise, separated by semicolons; default: all")
    parser.add_argument("--text", type=Path, help="a text file; default: the sources of Python's library")
    parser.add_argument("--folder", type=Path, help="keeps the runs; default: a temporary folder")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flag = f"--xla_force_host_platform_device_count={options.replicas}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    outer = (options.outer_rate, options.outer_momentum)
    found = ways(options.every, *outer, options.synchronous_steps)
    names = list(found) if options.ways is None else [BASE, *options.ways.split(";")]
    with TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        rows = [
            measured(each, found[each], options.replicas, options, folder) for each in dict.fromkeys(names)
        ]
        losses = {each.name: heldout_loss(each, options.base_steps) for each in sorted(folder.glob("base,*"))}
    for base, loss in losses.items():
        if loss is not None:
            sys.stdout.write(f"{base}: held-out loss {loss:.4f}\n")
    sys.stdout.write(table(rows) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
