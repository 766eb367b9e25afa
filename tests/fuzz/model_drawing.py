"""Draw the options of models, by kind.

Next: `fuzz.py`.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import Any

from case import Case

MIXTURES = (
    "num={n}|top=2",
    "num={n}|top=2|z=0.001",
    "num={n}|top=2|capacity=1.0|balance=0.1",
    "num={n}|top=1|shared=1|shared_gate=sigmoid",
    "num={n}|top=2|scores=sigmoid|balance=0.1|scale=2.0",
)
OVER_BATCH = "num={n}|top=2|over=batch|balance=0.5|bias=0.01"


def is_drawn(rng: random.Random, share: float) -> bool:
    """Whether something is drawn that this share of cases has."""
    return rng.random() < share


def num_blocks(rng: random.Random, case: Case) -> int:
    """Draw a number of blocks that the stages of a case can share."""
    parts = case.mesh.get("pipeline", 1) * case.virtual
    return parts + rng.choice((0, 0, 0, 1)) if parts > 1 else rng.choice((1, 1, 2))


def draw_decoder(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw the options of a decoder, in nnx or linen."""
    heads = unit
    model: dict[str, Any] = {"vocab": 2 * unit, "seq": 2 * unit, "embed": 2 * unit, "num_heads": heads}
    model |= {"num_layers": num_blocks(rng, case), "head_dim": 2, "mlp": 2 * unit}
    if is_drawn(rng, 0.2):
        model["loss_chunk"] = rng.choice((3, 5, 8))
    if is_drawn(rng, 0.1):
        model["dropout"] = 0.3
    if is_drawn(rng, 0.3):
        model["scan"] = False
    if case.kind == "linen":
        return replace(case, model={**model, "head_dim": 2})
    extra = {
        "positions": ("learned", "learned", "rotary"),
        "norm": ("layernorm", "rmsnorm", "rmsnorm_plus_one"),
        "activation": ("gelu", "swiglu", "geglu", "relu"),
        "tied": (True, False),
        "bias": (True, False),
        "post_norm": (False, False, True),
        "parallel": (False, False, True),
        "qk_norm": (False, False, True),
        "window": (None, None, unit),
        "soft_cap": (None, None, 20.0),
    }
    for name, values in extra.items():
        model[name] = rng.choice(values)
    if model["qk_norm"] and model["norm"] == "layernorm":
        model["norm"] = "rmsnorm"
    if is_drawn(rng, 0.2):
        model["num_kv_heads"] = lcm(2, *(n for axis, n in case.mesh.items() if axis in ("tensor", "context")))
    if is_drawn(rng, 0.1) and case.kind == "decoder":
        model["lora"] = "rank=2"
    if case.kind == "experts":
        mixture = OVER_BATCH if is_drawn(rng, 0.15) else rng.choice(MIXTURES)
        model |= {"experts": mixture.format(n=unit).replace("|", ","), "activation": "swiglu", "bias": False}
    return replace(case, model={name: value for name, value in model.items() if value is not None})


def draw_tiny(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw the options of the small language model."""
    model = {
        "vocab": 2 * unit,
        "seq": 2 * unit,
        "embed": unit,
        "mlp": 2 * unit,
        "tied": rng.choice((True, False)),
    }
    if is_drawn(rng, 0.3):
        model["dropout"] = 0.3
    return replace(case, model={**model, "num_layers": num_blocks(rng, case)})


def draw_encoder(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw the options of an encoder."""
    model: dict[str, Any] = {
        "vocab": 2 * unit,
        "seq": 2 * unit,
        "embed": 2 * unit,
        "num_heads": unit,
        "mlp": 2 * unit,
    }
    model |= {"num_layers": num_blocks(rng, case), "tied": rng.choice((True, False))}
    model |= {"loss_chunk": 5} if is_drawn(rng, 0.2) else {}
    model |= {"dropout": 0.2} if is_drawn(rng, 0.1) else {}
    return replace(case, model=model)


def draw_encoder_decoder(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw the options of T5's kind."""
    model: dict[str, Any] = {
        "vocab": 2 * unit,
        "seq": 2 * unit,
        "embed": 2 * unit,
        "num_heads": unit,
        "head_dim": 2,
    }
    model |= {
        "num_encoder_layers": rng.choice((1, 1, 2)),
        "num_decoder_layers": 1,
        "mlp": 2 * unit,
    }
    model |= {"positions": rng.choice(("learned", "rotary", "relative")), "tied": rng.choice((True, False))}
    model |= {"norm": "rmsnorm", "bias": False} if is_drawn(rng, 0.4) else {}
    if model["positions"] == "relative":
        model |= {"relative_buckets": 8, "relative_distance": 16}
    model |= {"loss_chunk": 5} if is_drawn(rng, 0.2) else {}
    return replace(case, model=model)


def draw_vit(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw the options of a vision transformer."""
    model: dict[str, Any] = {"height": 8, "width": 8, "classes": 4 * unit, "patch": 4, "embed": 2 * unit}
    model |= {"num_layers": num_blocks(rng, case), "num_heads": unit, "mlp": 2 * unit}
    model |= {"pooling": rng.choice(("token", "mean"))}
    return replace(case, model=model)


def draw_resnet(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw the options of a ResNet of the CIFAR kind."""
    # its batch norm is of each replica
    replicated = "data" in case.mesh or case.layout.get("zero", 3) < 3
    norm = "group" if replicated else rng.choice(("group", "batch"))
    model: dict[str, Any] = {"depth": 11 if case.mesh.get("pipeline", 1) * case.virtual < 4 else 20}
    model |= {
        "filters": unit,
        "height": 8,
        "width": 8,
        "classes": unit,
        "norm": norm,
    }
    return replace(case, model=model)


def draw_imagenet(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw the options of a ResNet of the ImageNet kind."""
    model = {"depth": 18, "filters": unit, "height": 32, "width": 32, "classes": unit, "norm": "group"}
    return replace(case, model={**model, "num_groups": 4})


def draw_vgg(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw the options of a VGG."""
    return replace(case, model={"depth": 16, "filters": unit, "classes": unit, "hidden": 2 * unit})


def draw_mlp(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw the options of a residual classifier."""
    model = {"features": unit, "mlp": 2 * unit, "num_layers": num_blocks(rng, case), "classes": unit}
    return replace(case, model=model)


def draw_stack(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw plain layers, of images, sequences, tokens or vectors."""
    width = rng.choice((unit, 2 * unit)) if unit < 12 else unit
    shape = rng.choice(((4, 4, width), (6, 6, 3), (8, 8, width), (8, width), (12, width), (9, 3), (width,)))
    model: dict[str, Any] = {"shape": tuple(map(str, shape))}
    if len(shape) == 2 and is_drawn(rng, 0.4):
        model["tokens"] = 2 * unit
    layers = [draw_layer(rng, shape, unit) for _ in range(rng.randint(1, 5))]
    if is_drawn(rng, 0.3):
        layers = ["save", *layers, "add"]
    model |= {"layers": tuple(layers), "head": rng.choice(("mean", "each"))}
    names = rng.choice(("none", "mlp", "mlp", "back", "turns", "axes"))
    layout = dict(case.layout)
    if names == "none":
        layout["unnamed"] = rng.choice(("replicate", "shard"))
    return replace(case, model=model, names=names, layout=layout)


def draw_layer(rng: random.Random, shape: tuple[int, ...], unit: int) -> str:
    """Draw the word of a layer; half of them are convolutions where there are places."""
    features = rng.choice((unit, 2 * unit))
    if len(shape) > 1 and is_drawn(rng, 0.45):
        window = "x".join(str(rng.choice((1, 2, 3, 4))) for _ in shape[:-1])
        word = f"conv.{features}.{window if 'x' in window else f'{window}x{window}'}"
        word += f".s{rng.choice((2, 3))}" if is_drawn(rng, 0.25) else ""
        word += f".d{rng.choice((2, 3))}" if is_drawn(rng, 0.2) else ""
        if is_drawn(rng, 0.15):
            return word.replace("conv", "convt")
        word += f".g{rng.choice((0, 2, 4, unit))}" if is_drawn(rng, 0.4) else ""
        return word + rng.choice(("", "", ".VALID", ".CIRCULAR"))
    return rng.choice(
        (
            f"dense.{features}", f"dense.{features}", "silu", "gelu", "tanh", "layernorm", "rmsnorm",
            "groupnorm", "batchnorm", "attention.4", "scan.l3", f"lstm.{unit}", f"gru.{unit}", f"rnn.{unit}",
            "experts.4", "pool", "maxpool", "resize", "softmax", "sort", "topk", "cumsum", "flip", "roll",
            "gather", "split", "gram", "flatten", "dropout", "fft",
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[random.Random, Case, int], Case]] = {
    "stack": draw_stack,
    "decoder": draw_decoder,
    "experts": draw_decoder,
    "linen": draw_decoder,
    "tiny": draw_tiny,
    "encoder": draw_encoder,
    "t5": draw_encoder_decoder,
    "vit": draw_vit,
    "resnet": draw_resnet,
    "imagenet": draw_imagenet,
    "vgg": draw_vgg,
    "mlp": draw_mlp,
}
"""Kind of model -> draws its options."""
