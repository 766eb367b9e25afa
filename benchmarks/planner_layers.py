"""What AccPar's paper says of AlexNet, VGG and ResNet, computed again: types of layers, speed over others.

uv run python benchmarks/planner_layers.py [alexnet vgg11 vgg16 resnet18 resnet50] [--levels]

Song et al. 2020, AccPar (HPCA): batches of 512 images of 224 x 224 in bfloat16; 128 boards of TPU v3, and 128
of v2 beside 128 of v3, of 180 and 420 Tflops. Rates of links are ours. Nothing runs: layers are traced, and
times are flops over rates and bytes over links. Figures: docs/benchmarks/planner_layers.md.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from shardtrain import classification_loss
from shardtrain.functional.linen_model import from_linen
from shardtrain.plan.layers.assignment import Hierarchy, Layers
from shardtrain.plan.layers.baselines import BASELINES, data_parallel
from shardtrain.plan.layers.layer_graph import CONVOLUTION, PRODUCT
from shardtrain.plan.layers.partition import Group, Sides, Split, group_of, joined
from shardtrain.plan.layers.trace_layers import layers_of
from shardtrain.plan.machine import Link, Machine, Rates
from shardtrain.plan.subject import Subject

BATCH, SIZE, CLASSES = 512, 224, 1000
DTYPE = jnp.bfloat16
TERA, GB = 1e12, 1e9

Images = jax.Array


class Plain(nn.Module):
    """Convolutions (channels, window, stride), "pool", then matrix products (features)."""

    convolutions: Sequence[tuple[int, int, int] | str]
    features: Sequence[int]
    pool: int = 2

    @nn.compact
    def __call__(self, x: Images) -> Images:
        for layer in self.convolutions:
            if isinstance(layer, str):
                x = nn.max_pool(x, (self.pool, self.pool), strides=(2, 2))
            else:
                channels, window, stride = layer
                x = nn.Conv(channels, (window, window), strides=stride, dtype=DTYPE, param_dtype=DTYPE)(x)
                x = nn.relu(x)
        x = x.reshape(x.shape[0], -1)
        for i, features in enumerate(self.features):
            x = nn.Dense(features, dtype=DTYPE, param_dtype=DTYPE)(nn.relu(x) if i else x)
        return x


class Residual(nn.Module):
    """ResNet (He et al. 2015), of blocks of two convolutions, or of bottlenecks of three."""

    numbers: Sequence[int]
    bottleneck: bool

    @nn.compact
    def __call__(self, x: Images) -> Images:
        def convolution(x: Images, channels: int, window: int, stride: int = 1) -> Images:
            return nn.Conv(
                channels, (window, window), strides=stride, use_bias=False, dtype=DTYPE, param_dtype=DTYPE
            )(x)

        x = nn.max_pool(nn.relu(convolution(x, 64, 7, 2)), (3, 3), strides=(2, 2), padding="SAME")
        for i, number in enumerate(self.numbers):
            inside, out = 64 << i, (64 << i) * (4 if self.bottleneck else 1)
            for block in range(number):
                stride = 2 if i and not block else 1
                windows = (1, 3, 1) if self.bottleneck else (3, 3)
                y = x
                for at, window in enumerate(windows):
                    last = at == len(windows) - 1
                    strides = stride if at == len(windows) - 2 else 1
                    y = convolution(nn.relu(y) if at else y, out if last else inside, window, strides)
                shortcut = x if x.shape == y.shape else convolution(x, out, 1, stride)
                x = nn.relu(shortcut + y)
        return nn.Dense(CLASSES, dtype=DTYPE, param_dtype=DTYPE)(x.mean((1, 2)))


def vgg(*numbers: int) -> Plain:
    """Return a VGG (Simonyan and Zisserman 2014) with these numbers of convolutions of each size."""
    channels = (64, 128, 256, 512, 512)
    convolutions = [
        layer
        for each, number in zip(channels, numbers, strict=True)
        for layer in (*[(each, 3, 1)] * number, "pool")
    ]
    return Plain(convolutions, (4096, 4096, CLASSES))


ALEXNET = [(96, 11, 4), "pool", (256, 5, 1), "pool", (384, 3, 1), (384, 3, 1), (256, 3, 1), "pool"]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "alexnet": lambda: Plain(ALEXNET, (4096, 4096, CLASSES), pool=3),
    "vgg11": lambda: vgg(1, 1, 2, 2, 2),
    "vgg16": lambda: vgg(2, 2, 3, 3, 3),
    "resnet18": lambda: Residual((2, 2, 2, 2), False),
    "resnet50": lambda: Residual((3, 4, 6, 3), True),
}


def boards(teraflops: float, gigabytes: float, name: str) -> Group:
    """Return 128 equal boards, each with a link of so many gigabytes a second."""
    machine = Machine(
        rates=Rates(flops_per_second=teraflops * TERA), device_link=Link(bytes_per_second=gigabytes * GB)
    )
    return group_of(machine, 128, name)


def in_halves(layers: Layers, sides: Sides, level: int) -> tuple[Split, ...]:
    """Data parallelism with equal parts of the batch: what the paper compares with."""
    return tuple(split._replace(ratio=0.5) for split in data_parallel(layers, sides, level))


ARRAYS = {
    "128 v3": boards(420, 2, "v3"),
    "128 v2 + 128 v3": joined([boards(180, 1, "v2"), boards(420, 2, "v3")], Link(bytes_per_second=128 * GB)),
}
WAYS = {"data parallel, halves": in_halves, **BASELINES}


def traced(name: str) -> Layers:
    """Return the layers of a model."""
    image = jax.ShapeDtypeStruct((1, SIZE, SIZE, 3), DTYPE)
    batch = {
        "image": jax.ShapeDtypeStruct((BATCH, SIZE, SIZE, 3), DTYPE),
        "label": jax.ShapeDtypeStruct((BATCH,), jnp.int32),
        "weights": jax.ShapeDtypeStruct((BATCH,), jnp.float32),
    }
    model = from_linen(MODELS[name](), image)
    return layers_of(
        Subject(model=lambda _: model, loss=classification_loss, optimizer=optax.sgd(0.1), batch=batch)
    )


def main() -> None:
    """Print the tables of the models that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS])
    parser.add_argument("--levels", action="store_true", help="print the type of each layer on each level")
    options = parser.parse_args()
    found = {name: traced(name) for name in options.models or MODELS}
    for array, group in ARRAYS.items():
        print(f"\n{array}: speed over data parallel in halves")
        print(
            "| model | "
            + " | ".join(list(WAYS)[1:])
            + " | searched in | convolutions I, II, III | products I, II, III |"
        )
        print("| --- |" + " --- |" * (len(WAYS) + 2))
        for name, layers in found.items():
            start = time.process_time()
            ways = {way: Hierarchy(choose=choose).partition(layers, group) for way, choose in WAYS.items()}
            seconds = time.process_time() - start
            base = ways["data parallel, halves"].seconds
            speeds = [f"{base / ways[way].seconds:.2f}" for way in list(WAYS)[1:]]
            best = ways["accpar"]
            counts = Counter(
                (layer.kind, split.way)
                for level in best.levels
                for layer, split in zip(layers, level.chosen, strict=True)
            )
            types = [
                ", ".join(str(counts[kind, way]) for way in ("I", "II", "III"))
                for kind in (CONVOLUTION, PRODUCT)
            ]
            print(f"| {name} | " + " | ".join([*speeds, f"{seconds:.2f} s", *types]) + " |")
            if options.levels:
                for level in best.levels:
                    chosen = zip(layers, level.chosen, strict=True)
                    print(
                        f"  {level.group.devices:4}: ",
                        *(split.way for layer, split in chosen if layer.has_weights),
                    )


if __name__ == "__main__":
    main()
