"""Search the layouts of a number of devices: which fit the model and the memory, and how fast each is.

Every combination of axis sizes, ZeRO stage, microbatches, schedule and recomputation is judged by the checks
that a run makes itself, and predicted by `predict.py`.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardtrain import axes
from shardtrain.plan.machine import Machine
from shardtrain.plan.predict import predict
from shardtrain.plan.prediction import Choice, Prediction
from shardtrain.plan.space import Space, allowed_choices, allowed_remats
from shardtrain.plan.steps import steps
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import MOST_DEVICES


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A choice that a run would accept.

    Args:
      choice: the choice.
      prediction: what it needs.
      fits: whether its memory is within that of a device.
    """

    choice: Choice
    prediction: Prediction
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of a search.

    Args:
      ranked: those that fit, the fastest first; then the others, the smallest first.
      refused: mesh -> why the run's own checks refuse it.
      num_choices: how many choices were compared, recomputations not counted.
      nearest: where nothing runs, a batch or a number of devices that would.
    """

    ranked: tuple[Ranked, ...]
    refused: Mapping[str, str]
    num_choices: int
    nearest: str = ""


def search(
    subject: Subject, machine: Machine, num_devices: int, space: Space | None = None, most: int = 20
) -> Plan:
    """Rank the ways to run a step on equal devices.

    Of each mesh, number of microbatches and schedule, that recomputation is taken which computes the least
    again and fits; if none fits, the one that needs the least memory.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: how many.
      space: what may be chosen; None: everything.
      most: how many of the best to return.
    """
    space = space or Space()
    if not 1 <= num_devices <= MOST_DEVICES:
        raise ValueError(f"a plan of {num_devices} devices was asked for; use 1 to {MOST_DEVICES}")
    choices, refused = allowed_choices(subject, num_devices, space)
    remats = allowed_remats(subject, space)
    bounds = _least_recomputed(subject, machine, num_devices, choices, remats)
    ranked: list[Ranked] = []
    # what a pipeline waits is simulated for those alone that may be among the best
    for bound in sorted(bounds, key=_rank):
        if len(ranked) >= most and _rank(bound) > _rank(ranked[most - 1]):
            break
        if bound.choice.layout.mesh.get(axes.PIPELINE, 1) > 1:
            (exact,) = predictions(subject, machine, num_devices, [bound.choice])
            bound = replace(bound, prediction=exact)
        insort(ranked, bound, key=_rank)
    return Plan(ranked=tuple(ranked[:most]), refused=refused, num_choices=len(choices))


def _rank(each: Ranked) -> tuple[bool, float]:
    needed = each.prediction
    return not each.fits, needed.seconds.total if each.fits else needed.memory.total


def _least_recomputed(
    subject: Subject,
    machine: Machine,
    num_devices: int,
    choices: Sequence[Choice],
    remats: Sequence[str | None],
) -> list[Ranked]:
    """Return each choice with the least recomputation that fits, or the smallest, and bounds of its time."""
    best: dict[int, Ranked] = {}
    for remat in remats:
        open_numbers = [i for i in range(len(choices)) if i not in best or not best[i].fits]
        tried = [replace(choices[i], remat=remat) for i in open_numbers]
        found = predictions(subject, machine, num_devices, tried, waits=False)
        for i, choice, prediction in zip(open_numbers, tried, found, strict=True):
            fits = prediction.memory.total <= machine.rates.memory_bytes
            one = Ranked(choice=choice, prediction=prediction, fits=fits)
            if i not in best or _rank(one) < _rank(best[i]):
                best[i] = one
    return list(best.values())


def predictions(
    subject: Subject, machine: Machine, num_devices: int, choices: Sequence[Choice], *, waits: bool = True
) -> list[Prediction]:
    """Predict several choices at once.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: how many.
      choices: the choices.
      waits: see `predict.predict`.

    Raises:
      ValueError: a layout does not fit the model.
    """
    return [
        predict(
            each.cost,
            each.state.figures,
            each.state.layout,
            each.sizes,
            each.choice,
            machine,
            each.batch_bytes,
            forward=each.forward,
            waits=waits,
        )
        for each in steps(subject, machine, num_devices, choices)
    ]
