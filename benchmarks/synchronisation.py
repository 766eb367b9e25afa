"""Held-out loss of ways to synchronise, at equal samples, beside what each replica gives to the combiner.

uv run python benchmarks/synchronisation.py [--replicas 2,4] [--steps 600] [--every 20]

Replicas are the indices of the mesh axis `data` of simulated devices; islands compute the same numbers
(tests/train_step/test_island_step.py). Bytes are those of the float32 arrays that a replica gives to the
combiner, which an all-reduce sends about twice.
"""

import argparse
import dataclasses
import io
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A run.

    Args:
      name: the way to synchronise.
      replicas: their number.
      loss: held-out loss after the last step.
      mean_bytes: bytes a replica gives to the combiner, per step.
      peak_bytes: the same of the step with most.
    """

    name: str
    replicas: int
    loss: float
    mean_bytes: float
    peak_bytes: int


def ways(every: int) -> dict[str, Any]:
    """Return name -> how replicas are synchronised."""
    from shardtrain.combine.synchronisation import PRESETS, Outer

    replace = dataclasses.replace
    return {
        "every-step": PRESETS["every-step"],
        "local-sgd": replace(PRESETS["local-sgd"], every=every),
        "diloco": replace(PRESETS["diloco"], every=every),
        "streaming-diloco": replace(PRESETS["streaming-diloco"], every=every),
        "diloco, gentler": replace(
            PRESETS["diloco"], every=every, outer=Outer(learning_rate=0.9, momentum=0.5, nesterov=True)
        ),
    }


def measured(name: str, synchronisation: Any, replicas: int, options: argparse.Namespace) -> Row:
    """Train on the text and return the row."""
    import jax
    from rich.console import Console

    from shardtrain import Layout, Optimizer, Run, Schedule, Strategy, Text, train
    from shardtrain.functional.nnx_model import as_model
    from shardtrain.models.decoder import DecoderConfig
    from shardtrain.optim.optimizer import make_optimizer
    from shardtrain.report.sinks.json_lines import read_jsonl
    from shardtrain.train_step.placement import state_specs
    from shardtrain.train_step.replica_state import fragments_of

    text = Text(seq=64) if options.text is None else Text(paths=(options.text,), seq=64)
    layout = Layout(mesh={"data": replicas})
    with TemporaryDirectory() as folder:
        run = Run(
            model=DecoderConfig(vocab=256, seq=64, embed=64, num_layers=4, num_heads=4, mlp=256),
            data=text,
            optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=3e-3, warmup=30)),
            strategy=Strategy(layout=layout, synchronisation=synchronisation),
            batch=16,
            steps=options.steps,
            evaluate_every=None,
            evaluate_batches=32,
            run_dir=Path(folder),
        )
        devices = jax.devices
        jax.devices = lambda *_: devices()[:replicas]  # type: ignore[assignment]
        try:
            train(run, Console(file=io.StringIO()))
        finally:
            jax.devices = devices
        loss = read_jsonl(Path(folder) / "metrics.jsonl")[-1]["heldout/loss"]
    model = as_model(run.model, run.names)
    optimizer, _ = make_optimizer(run.optimizer, run.steps, model.dims)
    sizes = {"data": replicas, "fsdp": 1, "tensor": 1, "pipeline": 1}
    specs = state_specs(model, optimizer, layout, sizes, synchronisation)
    parts = [each.take(specs.abstract.params) for each in fragments_of(synchronisation, specs)]
    found = [4 * sum(x.size for x in part.values()) for part in parts]
    return Row(name, replicas, loss, sum(found) / synchronisation.every, max(found))


def table(rows: list[Row]) -> str:
    """Format the rows as a table, losses and bytes beside those of every-step with as many replicas."""
    lines = [
        "| replicas | synchronisation | held-out loss | of every-step's | bytes a step | of every-step's"
        " | bytes at most | of every-step's |",
        "| --: | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        base = next(each for each in rows if (each.name, each.replicas) == ("every-step", row.replicas))
        lines.append(
            f"| {row.replicas} | {row.name} | {row.loss:.4f} | {row.loss / base.loss:.4f} |"
            f" {row.mean_bytes:,.0f} | {row.mean_bytes / base.mean_bytes:.4f} | {row.peak_bytes:,} |"
            f" {row.peak_bytes / base.peak_bytes:.3f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replicas", default="2,4", help="numbers of replicas, such as 2,4")
    parser.add_argument("--steps", type=int, default=600, help="steps of each run, a multiple of --every")
    parser.add_argument("--every", type=int, default=20, help="steps between two merges")
    parser.add_argument("--text", type=Path, help="a text file; default: the sources of Python's library")
    options = parser.parse_args(arguments)
    numbers = [int(each) for each in options.replicas.split(",")]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flag = f"--xla_force_host_platform_device_count={max(numbers)}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    rows = []
    for number in numbers:
        for name, synchronisation in ways(options.every).items():
            rows.append(measured(name, synchronisation, number, options))
            sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(table(rows) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
