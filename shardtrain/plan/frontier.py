"""The frontier of memory against time: the ways to run a step that no other beats in both."""

from collections.abc import Sequence
from dataclasses import replace

from shardtrain import axes
from shardtrain.plan.machine import Machine
from shardtrain.plan.search import Ranked, predictions
from shardtrain.plan.space import Space, allowed_choices, allowed_remats
from shardtrain.plan.subject import Subject


def frontier(
    subject: Subject, machine: Machine, num_devices: int, space: Space
) -> tuple[tuple[Ranked, ...], tuple[tuple[float, float], ...]]:
    """Return the ways that need less memory than every faster one, and all that were compared.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: how many.
      space: what may be chosen; all its recomputations are compared.

    Returns:
      The frontier, the smallest first; and (bytes, seconds) of each way that was compared and is no pipeline:
      of those, what stages wait is simulated only where it decides.
    """
    choices, _ = allowed_choices(subject, num_devices, space)
    remats = allowed_remats(subject, space)
    tried = [replace(choice, remat=remat) for remat in remats for choice in choices]
    found = [
        Ranked(
            choice=choice,
            prediction=prediction,
            fits=prediction.memory.total <= machine.rates.memory_bytes,
        )
        for choice, prediction in zip(
            tried, predictions(subject, machine, num_devices, tried, waits=False), strict=True
        )
    ]
    points = tuple(
        (each.prediction.memory.total, each.prediction.seconds.total)
        for each in found
        if not _is_pipeline(each)
    )
    return tuple(_unbeaten(found, subject, machine, num_devices)), points


def _unbeaten(found: Sequence[Ranked], subject: Subject, machine: Machine, num_devices: int) -> list[Ranked]:
    """Return the ways that are faster than all that need as little memory."""
    best: list[Ranked] = []
    for each in sorted(found, key=lambda one: (one.prediction.memory.total, one.prediction.seconds.total)):
        # seconds without waiting are a lower bound
        if best and each.prediction.seconds.total >= best[-1].prediction.seconds.total:
            continue
        exact = each
        if _is_pipeline(each):
            (prediction,) = predictions(subject, machine, num_devices, [each.choice])
            exact = replace(each, prediction=prediction)
        if not best or exact.prediction.seconds.total < best[-1].prediction.seconds.total:
            best.append(exact)
    return best


def _is_pipeline(each: Ranked) -> bool:
    return each.choice.layout.mesh.get(axes.PIPELINE, 1) > 1
