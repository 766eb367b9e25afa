"""The nearest batch, or number of devices, with which something runs. Asked when every layout is refused."""

from collections.abc import Iterator

from shardtrain.data.row_split import RowSplit
from shardtrain.plan.prediction import Choice
from shardtrain.plan.space import Space, choices_of_layout, layouts
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import MOST_DEVICES, axis_sizes
from shardtrain.sharding.layout import Layout

TRIED = 64
"""Numbers of devices that are tried below the one that was asked for, and as many above."""


def nearest_text(subject: Subject, num_devices: int, space: Space) -> str:
    """Say which batch, or which number of devices, would run; arguments are those of `nearest_batch`."""
    batch = nearest_batch(subject, num_devices, space)
    devices = nearest_devices(subject, num_devices, space)
    ways = [] if batch is None else [f"a batch of {batch} rows"]
    ways += [] if devices is None else [f"{devices} device{'s' * (devices > 1)}"]
    if not ways:
        return (
            "no batch helps, and no number of devices near; fix fewer sizes (--fixed), or give rules for dims"
        )
    return f"nearest that runs: {' or '.join(ways)}"


def nearest_batch(subject: Subject, num_devices: int, space: Space) -> int | None:
    """Return the number of rows nearest to the batch that some layout of these devices takes.

    Args:
      subject: the model, its loss, optimizer and batch.
      num_devices: how many.
      space: what may be chosen.

    Returns:
      The nearest, the larger one of two as near; None if no batch helps.
    """
    found = set()
    for layout in _placed(subject, num_devices, space):
        sizes = axis_sizes(layout.mesh, num_devices)
        for accumulate in space.accumulates or (1,):
            multiple = RowSplit.of(sizes, layout.batch_axes, accumulate).multiple
            below = subject.batch_rows - subject.batch_rows % multiple
            found |= {below, below + multiple} - {0}
    return min(found, key=lambda rows: (abs(rows - subject.batch_rows), -rows), default=None)


def nearest_devices(subject: Subject, num_devices: int, space: Space) -> int | None:
    """Return the number of devices nearest to the given one on which this batch runs; None: none was found.

    Args:
      subject: the model, its loss, optimizer and batch.
      num_devices: how many were asked for.
      space: what may be chosen.
    """
    for distance in range(1, TRIED + 1):
        for number in (num_devices - distance, num_devices + distance):
            if 1 <= number <= MOST_DEVICES and _runs(subject, number, space):
                return number
    return None


def _runs(subject: Subject, num_devices: int, space: Space) -> bool:
    return any(
        next(choices_of_layout(subject, layout, axis_sizes(layout.mesh, num_devices), space), None)
        for layout in _placed(subject, num_devices, space)
    )


def _placed(subject: Subject, num_devices: int, space: Space) -> Iterator[Layout]:
    """Return the layouts of so many devices that fit the model."""
    for layout in layouts(num_devices, space.layout):
        try:
            subject.state(Choice(layout=layout), num_devices)
        except ValueError:
            continue
        yield layout
