"""Format the partition of a run's layers for `shardtrain plan --layers`."""

import math
import re

from shardtrain.plan.layers.assignment import LayerPartition
from shardtrain.plan.layers.compare import LayerPlan, NoMesh, find_mesh
from shardtrain.plan.layers.layer_graph import Layer
from shardtrain.plan.layers.partition import WHOLE, Split
from shardtrain.plan.layers.replicated_costs import ReplicatedCosts
from shardtrain.plan.layers.replicated_stages import best_replicated_cut
from shardtrain.report.quantities import bytes_text, seconds_text
from shardtrain.report.tables import table_text

LEGEND = (
    "I splits a layer by the batch, II by input features, III by output features; whole: both halves compute"
    " it; a number is the part of the first half, where it is not 0.5; where halves differ, the levels of the"
    " first are shown\n"
)
MODEL = (
    "these times are flops over rates and exchanged bytes over links, one after the other; the table of"
    " layouts also counts memory, small kernels, the optimizer and recomputation: compare inside a table\n"
)
BASELINE = "data parallel"
PIPELINE = "pipeline of stages with several devices"


def layers_text(plan: LayerPlan) -> str:
    """Format the best partition of each layer, the times of all ways, and the mesh that runs the best."""
    best = plan.ways[plan.best]
    levels = [
        f"{level.group.devices} ({' | '.join(_half_text(half) for half in level.halves)})"
        for level in best.levels
    ]
    title = f"layers: {len(plan.layers)}; partition of {plan.best}, the fastest way"
    text = table_text(("layers", "number", "kind", "weights", "partition"), _rows(plan), title=title)
    if levels:
        text += f"devices, from the outermost level: {', '.join(levels)}\n" + LEGEND
    return text + _ways_text(plan) + MODEL + _mesh_text(plan)


def stages_text(costs: ReplicatedCosts) -> str:
    """Format the best pipeline whose stages have several devices each.

    Raises:
      ValueError: no cut fits the memory, or there are too many blocks and devices.
    """
    cut = best_replicated_cut(costs)
    numbers = costs.pipeline.numbers(cut.devices)
    blocks, devices = (",".join(map(str, each)) for each in (cut.counts, numbers))
    text = (
        f"{PIPELINE}: blocks {blocks} on {devices} devices in this order, step"
        f" {seconds_text(cut.step_seconds)} of {costs.num_microbatches} microbatches; 1f1b simulated, then"
        " gradients added up in each stage, without latency\n"
    )
    if len(cut.counts) == 1:
        return text + "one stage with all devices: no pipeline is faster\n"
    mixed = costs.pipeline.list_mixed_stages(cut.devices)
    if mixed:
        return text + f"no islands run it: stage {mixed[0]} has unequal devices\n"
    return (
        f"{text}runs as islands of {devices} devices: --across pipeline --stages {blocks} --accumulate"
        f" {costs.num_microbatches}\n"
    )


def _half_text(half: LayerPartition) -> str:
    return f"{half.group.devices} {half.group.name}"


def _rows(plan: LayerPlan) -> list[tuple[object, ...]]:
    levels = [level.chosen for level in plan.ways[plan.best].levels]
    found = [
        (layer, " ".join(split_text(chosen[i]) for chosen in levels))
        for i, layer in enumerate(plan.layers)
        if layer.has_weights
    ]
    # equal layers of several blocks are one row
    alike: dict[tuple[str, str, str], list[Layer]] = {}
    for layer, partition in found:
        alike.setdefault((re.sub(r"\d+", "*", layer.name), layer.kind, partition), []).append(layer)
    return [
        (
            _names(members),
            len(members),
            kind,
            bytes_text(sum(each.weight_bytes for each in members)),
            partition,
        )
        for (_, kind, partition), members in alike.items()
    ]


def _names(members: list[Layer]) -> str:
    first, last = members[0].name, members[-1].name
    return first if len(members) == 1 else f"{first} to {last}"


def split_text(split: Split) -> str:
    """Format a split.

    >>> split_text(Split("II", 0.5)), split_text(Split("I", 0.3))
    ('II', 'I:0.300')
    """
    return (
        split.way
        if split.way == WHOLE or math.isclose(split.ratio, 0.5, abs_tol=1e-6)
        else f"{split.way}:{split.ratio:.3f}"
    )


def _ways_text(plan: LayerPlan) -> str:
    whole = plan.ways[BASELINE].seconds
    rows = [
        (
            name,
            seconds_text(found.seconds),
            seconds_text(found.compute_seconds),
            seconds_text(found.exchange_seconds),
            f"{whole / found.seconds:.2f}" if found.seconds else "1.00",
        )
        for name, found in sorted(plan.ways.items(), key=lambda each: each[1].seconds)
    ]
    return table_text(("way", "step", "compute", "exchange", f"speed over {BASELINE}"), rows)


def _mesh_text(plan: LayerPlan) -> str:
    try:
        found = find_mesh(plan.layers, plan.ways[plan.best])
    except NoMesh as problem:
        return f"no mesh runs it: {problem}\n"
    mesh = ",".join(
        f"{axis}={size}" for axis, size in (("data", found.data), ("tensor", found.tensor)) if size > 1
    )
    rules = "" if found.by_default else f", with rules that shard {', '.join(sorted(found.dims))} over tensor"
    return f"runs as --mesh {mesh or 'data=1'}{rules}\n"
