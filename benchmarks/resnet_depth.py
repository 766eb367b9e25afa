"""A deep ResNet-v2 on one device and as pipelines across islands: losses, time to the first step, memory.

    python benchmarks/resnet_depth.py [--depth 1001] [--stack 11] [--ways one 2x2 3x2]
    python benchmarks/resnet_depth.py --predict

Runs examples/digits_resnet.py with its equal blocks in stacks, each way a run of its own. With `--predict`
nothing runs: it prints how many times as fast as one node the planner expects up to 512 nodes to be.
"""

import re
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import optax
import tyro
from ranks import train

from shardtrain import classification_loss
from shardtrain.functional.nnx_model import convert_model
from shardtrain.functional.remat import apply_remat
from shardtrain.models.resnet import ResNetConfig
from shardtrain.plan.machine import Link, Machine, Rates
from shardtrain.plan.search import data_parallel, search
from shardtrain.plan.space import Space
from shardtrain.plan.subject import Subject

STAGES = "--across pipeline --stages flops --partitions"
WAYS = {
    "one": (1, ""),
    "2 islands": (2, ""),
    "2x1": (2, f"{STAGES} 2"),
    "2x2": (4, f"{STAGES} 2"),
    "3x2": (6, f"{STAGES} 3"),
}
"""Name -> (islands, options); "2x2" are 2 stages x 2 replicas."""
MAIN = ("one", "2x2", "3x2")
COMMON = (
    "--batch 32 --accumulate 4 --log-every 1 --evaluate-every None --model.filters 4 --model.num-groups 2"
)

NODE = Rates(flops_per_second=2e12, memory_bytes_per_second=1.6e11, kernel_seconds=1e-5, memory_bytes=1.6e11)
"""Assumed of a node of two Xeon 8280: half of the flops of its products, 0.8 of the rate of its memory."""

NODES = Machine(rates=NODE, devices_per_node=1, node_link=Link(bytes_per_second=1e10, latency_seconds=5e-6))
IMAGES_PER_NODE = 64


def run(way: str, depth: int, stack: int) -> tuple[list[float], float, float, str]:
    """Return the losses, seconds to the end, seconds of the fastest step, and the line of peak memory."""
    num_islands, options = WAYS[way]
    launch = ("--islands", num_islands) if num_islands > 1 else ()
    words = [*COMMON.split(), *options.split(), "--model.depth", depth, "--model.stack", stack]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), "examples/digits_resnet.py"
        printed, lines = train(model, folder, *words, "--steps", 5, launch=launch, JAX_PLATFORMS="cpu")
        seconds = time.monotonic() - begin
    peak = re.search(r"peak memory of .*", printed)
    fastest = min(1 / line["updates_per_second"] for line in lines if line.get("updates_per_second"))
    return [line["train/loss"] for line in lines], seconds, fastest, peak[0] if peak else ""


def predict_nodes(depth: int, stack: int) -> None:
    """Print the predicted throughput of up to 512 nodes over that of one, with 32 x 32 images."""
    config = ResNetConfig(depth=depth, height=32, width=32, classes=10, stack=stack)
    one = 0.0
    print("| nodes | s of a step | data parallel | best | its mesh |\n|--:|--:|--:|--:|---|")
    for nodes in (1, 2, 8, 32, 128, 512):
        rows = nodes * IMAGES_PER_NODE
        shapes = {"image": (rows, 32, 32, 3), "weights": (rows,)}
        batch = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
        subject = Subject(
            model=lambda remat: convert_model(apply_remat(config, remat)),
            loss=classification_loss,
            optimizer=optax.sgd(0.1, momentum=0.9),
            batch={**batch, "label": jax.ShapeDtypeStruct((rows,), np.int32)},
        )
        best, data = search(subject, NODES, nodes).ranked[0], data_parallel(subject, NODES, nodes, Space())
        assert data is not None
        seconds = data.prediction.seconds.total
        one = one or seconds
        ratios = [f"{nodes * one / each:.1f}" for each in (seconds, best.prediction.seconds.total)]
        print(f"| {nodes} | {seconds:.3f} | {' | '.join(ratios)} | {best.choice.layout.mesh} |", flush=True)


def main(depth: int = 1001, stack: int = 11, ways: tuple[str, ...] = MAIN, predict: bool = False) -> None:
    """Print a row for each way, and fail where a loss is not that of the first."""
    if predict:
        predict_nodes(depth, stack)
        return
    print("| way | losses | s in all | s of a step | memory |\n|---|---|--:|--:|---|", flush=True)
    reference: list[float] = []
    worst = 0.0
    for way in ways:
        losses, seconds, step, peak = run(way, depth, stack)
        reference = reference or losses
        worst = max(worst, *(abs(a / b - 1) for a, b in zip(losses, reference, strict=True)))
        text = ", ".join(f"{loss:.6f}" for loss in losses)
        print(f"| {way} | {text} | {seconds:.0f} | {step:.2f} | {peak} |", flush=True)
    print(f"\nlargest relative difference from the first: {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit("the losses are not those of the first")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
