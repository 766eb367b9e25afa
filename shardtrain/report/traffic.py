"""Communication and memory of a step, as the text that `inspect` prints.

From `plan.traffic` (theory) or `plan.compile` (a compiled program).
"""

from collections import defaultdict

from shardtrain.plan.compile import Figures
from shardtrain.plan.hlo.collectives import Collective, table
from shardtrain.plan.traffic import Traffic
from shardtrain.report.quantities import bytes_text
from shardtrain.report.tables import table_text


def traffic_text(traffic: Traffic) -> str:
    """Format the bytes of parameters and gradients that a device sends per step, by collective and mesh axis.

    Args:
      traffic: from `plan.traffic.parameter_traffic`.

    Returns:
      A table; one line if nothing is sent.
    """
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for key, num_bytes in traffic.items():
        sums[key.kind, "+".join(key.axes)] += num_bytes
    if not sums:
        return "communication: no parameters or gradients between devices\n"
    rows = [(kind, over, bytes_text(round(num))) for (kind, over), num in sums.items()]
    rows.append(("total", "", bytes_text(round(sum(sums.values())))))
    title = "communication of parameters and gradients, by theory"
    return table_text(("collective", "over axes", "sent per device and step"), rows, title=title)


def figures_text(found: Figures, kind: str) -> str:
    """Format memory and collectives of the compiled step, by its compiler.

    Args:
      found: the figures of the step.
      kind: the kind of the devices that it is compiled for.
    """
    total_bytes = found.argument_bytes + found.temp_bytes
    return (
        f"compiled for {kind}: {bytes_text(total_bytes)} per device"
        f" (state and batch {bytes_text(found.argument_bytes)}, temporary {bytes_text(found.temp_bytes)})\n"
        f"{_collectives_text(found.collectives)}\n"
    )


def _collectives_text(found: tuple[Collective, ...]) -> str:
    return table(found) if found else "nothing moves between devices"
