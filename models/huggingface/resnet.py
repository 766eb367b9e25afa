"""The ResNet family of Hugging Face as `ImageNetResNet`: with its classifier and running statistics. See
`place.py`.

Its files say nothing of the size of an image; ours add entries that transformers keeps and does not read.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardtrain.models.huggingface.place import (
    STATE,
    Copy,
    Family,
    Place,
    entry_problems,
    option_problems,
)
from shardtrain.models.imagenet_resnet import BLOCKS, BOTTLENECK, ImageNetResNetConfig
from shardtrain.system.excerpts import short

NEEDED = ("num_channels", "embedding_size", "hidden_sizes", "depths")
ONLY = {
    "layer_type": ("bottleneck", "basic"),
    "hidden_act": ("relu",),
    "downsample_in_first_stage": (False,),
    "downsample_in_bottleneck": (False,),
}
NUM_LABELS = 2
"""Classes of a configuration that names none."""
SIDE = 224
"""Rows and columns of an image where a configuration names none."""


def places(config: ImageNetResNetConfig) -> Iterator[Place]:
    """List the places of a ResNet: kernels of convolutions are (out, in, height, width)."""
    stem = (7, 7 * config.colours, config.filters)
    yield from _normed("stem", "resnet.embedder.embedder", stem)
    number, entering = 0, config.filters
    for group, count in enumerate(BLOCKS[config.depth]):
        inside = config.filters * 2**group
        leaving = inside * config.expansion
        for i in range(count):
            ours, theirs = f"blocks/{number}", f"resnet.encoder.stages.{group}.layers.{i}"
            kernels = [(3, 3, entering, inside), (3, 3, inside, inside)]
            if config.expansion > 1:
                kernels = [(1, 1, entering, inside), (3, 3, inside, inside), (1, 1, inside, leaving)]
            for j, kernel in enumerate(kernels):
                yield from _normed(f"{ours}/layers/{j}", f"{theirs}.layer.{j}", kernel)
            if entering != leaving:
                yield from _normed(f"{ours}/shortcut", f"{theirs}.shortcut", (1, 1, entering, leaving))
            number, entering = number + 1, leaving
    dims = (entering, config.classes)
    yield Place(path="head/kernel", name="classifier.1.weight", dims=dims, num_in=1, transposed=True)
    yield Place(path="head/bias", name="classifier.1.bias", dims=dims[1:])


def _normed(path: str, name: str, kernel: tuple[int, ...]) -> Iterator[Place]:
    """List the places of a convolution and its norm."""
    yield Place(
        path=f"{path}/convolution/kernel", name=f"{name}.convolution.weight", dims=kernel, is_window=True
    )
    names = {
        f"{path}/norm/scale": "weight",
        f"{path}/norm/bias": "bias",
        f"{STATE}{path}/norm/mean": "running_mean",
        f"{STATE}{path}/norm/variance": "running_var",
    }
    for ours, theirs in names.items():
        yield Place(path=ours, name=f"{name}.normalization.{theirs}", dims=kernel[-1:])


def copies(config: ImageNetResNetConfig) -> tuple[Copy, ...]:
    """List the second names: none."""
    return ()


def read(config: Mapping[str, Any]) -> tuple[list[str], Callable[[], ImageNetResNetConfig]]:
    """See `Family.read`."""
    problems = entry_problems(config, NEEDED, ONLY, "ImageNetResNet")
    labels = config.get("id2label")
    if labels is not None and not (isinstance(labels, Mapping) and labels):
        problems.append(f"id2label is {short(labels)}; it is an object with the name of each class")
    depth = _depth(config)
    if not problems and depth is None:
        kind, known = config.get("layer_type", "bottleneck"), map(str, BLOCKS.values())
        problems.append(
            f"depths is {short(config['depths'])} with layer_type {kind!r}; ImageNetResNet has"
            f" {', '.join(known)}, the first two 'basic', the others 'bottleneck'"
        )
    elif not problems and config["hidden_sizes"] != _hidden_sizes(depth, config["embedding_size"]):
        problems.append(
            f"hidden_sizes is {short(config['hidden_sizes'])}; ImageNetResNet has"
            f" {_hidden_sizes(depth, config['embedding_size'])} only, by embedding_size"
        )

    def made() -> ImageNetResNetConfig:
        return ImageNetResNetConfig(
            depth=depth or 0,
            filters=config["embedding_size"],
            height=config.get("image_height", SIDE),
            width=config.get("image_width", SIDE),
            colours=config["num_channels"],
            classes=NUM_LABELS if labels is None else len(labels),
        )

    return problems, made


def _depth(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers; None if there is no ResNet with these blocks."""
    kind, depths = config.get("layer_type", "bottleneck"), config.get("depths")
    found = [d for d, blocks in BLOCKS.items() if list(blocks) == depths and kind == _kind(d)]
    return found[0] if found else None


def _kind(depth: int) -> str:
    return "bottleneck" if depth >= BOTTLENECK else "basic"


def _hidden_sizes(depth: int | None, filters: int) -> list[int]:
    expansion = ImageNetResNetConfig(depth=depth or 18).expansion
    return [filters * expansion * 2**group for group in range(4)]


def write(config: ImageNetResNetConfig) -> dict[str, Any]:
    """See `Family.write`."""
    names = [f"LABEL_{i}" for i in range(config.classes)]
    return {
        "num_channels": config.colours,
        "embedding_size": config.filters,
        "hidden_sizes": _hidden_sizes(config.depth, config.filters),
        "depths": list(BLOCKS[config.depth]),
        "layer_type": _kind(config.depth),
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
        "image_height": config.height,
        "image_width": config.width,
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def foreign(config: ImageNetResNetConfig) -> list[str]:
    """See `Family.foreign`."""
    return option_problems(config, {"norm": ("batch",)}, "resnet")


RESNET = Family(
    model_type="resnet",
    architecture="ResNetForImageClassification",
    kind=ImageNetResNetConfig,
    prefix="resnet.",
    heads=("classifier.",),
    places=places,
    copies=copies,
    read=read,
    write=write,
    foreign=foreign,
)
