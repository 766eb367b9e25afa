"""What the islands of a plan send to each other, and when, for the model that is planned.

Next: `merge_bytes.py`, `join.py` and `early_gradients.py`, the arithmetic; `islands.py`, the plan.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import jax

from shardtrain import axes
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.islands.options import Across
from shardtrain.plan.early_gradients import NUMS_PROGRAMS, EarlyGradients, StepOfIsland, early_gradients
from shardtrain.plan.join import MergeBytes
from shardtrain.plan.merge_bytes import island_merges
from shardtrain.plan.prediction import Choice
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.train_step.gradient_pieces import PlannedParts
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.island_gradients import plan_parts
from shardtrain.train_step.placement import make_placement, state_specs


def merges_of(subject: Subject, num_islands: int, across: Across) -> Callable[[Synchronisation], MergeBytes]:
    """Return what gives the bytes that an island sends by a synchronisation; each is counted once.

    Args:
      subject: the model.
      num_islands: how many are joined.
      across: dtype and buckets of what they send.
    """
    sizes: dict[str, int] = dict.fromkeys(axes.AXES, 1)
    # what islands send is whole, whatever shards it inside of one
    layout = Layout(mesh=sizes, unnamed="replicate")
    specs = state_specs(subject.model_of(None), subject.optimizer, layout, sizes)
    return cache(partial(island_merges, specs=specs, num_islands=num_islands, across=across))


def parts_of(subject: Subject, choice: Choice, num_devices: int, across: Across, most: int) -> PlannedParts:
    """Return what an island sends of a mean of gradients after each of several programs, and when.

    Args:
      subject: the model.
      choice: of island 0, whose parts all islands send.
      num_devices: of that island.
      across: dtype of what is sent.
      most: programs, at most.
    """
    sizes = axis_sizes(choice.layout.mesh, num_devices)
    model = subject.model_of(choice.remat)
    stages = subject.stages(sizes[axes.PIPELINE], choice.virtual_stages)
    placement = make_placement(
        model, subject.optimizer, choice.layout, abstract_mesh(sizes), stages=stages, schedule=choice.schedule
    )
    gradients = make_gradients(model, subject.loss, placement, mean=False)
    batch = {name: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for name, x in subject.batch.items()}
    return plan_parts(gradients, placement, Synchronisation(), across.reduce_dtype, most, batch)


def sent_early(
    subject: Subject,
    choice: Choice,
    num_devices: int,
    across: Across,
    step: StepOfIsland,
    sending_seconds: float,
    nums_programs: Sequence[int] = NUMS_PROGRAMS,
) -> tuple[EarlyGradients, ...]:
    """Return the step with gradients in one program and in several; fewer where few are ready early.

    Args:
      subject, choice, num_devices, across: as for `parts_of`.
      step: of the slowest island.
      sending_seconds: to send all gradients.
      nums_programs: that are compared.
    """
    found: dict[int, EarlyGradients] = {}
    for most in nums_programs:
        parts = parts_of(subject, choice, num_devices, across, most)
        seconds = [sending_seconds * size / sum(parts.sizes_bytes) for size in parts.sizes_bytes]
        each = early_gradients(step, parts.ready, seconds)._replace(num_programs=most)
        found.setdefault(len(seconds), each)
    return tuple(found.values())
