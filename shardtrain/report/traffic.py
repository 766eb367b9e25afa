"""Communication and memory of a step, as the text that `inspect` prints.

From `plan.traffic` (theory) or `plan.compile` (a compiled program).
"""

from collections import defaultdict
from collections.abc import Sequence

from shardtrain.combine.meeting import ALWAYS
from shardtrain.combine.synchronisation import Outer, Synchronisation
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


def synchronisation_text(synchronisation: Synchronisation, num_elements: Sequence[int]) -> str:
    """Say when replicas are synchronised, and what each gives to the combiner then.

    Args:
      synchronisation: how replicas are synchronised.
      num_elements: number of parameters of each fragment.

    >>> way = Synchronisation(
    ...     on="deltas", every=4, fragments=2, overlap=2, when="moved:0.01", synchronous_steps=9
    ... )
    >>> text = synchronisation_text(way, [300, 212])
    >>> print(text.replace(", each", "\\n  each").replace(", combined", "\\n  combined"))
    replicas: gradients by mean in the first 9 steps, then deltas by mean
      each of 2 fragments every 4 steps at most, when moved:0.01
      combined 2 steps later; outer optimizer: none
    a replica gives float32 to the combiner: 1.2 KiB a merge at most, 512 B a step on average
    """
    by = synchronisation.by if isinstance(synchronisation.by, str) else "a combiner of one's own"
    whole = sum(num_elements) * 4
    if not synchronisation.on_deltas:
        return f"replicas: gradients by {by} in every step, {bytes_text(whole)} of float32 from each"
    outer = "none"
    if isinstance(synchronisation.outer, Outer):
        sgd = synchronisation.outer
        if sgd != Outer():
            momentum = (
                f", {'Nesterov ' if sgd.nesterov else ''}momentum {sgd.momentum}" if sgd.momentum else ""
            )
            outer = f"SGD with rate {sgd.learning_rate}{momentum}"
    else:
        outer = "given in Python"
    if synchronisation.distance is not None:
        every, ahead = synchronisation.every, synchronisation.distance
        return (
            f"islands: waves of {every} steps, of which one may be {ahead} ahead; it pushes what it changed"
            " to shards of the parameters, one on each island, and pulls these\n"
            f"an island pushes {bytes_text(whole)} of float32 a wave, {bytes_text(whole // every)} a step on"
            f" average; at most {ahead * every + every - 1} steps of another island are missing in a step"
        )
    each = f"each of {len(num_elements)} fragments " if len(num_elements) > 1 else ""
    when = "" if synchronisation.when == ALWAYS else f" at most, when {synchronisation.when}"
    overlap = synchronisation.overlap
    later = f", combined {overlap} step{'s' * (overlap > 1)} later" if overlap else ""
    num_first = synchronisation.synchronous_steps
    first = f"gradients by mean in the first {num_first} steps, then " if num_first else ""
    return (
        f"replicas: {first}deltas by {by}, {each}every {synchronisation.every} steps{when}{later};"
        f" outer optimizer: {outer}\n"
        f"a replica gives float32 to the combiner: {bytes_text(max(num_elements) * 4)} a merge at most,"
        f" {bytes_text(whole // synchronisation.every)} a step on average"
    )


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


def memory_text(given: Figures, others: Sequence[tuple[str, Figures | str]]) -> str:
    """Format the memory of a compiled step, and that of the same step with one option more.

    Args:
      given: of the step as it is.
      others: an option and the figures with it, or why there are none.
    """
    header = ("option", "state and batch", "temporary", "together", "of as given")
    rows = []
    for option, found in (("as given", given), *others):
        if isinstance(found, str):
            rows.append((option, f"refused: {found}", "", "", ""))
            continue
        both = found.argument_bytes + found.temp_bytes
        share = both / (given.argument_bytes + given.temp_bytes)
        columns = (bytes_text(n) for n in (found.argument_bytes, found.temp_bytes, both))
        rows.append((option, *columns, f"{share:.0%}"))
    return "memory per device with one option more, by the compiler\n" + table_text(header, rows)


def _collectives_text(found: tuple[Collective, ...]) -> str:
    return table(found) if found else "nothing moves between devices"
