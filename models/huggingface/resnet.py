"""Map Hugging Face's ResNet family to `ImageNetResNet`, with the classifier and running statistics.

Its files do not have the size of an image; ours have additional entries, which transformers ignores.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shardtrain.models.huggingface.entries import count_labels, entry_problems, label_problems, write_labels
from shardtrain.models.huggingface.place import STATE, Family, Place, place_norm
from shardtrain.models.imagenet_resnet import BLOCKS, BOTTLENECK, ImageNetResNetConfig
from shardtrain.system.excerpts import short

NEEDED = ("num_channels", "embedding_size", "hidden_sizes", "depths")
ONLY = {
    "layer_type": ("bottleneck", "basic"),
    "hidden_act": ("relu",),
    "downsample_in_first_stage": (False,),
    "downsample_in_bottleneck": (False,),
}


def _list_places(config: ImageNetResNetConfig) -> Iterator[Place]:
    """List the places of a ResNet: kernels of convolutions are (out, in, height, width)."""
    yield from _place_normed("stem", "resnet.embedder.embedder", (7, 7 * config.colours, config.filters))
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
                yield from _place_normed(f"{ours}/layers/{j}", f"{theirs}.layer.{j}", kernel)
            if entering != leaving:
                yield from _place_normed(f"{ours}/shortcut", f"{theirs}.shortcut", (1, 1, entering, leaving))
            number, entering = number + 1, leaving
    dims = (entering, config.classes)
    yield Place(path="head/kernel", name="classifier.1.weight", dims=dims, num_in=1, transposed=True)
    yield Place(path="head/bias", name="classifier.1.bias", dims=dims[1:])


def _place_normed(path: str, name: str, kernel: tuple[int, ...]) -> Iterator[Place]:
    """List the places of a convolution and its norm."""
    ours, theirs = f"{path}/convolution/kernel", f"{name}.convolution.weight"
    yield Place(path=ours, name=theirs, dims=kernel, is_window=True)
    norm = f"{name}.normalization"
    yield from place_norm(f"{path}/norm", norm, dims=kernel[-1:])
    yield Place(path=f"{STATE}{path}/norm/mean", name=f"{norm}.running_mean", dims=kernel[-1:])
    yield Place(path=f"{STATE}{path}/norm/variance", name=f"{norm}.running_var", dims=kernel[-1:])


def _find_depth(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers; None if no ResNet has these blocks."""
    kind, depths = config.get("layer_type", "bottleneck"), config.get("depths")
    found = [d for d, blocks in BLOCKS.items() if list(blocks) == depths and kind == _kind(d)]
    return found[0] if found else None


def _kind(depth: int) -> str:
    return "bottleneck" if depth >= BOTTLENECK else "basic"


def _hidden_sizes(depth: int, filters: int) -> list[int]:
    expansion = ImageNetResNetConfig(depth=depth).expansion
    return [filters * expansion * 2**group for group in range(4)]


def _list_problems(config: Mapping[str, Any]) -> list[str]:
    if entry_problems(config, NEEDED, ONLY, "") or (found := label_problems(config)):
        return label_problems(config)
    depth = _find_depth(config)
    if depth is None:
        kind, known = config.get("layer_type", "bottleneck"), map(str, BLOCKS.values())
        found.append(
            f"depths is {short(config['depths'])} with layer_type {kind!r}; ImageNetResNet has"
            f" {', '.join(known)}, the first two 'basic', the others 'bottleneck'"
        )
    elif config["hidden_sizes"] != (sizes := _hidden_sizes(depth, config["embedding_size"])):
        found.append(
            f"hidden_sizes is {short(config['hidden_sizes'])}; ImageNetResNet has {sizes} only, by"
            " embedding_size"
        )
    return found


def _write(config: ImageNetResNetConfig) -> dict[str, Any]:
    return {
        "hidden_sizes": _hidden_sizes(config.depth, config.filters),
        "depths": list(BLOCKS[config.depth]),
        "layer_type": _kind(config.depth),
        **write_labels(config.classes),
    }


RESNET = Family(
    model_type="resnet",
    architecture="ResNetForImageClassification",
    kind=ImageNetResNetConfig,
    prefix="resnet.",
    heads=("classifier.",),
    places=_list_places,
    entries={
        "colours": "num_channels", "filters": "embedding_size", "height": "image_height",
        "width": "image_width",
    },
    needed=("hidden_sizes", "depths"),
    defaults={"image_height": 224, "image_width": 224},
    chosen=("depth", "classes", "num_groups"),
    only=ONLY,
    constant={"hidden_act": "relu", "downsample_in_first_stage": False, "downsample_in_bottleneck": False},
    read=lambda config: {"depth": _find_depth(config), "classes": count_labels(config)},
    write=_write,
    problems=_list_problems,
)  # fmt: skip
