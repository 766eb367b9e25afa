"""How often a stage runs the segments of a traced program in a step, by its schedule. No jax.

Without a pipeline each microbatch runs all of them once. Next: `step_times.py`.
"""

from collections.abc import Mapping
from functools import cache

from shardtrain import axes
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.table import Table
from shardtrain.plan.cost import Cost, Segment, Sent
from shardtrain.plan.prediction import Choice


@cache
def lockstep_table(schedule: str, stages: int, microbatches: int, chunks: int) -> Table:
    """Return the table that a mesh runs."""
    return make_table(schedule, stages, microbatches, chunks, lockstep=True)


def stage_runs(
    found: Cost, alone: Cost | None, sizes: Mapping[str, int], choice: Choice
) -> list[tuple[float, Segment]]:
    """Return how often each segment is run in a step, by a stage on average.

    Args:
      found: the cost of one microbatch of one chunk.
      alone: of a pipeline, the cost of the loss alone.
      sizes: axis -> size.
      choice: the layout and the rest.
    """
    runs, parts = choice.accumulate * choice.virtual_stages, sizes[axes.PIPELINE] * choice.virtual_stages
    if alone is None or sizes[axes.PIPELINE] == 1:
        return [(runs, each) for each in found.segments]
    _, again, loss, backward, behind = found.segments
    first, forward = alone.segments[:2]
    # the last part has no forward of its own; each kind of backward computes the forward again; what is
    # outside the blocks is run by the first part, or by the last. A lookup is not repeated for its gradient
    return [
        (runs * (parts - 1) / parts, forward),
        (runs * num_backwards(choice), again),
        (runs, backward),
        *((runs / parts, each) for each in (first, loss, behind)),
    ]


def sent_activations(
    found: Cost, alone: Cost | None, sizes: Mapping[str, int], choice: Choice
) -> tuple[Sent, ...]:
    """Return the collectives of activations of a step; the arguments are those of `stage_runs`."""
    return tuple(
        each._replace(num_bytes=times * each.num_bytes, times=times * each.times)
        for times, segment in stage_runs(found, alone, sizes, choice)
        for each in segment.sent
    )


def num_backwards(choice: Choice) -> int:
    """Return the number of kinds of backward tasks of a pipeline's schedule."""
    table = lockstep_table(choice.schedule, 2, 2 * choice.virtual_stages, choice.virtual_stages)
    return len(table.kinds) - 1


def block_gathers(sizes: Mapping[str, int], choice: Choice) -> float:
    """Return how often a microbatch gathers the weights of a block, of a stage on average."""
    parts = sizes[axes.PIPELINE] * choice.virtual_stages
    of_backward = 0 if choice.remat == "none" else 1
    if sizes[axes.PIPELINE] == 1:
        return 1 + of_backward
    # forward tasks but those of the last part, and each backward that computes its forward again
    return (parts - 1) / parts + num_backwards(choice) * (1 + of_backward)
