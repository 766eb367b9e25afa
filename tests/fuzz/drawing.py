"""Draw random cases: the same seed and number draw the same case.

Next: `fuzz.py`.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import lcm, prod
from typing import Any

from case import Case

MOST_DEVICES = 12
AXES: dict[str, tuple[str, ...]] = {
    "stack": ("data", "fsdp", "tensor", "data", "fsdp", "tensor", "context"),
    "decoder": ("data", "fsdp", "tensor", "context", "pipeline"),
    "experts": ("data", "fsdp", "tensor", "expert", "expert", "context", "pipeline"),
    "linen": ("data", "fsdp", "tensor", "context"),
    "tiny": ("data", "fsdp", "tensor", "context", "pipeline"),
    "encoder": ("data", "fsdp", "tensor", "context", "pipeline"),
    "t5": ("data", "fsdp", "tensor", "context"),
    "vit": ("data", "fsdp", "tensor", "pipeline"),
    "resnet": ("data", "fsdp", "tensor"),
    "imagenet": ("data", "fsdp", "tensor"),
    "vgg": ("data", "fsdp", "tensor"),
    "mlp": ("data", "fsdp", "tensor"),
}
"""Kind of model -> the axes that its meshes have; what stands twice is drawn more often."""
KINDS = {
    "stack": 16, "decoder": 8, "experts": 4, "linen": 2, "tiny": 2, "encoder": 3, "t5": 3, "vit": 2,
    "resnet": 2, "imagenet": 1, "vgg": 1, "mlp": 1,
}  # fmt: skip
"""How often each kind of model is drawn."""
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zb_v", 2))
MIXTURES = (
    "num={n}|top=2",
    "num={n}|top=2|z=0.001",
    "num={n}|top=2|capacity=1.0|balance=0.1",
    "num={n}|top=1|shared=1|shared_gate=sigmoid",
    "num={n}|top=2|scores=sigmoid|balance=0.1|scale=2.0",
)
OVER_BATCH = "num={n}|top=2|over=batch|balance=0.5|bias=0.01"


def draw_case(seed: int, number: int, kinds: tuple[str, ...] = (), options: bool = False) -> Case:
    """Draw a case.

    Args:
      seed: of all cases.
      number: of this one.
      kinds: of the models to draw; () for all.
      options: whether two options at least are drawn that most layouts leave at their defaults.
    """
    rng = random.Random(f"{seed}-{number}")
    chosen = kinds or tuple(KINDS)
    kind = rng.choices(chosen, [KINDS[each] for each in chosen])[0]
    mesh = draw_mesh(rng, kind)
    case = Case(kind=kind, mesh=mesh, seed=rng.randrange(1000))
    case = draw_strategy(rng, case, options)
    case = MODELS[kind](rng, case, unit_of(mesh))
    return draw_rows(rng, case)


def draw_mesh(rng: random.Random, kind: str) -> dict[str, int]:
    """Draw one to four axes, on at most 12 devices."""
    wanted, mesh = rng.choices((1, 2, 3, 4), (2, 5, 6, 1))[0], {}
    while len(mesh) < wanted:
        axis = rng.choice(AXES[kind])
        fitting = [n for n in (2, 2, 2, 3, 4, 4, 6, 8, 12) if prod(mesh.values()) * n <= MOST_DEVICES]
        if not fitting:
            break
        # small axes first, or there is no place for others
        size = rng.choice(fitting[:3] if wanted > 2 else fitting)
        mesh.setdefault(axis, size)
    return mesh


def unit_of(mesh: Mapping[str, int]) -> int:
    """Return the number of which all sizes of a model are multiples: what all axes divide."""
    return lcm(4, *mesh.values())


def is_drawn(rng: random.Random, share: float) -> bool:
    """Whether something is drawn that this share of cases has."""
    return rng.random() < share


def draw_strategy(rng: random.Random, case: Case, options: bool) -> Case:
    """Draw the options of the layout and of the strategy."""
    mesh, layout = case.mesh, {}
    often = 0.6 if options else 0.25
    if is_drawn(rng, often):
        layout["zero"] = rng.choice((1, 2))
    if "tensor" in mesh and case.kind in ("decoder", "experts", "linen", "encoder", "t5") and is_drawn(rng, often):
        layout["sequence_sharded"] = True
        if is_drawn(rng, 0.5):
            layout["collective_matmul"] = True
    if "context" in mesh:
        layout["context_attention"] = rng.choice(("ring", "all-gather", "all-to-all"))
    case = replace(case, layout=layout)
    if is_drawn(rng, often) and case.kind in ("decoder", "experts", "linen", "tiny", "encoder", "t5", "vit"):
        case = replace(case, remat=rng.choice(("none", "weights", "dots", "outputs", "full")))
    if "pipeline" in mesh:
        schedule, virtual = rng.choice(SCHEDULES)
        return replace(
            case,
            schedule=schedule,
            virtual=virtual,
            accumulate=mesh["pipeline"] * rng.choice((1, 2)) if virtual > 1 else rng.choice((1, 2, 3, 4)),
        )
    return replace(case, accumulate=rng.choice((1, 1, 2, 3, 4)))


def draw_rows(rng: random.Random, case: Case) -> Case:
    """Draw how many rows a batch has, what they weigh, and how many are padding."""
    replicas = prod(case.mesh.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    each = replicas * case.accumulate
    rows = each * rng.choice((1, 1, 2, 3) if each < 16 else (1,))
    if is_drawn(rng, 0.05):
        rows += rng.randint(1, 3)
    weights = rng.choice(("none", "none", "rows", "tokens"))
    if weights == "tokens" and case.kind in ("vit", "resnet", "imagenet", "vgg", "mlp"):
        weights = "rows"
    samples = max(1, rows - rng.randint(1, max(1, rows // 2))) if is_drawn(rng, 0.3) else 0
    packed = case.kind in ("decoder", "experts") and is_drawn(rng, 0.35)
    has_norm = case.model.get("norm") == "batch" or "batchnorm" in str(case.model.get("layers", ""))
    over_batch = "over=batch" in str(case.model.get("experts", ""))
    if has_norm or over_batch:
        # statistics are those of a microbatch over all replicas
        case, rows = replace(case, accumulate=1), replicas * rng.choice((2, 3))
        samples = 0
    return replace(case, rows=rows, samples=samples, weights=weights, packed=packed)


def num_blocks(rng: random.Random, case: Case) -> int:
    """Draw a number of blocks that the stages of a case can share."""
    parts = case.mesh.get("pipeline", 1) * case.virtual
    return parts + rng.choice((0, 0, 1)) if parts > 1 else rng.choice((1, 2, 3))


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
    model = {"vocab": 2 * unit, "seq": 2 * unit, "embed": unit, "mlp": 2 * unit, "tied": rng.choice((True, False))}
    if is_drawn(rng, 0.3):
        model["dropout"] = 0.3
    return replace(case, model={**model, "num_layers": num_blocks(rng, case)})


def draw_encoder(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw the options of an encoder."""
    model: dict[str, Any] = {"vocab": 2 * unit, "seq": 2 * unit, "embed": 2 * unit, "num_heads": unit, "mlp": 2 * unit}
    model |= {"num_layers": num_blocks(rng, case), "tied": rng.choice((True, False))}
    model |= {"loss_chunk": 5} if is_drawn(rng, 0.2) else {}
    model |= {"dropout": 0.2} if is_drawn(rng, 0.1) else {}
    return replace(case, model=model)


def draw_encoder_decoder(rng: random.Random, case: Case, unit: int) -> Case:
    """Draw the options of T5's kind."""
    model: dict[str, Any] = {"vocab": 2 * unit, "seq": 2 * unit, "embed": 2 * unit, "num_heads": unit, "head_dim": 2}
    model |= {"num_encoder_layers": rng.choice((1, 2)), "num_decoder_layers": rng.choice((1, 2)), "mlp": 2 * unit}
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
    model: dict[str, Any] = {"depth": 11 if case.mesh.get("pipeline", 1) * case.virtual < 4 else 20}
    model |= {"filters": unit, "height": 8, "width": 8, "classes": unit, "norm": rng.choice(("group", "batch"))}
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
            f"dense.{features}", f"dense.{features}", "silu", "gelu", "tanh", "layernorm", "rmsnorm", "groupnorm",
            "batchnorm", "attention.4", "scan.l3", f"lstm.{unit}", f"gru.{unit}", f"rnn.{unit}", "experts.4",
            "pool", "maxpool", "resize", "softmax", "sort", "topk", "cumsum", "flip", "roll", "gather", "split",
            "gram", "flatten", "dropout", "fft",
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
