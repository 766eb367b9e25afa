"""Format the communication and memory of a step for `inspect`.

They come from `plan.traffic` (theory) or `plan.compile` (a compiled program).
"""

from collections import defaultdict
from collections.abc import Sequence

from shardtrain.combine.sync_trigger import ALWAYS
from shardtrain.combine.synchronisation import Outer, Synchronisation
from shardtrain.plan.compile import Figures
from shardtrain.plan.hlo.collectives import Collective, sum_by_axis
from shardtrain.plan.island_exchange import MergeBytes
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


SENDERS = {
    "islands": "each of {} islands sends",
    "pipelines": "the stages of each of {} pipelines send together",
    "mesh": "each device sends to the others of {} replicas over data",
}
"""Kind of replicas -> the beginning of the sentence about their messages."""


def synchronisation_text(
    synchronisation: Synchronisation, sent: MergeBytes, replicas: str = "islands"
) -> str:
    """Format when replicas are synchronised, and the bytes that each sends, after codecs.

    Args:
      synchronisation: how replicas are synchronised.
      sent: bytes of each merge.
      replicas: kind of replicas: "islands", "pipelines" of islands, or "mesh" for the axis data of a mesh.

    >>> way = Synchronisation(
    ...     on="deltas", every=4, fragments=2, overlap=2, when="drift:0.01", synchronous_steps=9
    ... )
    >>> text = synchronisation_text(way, MergeBytes(3, (1600, 1136), every=4, synchronous=2736))
    >>> print(text.replace(", each", "\\n  each").replace(", comb", "\\n  comb").replace(": a", ":\\n  a"))
    replicas: gradients by mean in the first 9 steps, then deltas by mean
      each of 2 fragments every 4 steps at most, when drift:0.01
      combined 2 steps later; outer optimizer: none
    each of 3 islands sends 1.6 KiB a merge at most, and at most 684 B a step on average:
      a merge is skipped where no replica has moved so far; in the first 9 steps 2.7 KiB each
    >>> print(synchronisation_text(Synchronisation(by="int8+mean"), MergeBytes(4, (512,)), "mesh"))
    replicas: gradients by int8+mean in every step
    each device sends to the others of 4 replicas over data 512 B a step
    """
    who = SENDERS[replicas].format(sent.num_replicas)
    average = f"{bytes_text(round(sent.per_step))} a step on average"
    if synchronisation.distance is not None:
        every, ahead = synchronisation.every, synchronisation.distance
        return (
            f"islands: waves of {every} steps, and an island may be {ahead} waves ahead; it pushes its"
            " changes to shards of the parameters, one on each island, and pulls the shards\n"
            f"{who} {bytes_text(sent.most)} of float32 a wave, its pushes and the shard that others pull,"
            f" {average}; at most {ahead * every + every - 1} steps of another island are missing in a step"
        )
    by = synchronisation.by if isinstance(synchronisation.by, str) else "a user's combiner"
    if not synchronisation.on_deltas:
        return f"replicas: gradients by {by} in every step\n{who} {bytes_text(sent.most)} a step"
    kind = "" if type(synchronisation) is Synchronisation else f"{type(synchronisation).__name__}, "
    text = f"replicas: {kind}{_merges_text(synchronisation, by, synchronisation.fragments)}\n"
    text += f"{who} {bytes_text(sent.most)} a merge at most, "
    if synchronisation.when == ALWAYS:
        text += average
    else:
        text += f"and at most {average}: a merge is skipped where no replica has moved so far"
    if num_first := synchronisation.synchronous_steps:
        text += f"; in the first {num_first} steps {bytes_text(sent.synchronous)} each"
    return text


def _merges_text(synchronisation: Synchronisation, by: str, num_fragments: int) -> str:
    """Format when deltas are merged, and the outer optimizer."""
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
    each = f"each of {num_fragments} fragments " if num_fragments > 1 else ""
    when = "" if synchronisation.when == ALWAYS else f" at most, when {synchronisation.when}"
    overlap = synchronisation.overlap
    later = f", combined {overlap} step{'s' * (overlap > 1)} later" if overlap else ""
    num_first = synchronisation.synchronous_steps
    first = f"gradients by mean in the first {num_first} steps, then " if num_first else ""
    return (
        f"{first}deltas by {by}, {each}every {synchronisation.every} steps{when}{later};"
        f" outer optimizer: {outer}"
    )


def figures_text(found: Figures, kind: str) -> str:
    """Format memory and collectives of a compiled step.

    Args:
      found: the figures of the step.
      kind: the kind of devices for which it was compiled.
    """
    total_bytes = found.argument_bytes + found.temp_bytes
    return (
        f"compiled for {kind}: {bytes_text(total_bytes)} per device"
        f" (state and batch {bytes_text(found.argument_bytes)}, temporary {bytes_text(found.temp_bytes)})\n"
        f"{_collectives_text(found.collectives)}\n"
    )


def memory_text(given: Figures, others: Sequence[tuple[str, Figures | str]]) -> str:
    """Format the memory of a compiled step, and of the same step with one more option.

    Args:
      given: the figures of the step without another option.
      others: an option and the figures with it, or why it was refused.
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
    """Format collectives as a table, the most expensive first, those in loops in separate rows."""
    if not found:
        return "nothing moves between devices"
    sums = [
        (wire_bytes, kind, "+".join(over), where, count)
        for where, in_loop in (("in a loop", True), ("once", False))
        for (kind, over), (count, wire_bytes) in sum_by_axis(c for c in found if c.in_loop == in_loop).items()
    ]
    rows = [(*names, f"{sent / 1e6:.3f}") for sent, *names in sorted(sums, key=lambda row: -row[0])]
    total = sum(collective.wire_bytes_per_device for collective in found)
    rows.append(("total", "", "", sum(collective.count for collective in found), f"{total / 1e6:.3f}"))
    return table_text(("collective", "axes", "where", "runs", "MB sent per device"), rows).rstrip()
