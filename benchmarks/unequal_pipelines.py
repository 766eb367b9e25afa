"""Predicted throughput of virtual workers formed from 4 kinds x 4 devices, by policy and by search.

uv run python benchmarks/unequal_pipelines.py [--efficiency 0.5] [--microbatches 16] [--rows 32]

The pool is that of HetPipe (Park et al. 2020): four nodes with four devices of one kind each. Nothing is
measured: layers are counted from the tables of the models' papers, times are flops over a part of the data
sheet's float32 peak, and a step is simulated. Figures: docs/benchmarks/unequal_pipelines.md.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardtrain.pipeline.device_pool import POLICIES, DeviceGroup, Pool, policy
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_costs import BlockCost, ModelCosts, StageDevices
from shardtrain.pipeline.virtual_workers import Allocation, WorkerPredictor, allocation, search
from shardtrain.plan.devices import GB, known_device

KINDS = {
    "V": "NVIDIA TITAN V",
    "R": "NVIDIA TITAN RTX",
    "G": "NVIDIA GeForce RTX 2060",
    "Q": "Quadro P4000",
}
"""Letter -> device; each node has four of one kind."""

NODE_BYTES_PER_SECOND = 15.75 * GB
"""PCI Express 3.0 with 16 lanes."""

NETWORK_BYTES_PER_SECOND = 7 * GB
"""InfiniBand FDR, 56 Gbit a second."""

STATE_BYTES, FLOAT_BYTES = 12, 4
"""Of each parameter: itself, its gradient and momentum; of each activation."""

FREE_MEMORY = 0.9
"""The part of the memory that is used: the rest is for the context of the runtime and work space."""


@dataclass(frozen=True)
class Layer:
    """A layer for one image.

    Args:
      products: multiplications and additions in pairs, of a forward.
      parameters: number of them.
      saved: elements that its backward reads.
      outputs: elements that it hands on.
    """

    products: float = 0.0
    parameters: int = 0
    saved: int = 0
    outputs: int = 0

    def __add__(self, other: "Layer") -> "Layer":
        """One layer after the other, as one."""
        return Layer(
            self.products + other.products,
            self.parameters + other.parameters,
            self.saved + other.saved,
            other.outputs,
        )


def convolution(pixels: int, entering: int, leaving: int, window: int, *, normed: bool) -> Layer:
    """A convolution that gives `pixels` x `pixels`, with a bias or a batch norm, and relu."""
    weights = window**2 * entering * leaving
    outputs = pixels**2 * leaving
    # its output once, for the relu works in place; a batch norm keeps its own input too
    parameters = weights + (2 if normed else 1) * leaving
    return Layer(pixels**2 * weights, parameters, outputs * (2 if normed else 1), outputs)


def dense(entering: int, leaving: int) -> Layer:
    """A dense layer with a bias."""
    return Layer(entering * leaving, (entering + 1) * leaving, leaving, leaving)


def vgg19() -> list[Layer]:
    """VGG-19 for 224 x 224 pixels (Simonyan and Zisserman 2014, table 1, E): 16 convolutions, 3 dense layers.

    >>> f"{sum(layer.parameters for layer in vgg19()):,}"
    '143,667,240'
    >>> round(sum(layer.products for layer in vgg19()) / 1e9, 2)
    19.63
    """
    layers, entering = [], 3
    for size, (channels, count) in enumerate([(64, 2), (128, 2), (256, 4), (512, 4), (512, 4)]):
        pixels = 224 >> size
        for number in range(count):
            layer = convolution(pixels, entering, channels, 3, normed=False)
            entering = channels
            if number == count - 1:  # its pooling hands on a quarter
                layer += Layer(saved=layer.outputs // 4, outputs=layer.outputs // 4)
            layers.append(layer)
    return [*layers, dense(7 * 7 * 512, 4096), dense(4096, 4096), dense(4096, 1000)]


def resnet152() -> list[Layer]:
    """ResNet-152 for 224 x 224 pixels (He et al. 2015, table 1): a stem, 50 bottlenecks of 3, a dense layer.

    >>> f"{sum(layer.parameters for layer in resnet152()):,}"
    '60,192,808'
    >>> round(sum(layer.products for layer in resnet152()) / 1e9, 2)
    11.51
    """
    stem = convolution(112, 3, 64, 7, normed=True) + Layer(saved=56**2 * 64, outputs=56**2 * 64)
    return [stem, *_bottlenecks(), dense(2048, 1000)]


def _bottlenecks() -> Iterator[Layer]:
    entering = 64
    for size, (inner, count) in enumerate([(64, 3), (128, 8), (256, 36), (512, 3)]):
        pixels = 56 >> size
        for number in range(count):
            # the first of a size halves the image in its 3 x 3 convolution: not as the paper, as everywhere
            before = pixels * 2 if size and number == 0 else pixels
            layer = convolution(before, entering, inner, 1, normed=True)
            layer += convolution(pixels, inner, inner, 3, normed=True)
            layer += convolution(pixels, inner, 4 * inner, 1, normed=True)
            if number == 0:
                layer += convolution(pixels, entering, 4 * inner, 1, normed=True)
            entering = 4 * inner
            yield layer


MODELS = {"VGG-19": vgg19, "ResNet-152": resnet152}
"""Name -> its layers."""


def model_costs(layers: Sequence[Layer], rows: int) -> ModelCosts:
    """Return the costs of layers for a microbatch; a backward is twice a forward."""
    return ModelCosts(
        blocks=[
            BlockCost(
                forward_flops=2 * layer.products * rows,
                backward_flops=4 * layer.products * rows,
                state_bytes=STATE_BYTES * layer.parameters,
                saved_bytes=FLOAT_BYTES * layer.saved * rows,
                output_bytes=FLOAT_BYTES * layer.outputs * rows,
            )
            for layer in layers
        ]
    )


def pool(efficiency: float) -> Pool:
    """Return HetPipe's pool, its devices at a part of their float32 peak."""
    groups = []
    for letter, kind in KINDS.items():
        device = known_device(kind)
        assert device is not None
        assert device.float32_flops_per_second is not None
        speed = efficiency * device.float32_flops_per_second
        stage = StageDevices(flops_per_second=speed, memory_bytes=FREE_MEMORY * device.memory_bytes)
        groups.append(DeviceGroup(kind=letter, node=f"node {letter}", number=4, device=stage))
    return Pool(
        groups=groups,
        node_bytes_per_second=NODE_BYTES_PER_SECOND,
        network_bytes_per_second=NETWORK_BYTES_PER_SECOND,
    )


def allocations(name: str, options: argparse.Namespace) -> dict[str, Allocation | None]:
    """Return policy -> its prediction; None where it does not fit."""
    layers = MODELS[name]()
    devices = pool(options.efficiency)
    predictor = WorkerPredictor(
        devices,
        model_costs(layers, options.rows),
        lambda stages: make_table("1f1b", stages, options.microbatches),
        options.rows,
        recomputes=options.recompute,
    )
    sent = [FLOAT_BYTES * layer.parameters for layer in layers]
    found: dict[str, Allocation | None] = {}
    for each in POLICIES:
        found[each] = allocation(each, policy(each, devices), predictor, sent)
    found["search"] = search(predictor, 4, sent)
    found["search, equal rows"] = search(predictor, 4, sent, equal_rows=True)
    return found


def worker_text(devices: Pool, groups: Sequence[int], counts: Sequence[int]) -> str:
    """Format a virtual worker: device and blocks of each stage.

    >>> worker_text(pool(1.0), (0, 1, 3), (5, 6, 1))
    'V5 R6 Q1'
    """
    stages = zip(groups, counts, strict=True)
    return " ".join(f"{devices.groups[group].kind}{count}" for group, count in stages)


def table(found: dict[str, Allocation | None], devices: Pool) -> str:
    """Format the allocations of a model in markdown."""
    lines = [
        "| policy | virtual workers: device and layers of each stage | images/s each | all, rows by speed"
        " | all, equal rows | synchronisation / step |",
        "| --- | --- | --- | --: | --: | --: |",
    ]
    for name, each in found.items():
        if each is None:
            lines.append(f"| {name} | does not fit | | | | |")
            continue
        workers = {}
        for worker in each.workers:
            key = worker_text(devices, worker.groups, worker.cut.counts), worker.rows_per_second
            workers[key] = workers.get(key, 0) + 1
        texts = ", ".join(f"{number} x {text}" for (text, _), number in workers.items())
        speeds = ", ".join(f"{speed:.0f}" for _, speed in workers)
        share = each.synchronisation_seconds / (each.step_seconds + each.synchronisation_seconds)
        lines.append(
            f"| {name} | {texts} | {speeds} | {each.rows_per_second:.0f} | {each.equal_rows_per_second:.0f} |"
            f" {share:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--efficiency", type=float, default=0.5, help="part of the peak that devices reach")
    parser.add_argument("--microbatches", type=int, default=16, help="of a virtual worker in a step")
    parser.add_argument("--rows", type=int, default=32, help="images of a microbatch")
    parser.add_argument("--recompute", action="store_true", help="stages compute their forward again")
    options = parser.parse_args()
    for name in MODELS:
        print(f"\n{name}\n\n{table(allocations(name, options), pool(options.efficiency))}")


if __name__ == "__main__":
    main()
