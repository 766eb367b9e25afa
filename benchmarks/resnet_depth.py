"""A deep ResNet-v2 through pipelines across islands: the losses of one device, step by step.

    python benchmarks/resnet_depth.py [--depth 1001] [--steps 3]

Runs examples/digits_resnet.py under mpiexec as 2 stages x 2 pipelines and as 3 stages, and beside them plain
gradient descent on one device, with updates in numpy: XLA takes very long to compile thousands of them
into one program. Nothing is optimised by LLVM, which would take long on a network of many blocks.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardtrain import (
    classification_loss,
    init_state,
    make_gradients,
    make_mesh,
    make_placement,
    place,
)
from shardtrain.cli.run_file import load_run
from shardtrain.data import Batches
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.functional.rng import step_key
from shardtrain.models.resnet import ResNetConfig
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.sharding.layout import Layout

ROOT = Path(__file__).parents[1]
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
WAYS = {"2 stages x 2": (4, ["--partitions", "2"]), "3 stages": (3, [])}
BATCH, MICROBATCHES, RATE = 32, 4, 0.02


def in_stages(num_ranks: int, options: list[str], depth: int, steps: int, folder: Path) -> list[float]:
    """The loss of each step, of a run across islands."""
    beside = Path(sys.executable).parent
    command = [str(beside / "mpiexec"), "-n", str(num_ranks), str(beside / "shardtrain"), "train"]
    command += ["examples/digits_resnet.py", "--model.depth", str(depth), "--model.filters", "4"]
    command += ["--model.num-groups", "2", "--batch", str(BATCH), "--accumulate", str(MICROBATCHES)]
    command += ["--optimizer.name", "sgd", "--optimizer.b1", "0", "--optimizer.weight-decay", "0"]
    command += ["--optimizer.clip", "None", "--optimizer.learning-rate.name", "constant"]
    command += ["--optimizer.learning-rate.warmup", "0", "--optimizer.learning-rate.peak", str(RATE)]
    command += ["--across", "pipeline", "--steps", str(steps), "--log-every", "1", "--run-dir", str(folder)]
    subprocess.run([*command, *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found = {
        line["step"]: line["train/loss"]
        for line in read_jsonl(folder / "metrics.jsonl")
        if "train/loss" in line
    }
    return [found[step] for step in sorted(found)]


def on_one_device(depth: int, steps: int, folder: Path) -> list[float]:
    """The same by the library's gradient, and x - rate * gradient in numpy."""
    model = from_nnx(
        ResNetConfig(depth=depth, filters=4, num_groups=2, height=8, width=8, colours=1, classes=10)
    )
    layout = Layout(mesh={"data": 1})
    mesh = make_mesh(layout, jax.devices()[:1])
    placement = make_placement(model, optax.identity(), layout, mesh)
    state = init_state(model, optax.identity(), placement)
    gradients = jax.jit(make_gradients(model, classification_loss, placement))
    run = load_run(str(ROOT / "examples/digits_resnet.py"))
    params, losses = state.params, []
    batches = Batches(source=run.data.train(folder), batch=BATCH).iterate()
    for step, (batch, _) in enumerate(islice(batches, steps)):
        placed = place(batch, mesh, layout.batch_axes, MICROBATCHES)
        found = gradients(params, state.model_state, step_key(state.seed, jnp.int32(step)), placed)
        losses.append(float(found.loss_sum / found.count))
        params = jax.tree.map(lambda x, g: np.asarray(x) - RATE * np.asarray(g), params, found.grads)
        params = jax.tree.map(lambda x: x.astype(np.float32), params)
    return losses


def main() -> None:
    """Print the table, and fail where a loss is not that of one device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--depth", type=int, default=1001)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    # before jax starts; the ranks inherit them
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        found = {"one device": on_one_device(options.depth, options.steps, Path(folder))}
        print("one device:", found["one device"], flush=True)
        for name, (num_ranks, words) in WAYS.items():
            found[name] = in_stages(num_ranks, words, options.depth, options.steps, Path(folder) / name)
            print(f"{name}:", found[name], flush=True)
    reference = found["one device"]
    print(f"\n| step | {' | '.join(found)} |\n|{'---|' * (len(found) + 1)}")
    for step in range(options.steps):
        print(f"| {step + 1} | {' | '.join(f'{each[step]:.6f}' for each in found.values())} |")
    worst = max(abs(a / b - 1) for each in found.values() for a, b in zip(each, reference, strict=True))
    print(f"\nlargest relative difference from one device: {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit("the losses are not those of one device")


if __name__ == "__main__":
    main()
