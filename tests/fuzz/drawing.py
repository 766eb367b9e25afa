"""Draw random cases: the same seed and number draw the same case.

Next: `model_drawing.py`.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from math import lcm, prod

from case import Case
from model_drawing import MODELS, is_drawn

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


def draw_strategy(rng: random.Random, case: Case, options: bool) -> Case:
    """Draw the options of the layout and of the strategy."""
    mesh, layout = case.mesh, {}
    often = 0.6 if options else 0.25
    if is_drawn(rng, often):
        layout["zero"] = rng.choice((1, 2))
    if (
        "tensor" in mesh
        and case.kind in ("decoder", "experts", "linen", "encoder", "t5")
        and is_drawn(rng, often)
    ):
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
    elif is_drawn(rng, 0.1) and "pipeline" not in case.mesh:
        first = rng.randint(0, rows)
        case = replace(case, shares=(first, rows - first))
    return replace(case, rows=rows, samples=samples, weights=weights, packed=packed)
