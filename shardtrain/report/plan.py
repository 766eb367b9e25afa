"""Format a plan for `shardtrain plan`: ranked layouts, every term of the best, and refused layouts."""

import math
from collections.abc import Mapping, Sequence

from shardtrain.islands.cluster import add_up_devices
from shardtrain.plan.islands import ClusterPlan, KindPlan
from shardtrain.plan.search import RankedChoice
from shardtrain.plan.space import mesh_text
from shardtrain.report.plan_islands import early_text, format_join, synchronisations_text
from shardtrain.report.quantities import bytes_text, count_text, seconds_text
from shardtrain.report.tables import table_text

COLUMNS = (
    "",
    "layout",
    "microbatches",
    "remat",
    "memory",
    "free",
    "step",
    "MFU",
    "compute",
    "bubble",
    "collectives",
    "update",
)

MEMORY_TERMS = {
    "parameters": "as stored, by the specs of the layout",
    "optimizer": "the optimizer's state, by the specs",
    "gradients": "sums over microbatches, float32",
    "activations": "the most that is alive at once in loss and gradient, with gathered weights; or, on"
    " simulated devices, a copy of the optimizer's state if that is larger",
    "pipeline": "inputs and cotangents of parts, for the microbatches that the schedule has in flight",
    "batch": "rows of this device",
    "local": "changes of an island since the last merge, and the outer optimizer's state, float32",
}
SECONDS_TERMS = {
    "compute": "microbatches x sum over kernels: time of a kernel + max(flops / rate, bytes / memory rate)",
    "bubble": "the schedule simulated with these times, less the work of a stage; collectives of microbatches"
    " make it longer in proportion",
    "update": "(3 x parameters + 2 x optimizer state) / memory rate",
}
COLLECTIVE_TERM = "per message latency + bytes sent in a ring / rate of the slowest link over the axis"
MOST_REFUSED = 5


def plan_text(plan: ClusterPlan, most: int) -> str:
    """Format the best choices for each kind of islands, and the resulting step.

    Args:
      plan: the plan.
      most: number of choices to show for each kind.
    """
    parts = [_kind_text(each, len(plan.shares) > 1, most) for each in plan.kinds]
    if not plan.fits:
        return "".join(parts)
    subject = plan.kinds[0].subject
    rows_per_second = subject.batch_rows / plan.seconds
    name = "step as replicas" if len(plan.shares) > 1 else "step"
    line = f"{name}: {seconds_text(plan.seconds)}, {count_text(rows_per_second)} examples/s"
    units_per_second = rows_per_second * (subject.row_units or 0.0) * (subject.unit != "examples")
    if units_per_second:
        line += f", {count_text(units_per_second)} {subject.unit}/s"
    if len(plan.shares) > 1:
        line += f"; rows of islands {','.join(map(str, plan.shares))}; islands joined in {format_join(plan)}"
    if (hour := add_up_devices([each.kind for each in plan.kinds], "price_per_hour")) is not None:
        price = hour / 3600
        line += f"; {hour:.3g} an hour, {price / rows_per_second * 1e6:.3g} for 1e6 examples"
        if units_per_second:
            line += f", {price / units_per_second * 1e9:.3g} for 1e9 {subject.unit}"
    return "".join(parts) + line + "\n" + synchronisations_text(plan) + early_text(plan)


def _kind_text(each: KindPlan, several: bool, most: int) -> str:
    devices = each.kind.devices or 1
    title = f"{each.kind.kind}: {devices} device{'s' * (devices > 1)}"
    if not each.rows:
        return f"{title} get{'s' * (devices == 1)} no rows: leave it out, or use a larger batch\n"
    title += f", {each.rows} rows an island" if several else ""
    title += f"; {each.plan.num_choices} ways compared"
    memory = each.machine.rates.memory_bytes
    title += "" if math.isinf(memory) else f"; {bytes_text(memory)} of a device can be used"
    if devices > 1 and math.isinf(each.machine.device_link.bytes_per_second):
        title += "; no link is given, so what devices send takes no time"
    ranked = each.plan.ranked[:most]
    if not ranked:
        return f"{title}\nnothing runs\n{_format_refused(each.plan.refused)}{each.plan.nearest}\n"
    peak = devices * (each.machine.peak_flops_per_second or math.inf)
    # steps in a second of all devices at their peak
    flops = each.rows * each.subject.row_flops
    steps_at_peak = peak / flops if flops else math.inf
    rows = [_row(i, one, memory, steps_at_peak) for i, one in enumerate(ranked)]
    text = table_text(COLUMNS, rows, title=title)
    if not any(one.fits for one in ranked):
        over = min(one.prediction.memory.total for one in ranked)
        text += (
            f"nothing fits: the smallest needs {bytes_text(over)} of {bytes_text(memory)},"
            f" {bytes_text(over - memory)} too much; use more devices, a smaller batch or a smaller model\n"
        )
    return text + _format_named(each) + _format_refused(each.plan.refused)


def _format_named(each: KindPlan) -> str:
    """Compare the best choice with the named layouts."""
    best, parts = each.plan.ranked[0], []
    for name, found in each.named.items():
        if found is None:
            parts.append(f"{name} cannot run")
            continue
        text, total = f"{name} ({mesh_text(found.choice.layout)})", found.prediction.seconds.total
        if not found.fits:
            parts.append(f"{text} needs {bytes_text(found.prediction.memory.total)}, too large")
        else:
            ratio = total / best.prediction.seconds.total
            parts.append(f"{text} {seconds_text(total)}, {ratio:.2f} times the best")
    return f"compared with: {'; '.join(parts)}\n" if parts and best.fits else ""


def _row(number: int, one: RankedChoice, memory_bytes: float, steps_at_peak: float) -> tuple[str, ...]:
    seconds, needed = one.prediction.seconds, one.prediction.memory.total
    layout = mesh_text(one.choice.layout)
    if one.choice.layout.mesh.get("pipeline", 1) > 1:
        layout += f" --schedule {one.choice.schedule}"
    return (
        f"{number + 1}" if one.fits else "too large",
        layout,
        str(one.choice.accumulate),
        one.choice.remat or "as it is",
        bytes_text(needed),
        _free(needed, memory_bytes),
        seconds_text(seconds.total),
        _share(1 / steps_at_peak, seconds.total),
        _share(seconds.compute, seconds.total),
        _share(seconds.bubble, seconds.total),
        ", ".join(
            f"{'+'.join(over)} {_share(value, seconds.total)}" for over, value in seconds.collectives.items()
        )
        or "none",
        _share(seconds.update, seconds.total),
    )


def _free(needed: float, memory_bytes: float) -> str:
    """Format the free memory, or the excess.

    >>> _free(2**30, 3 * 2**30), _free(2**30, 2**29), _free(1.0, math.inf)
    ('2.0 GiB', '512.0 MiB over', 'any')
    """
    if math.isinf(memory_bytes):
        return "any"
    free = memory_bytes - needed
    return bytes_text(free) if free >= 0 else f"{bytes_text(-free)} over"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"


def _format_refused(refused: Mapping[str, str]) -> str:
    """Format the reasons why layouts were refused, each once, the most frequent first."""
    if not refused:
        return ""
    meshes: dict[str, list[str]] = {}
    for mesh, reason in refused.items():
        meshes.setdefault(_first_reason(reason), []).append(mesh)
    reasons = sorted(meshes, key=lambda reason: -len(meshes[reason]))
    lines = [f"  {_such_as(meshes[reason])}: {reason}" for reason in reasons[:MOST_REFUSED]]
    rest = sum(len(meshes[reason]) for reason in reasons[MOST_REFUSED:])
    more = f"  and {rest} more\n" if rest else ""
    return f"refused: {len(refused)} layouts\n" + "\n".join(lines) + "\n" + more


def _such_as(meshes: Sequence[str]) -> str:
    return meshes[0] if len(meshes) == 1 else f"{meshes[0]} and {len(meshes) - 1} like it"


def _first_reason(text: str) -> str:
    """Return the first problem of an error that lists several."""
    lines: Sequence[str] = [line.strip("- ").strip() for line in text.splitlines()]
    return lines[1] if len(lines) > 1 and lines[0].endswith(":") else lines[0]


def explain_plan(one: RankedChoice) -> str:
    """Format every term of a prediction with its formula."""
    memory = [
        (name, bytes_text(getattr(one.prediction.memory, name)), formula)
        for name, formula in MEMORY_TERMS.items()
    ]
    memory.append(("total", bytes_text(one.prediction.memory.total), "the sum"))
    seconds = one.prediction.seconds
    times = [(name, seconds_text(getattr(seconds, name)), formula) for name, formula in SECONDS_TERMS.items()]
    times += [
        (f"collectives over {'+'.join(over)}", seconds_text(value), COLLECTIVE_TERM)
        for over, value in seconds.collectives.items()
    ]
    times.append(("total", seconds_text(seconds.total), "the sum: nothing overlaps"))
    header = ("of a device", "", "from")
    return table_text(header, memory, title="memory") + table_text(header, times, title="time of a step")
