"""Search a sharding for each operator of a layout by a Markov chain, and compare it with the best layout.

The search is the one of FlexFlow (Jia et al. 2019, section 6): a change is proposed, simulated, and kept by
the rule of Metropolis. What a run shards together changes together (`Operators.groups`), and the axis data
splits rows alone.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardtrain import axes
from shardtrain.plan.machine import Machine
from shardtrain.plan.prediction import Choice
from shardtrain.plan.simulator.operator_shardings import ShardedOperators, Sharding, Transfers
from shardtrain.plan.simulator.operators import SAME_DIM, Operator, Operators, trace_operators
from shardtrain.plan.simulator.task_graph import Key, Task, simulate
from shardtrain.plan.space import list_layouts
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import trace_loss
from shardtrain.plan.traced_experts import TracedExperts
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.single_arrays import OPERATOR_AXES

BETA = 300.0
"""Beta times the seconds of the best step: a step slower by 1 / 300 is kept with a probability of 1 / e."""

MEAN_RUN = 8
"""Mean number of consecutive operators of a proposal that changes several."""

NUM_STARTS = 3
"""Number of layouts from which it searches, the fastest ones with an axis that may split anything."""

TOO_LARGE = 10.0
"""Penalty of a step that does not fit, relative to its seconds and to its memory over that of a device."""


class StepScore(NamedTuple):
    """The score of a step.

    Args:
      cost: the seconds, times a penalty if it does not fit, for comparisons.
      seconds: simulated seconds of the step.
      fits: whether it fits the memory of a device.
    """

    cost: float
    seconds: float
    fits: bool


@dataclass(frozen=True, eq=False)
class ShardedStep:
    """A step whose operators are sharded, and its simulation.

    Args:
      space: the operators on a mesh.
      shardings: sharding of each operator.
      sent: number of a value -> the tasks that bring it to the operators that need it.
      tasks: all tasks by number.
    """

    space: ShardedOperators
    shardings: tuple[Sharding, ...]
    sent: Mapping[int, Transfers]
    tasks: Mapping[Key, Task]

    @classmethod
    def of(cls, space: ShardedOperators, shardings: Sequence[Sharding]) -> "ShardedStep":
        """Return the step with these shardings.

        Raises:
          ValueError: a sharding does not fit its operator.
        """
        for number, sharding in enumerate(shardings):
            if not space.fits(number, sharding):
                each = space.graph.operators[number]
                raise ValueError(
                    f"operator {number}, {each.name}, cannot be sharded by {sharding} over axes of sizes"
                    f" {tuple(space.sizes.values())}; its dims are {dict(each.sizes)}"
                )
        nothing = cls(space, tuple(shardings), {}, {})
        return nothing.changed(dict(enumerate(shardings)))

    def changed(self, new: Mapping[int, Sharding]) -> "ShardedStep":
        """Return the step with other shardings of some operators; only their tasks are made again."""
        space = self.space
        shardings = tuple(new.get(number, sharding) for number, sharding in enumerate(self.shardings))
        values = {
            value
            for number in new
            for value in (*space.made_by.get(number, ()), *space.read_by.get(number, ()))
        }
        sent = {**self.sent, **{value: space.transfers(value, shardings) for value in values}}
        users = {use.operator for value in values for use in space.graph.values[value].uses}
        tasks = dict(self.tasks)
        for value in values:
            for of_use in self.sent.get(value, {}).values():
                for task in of_use:
                    del tasks[task.key]
            tasks |= {task.key: task for of_use in sent[value].values() for task in of_use}
        for number in {*users, *new}:
            tasks[number, 0] = space.compute_task(number, shardings[number], sent)
        return ShardedStep(space, shardings, sent, tasks)

    @cached_property
    def judged(self) -> StepScore:
        """The score of the step."""
        over = self.space.memory_bytes(self.shardings) / self.space.machine.rates.memory_bytes
        seconds = simulate(self.tasks).makespan
        return StepScore(seconds * (1 + TOO_LARGE * over if over > 1 else 1), seconds, over <= 1)

    @cached_property
    def sent_bytes(self) -> Mapping[tuple[str, ...], float]:
        """Mesh axes -> the bytes that each device sends over them."""
        return self.space.sent_bytes(self.shardings)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Args:
      start: the step at the start.
      best: the best step.
      accepted: number of kept proposals.
    """

    start: ShardedStep
    best: ShardedStep
    accepted: int


def search_shardings(
    space: ShardedOperators,
    start: Sequence[Sharding],
    *,
    proposals: int,
    seed: int = 0,
    most_bytes: float = math.inf,
) -> SearchResult:
    """Search from one start.

    Half of the proposals give one group any sharding; half shard one dim over one axis, or no dim, in some
    consecutive groups. A proposal that costs x seconds more is kept with probability exp(-beta x), where
    beta is `BETA` over the seconds of the best step so far. Proposals are not symmetric, so the search does
    not sample a distribution.

    Args:
      space: the operators on a mesh.
      start: a sharding of each operator that fits it; a group with that of its first has that of the others.
      proposals: number of proposals.
      seed: seed of the proposals.
      most_bytes: the most bytes that a device may send in the best step, if it is not the start.
    """
    rng = random.Random(seed)
    first = now = best = ShardedStep.of(space, start)
    accepted = 0
    for _ in range(proposals):
        new = _proposal(first, now.shardings, rng)
        if not new:
            continue
        tried = now.changed(new)
        lost = tried.judged.cost - now.judged.cost
        if lost > 0 and rng.random() >= math.exp(-BETA * lost / best.judged.cost):
            continue
        now, accepted = tried, accepted + 1
        if tried.judged.cost < best.judged.cost and sum(tried.sent_bytes.values()) <= most_bytes:
            best = tried
    return SearchResult(start=first, best=best, accepted=accepted)


def _proposal(first: ShardedStep, shardings: Sequence[Sharding], rng: random.Random) -> dict[int, Sharding]:
    """Return new shardings of some operators that fit them."""
    space = first.space
    leads, free = list(space.graph.groups), [i for i, axis in enumerate(space.sizes) if axis != axes.DATA]
    start = rng.randrange(len(leads))
    new = {}
    if rng.random() < 0.5:
        lead = leads[start]
        found = tuple(None if i in free else dim for i, dim in enumerate(first.shardings[lead]))
        for axis in rng.sample(free, len(free)):
            dim = rng.choice((None, *space.graph.operators[lead].choices))
            tried = (*found[:axis], dim, *found[axis + 1 :])
            found = tried if space.fits(lead, tried) else found
        new[lead] = found
    else:
        length = 1 + int(rng.expovariate(1 / MEAN_RUN))
        axis, dim = rng.choice(free), rng.choice((None, *space.dims))
        new = {
            lead: (*shardings[lead][:axis], dim, *shardings[lead][axis + 1 :])
            for lead in leads[start : start + length]
        }
    tied: dict[int, Sharding] = {}
    for lead, sharding in new.items():
        choices = (None, *space.graph.operators[lead].choices)
        is_known = sharding == first.shardings[lead] or all(sharding[axis] in choices for axis in free)
        if is_known and space.fits(lead, sharding):
            tied |= _tie(first, lead, sharding)
    return {number: sharding for number, sharding in tied.items() if sharding != shardings[number]}


def _tie(first: ShardedStep, lead: int, sharding: Sharding) -> dict[int, Sharding]:
    """Return the shardings of the operators that follow one, which has a new sharding."""
    operators, members = first.space.graph.operators, first.space.graph.groups[lead]
    if sharding == first.shardings[lead]:
        return {member: first.shardings[member] for member in members}
    found = {lead: sharding}
    for number in members:
        if operators[number].kind == "update" and number != lead:
            # where other dims are split, its gradient is summed: it keeps the dims by rules
            pairs = zip(sharding, first.shardings[number], strict=True)
            own = [ruled if dim else None for dim, ruled in pairs]
            found[number] = stored = _project(first.space, number, sharding, own)
            dims = operators[number].sizes
    for number in members:
        if number in found:
            continue
        wanted = sharding
        if not operators[number].scope:
            pairs = zip(first.shardings[number], stored, strict=True)
            wanted = tuple(to if ruled in dims else ruled for ruled, to in pairs)
        found[number] = _project(first.space, number, wanted)
    return found


def _project(
    space: ShardedOperators, number: int, sharding: Sharding, own: Sequence[str | None] = ()
) -> Sharding:
    """Return a sharding with only the dims that an operator has, and then those of its own that are free."""
    found: Sharding = (None,) * len(sharding)
    for options in (sharding, own):
        for axis, dim in enumerate(options):
            tried = (*found[:axis], dim, *found[axis + 1 :])
            is_new = found[axis] is None and (options is sharding or dim not in found)
            found = tried if is_new and space.fits(number, tried) else found
    return found


@dataclass(frozen=True, kw_only=True)
class OperatorPlan:
    """The result of a search over the shardings of operators.

    Args:
      layout: the best layout.
      by_rules: the step whose operators its rules shard.
      searched: layouts, and the results of searches from their rules.
    """

    layout: Layout
    by_rules: ShardedStep
    searched: Sequence[tuple[Layout, SearchResult]]

    @property
    def best(self) -> tuple[Layout, SearchResult] | None:
        """The best layout with shardings of operators, if it is faster than the best layout."""
        found = min(self.searched, key=lambda each: each[1].best.judged.cost, default=None)
        if found is None or found[1].best.judged.cost >= self.by_rules.judged.cost:
            return None
        return found


def plan_operators(
    subject: Subject,
    machine: Machine,
    num_devices: int,
    *,
    layout: Layout,
    remat: str | None,
    proposals: int,
    seed: int,
) -> OperatorPlan:
    """Search the shardings of all operators from the best layouts.

    What is found sends no more bytes than the best layout, unless that does not fit.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: number of devices.
      layout: rules and fixed axis sizes of all layouts.
      remat: remat policy.
      proposals: number of proposals from each start.
      seed: seed of the proposals.

    Raises:
      ValueError: there is only one device, or no layout without a pipeline.
    """
    if num_devices == 1:
        raise ValueError("one device has no operators to shard; give 2 devices or more")
    graph = trace_whole_step(subject, num_devices, remat)
    ruled = _rank_by_rules(subject, machine, num_devices, layout, graph)
    best, by_rules = ruled[0]
    most_bytes = sum(by_rules.sent_bytes.values()) if by_rules.judged.fits else math.inf
    # models constrain sequences and the tokens of experts between operators, which the search does not know
    has_experts = any("ragged_dot" in each.name for each in graph.operators)
    starts = [
        (each, step)
        for each, step in ruled
        if set(step.space.sizes) != {axes.DATA} and not (each.sequence_sharded or has_experts)
    ]
    searched = [
        (
            found,
            search_shardings(
                step.space, step.shardings, proposals=proposals, seed=seed, most_bytes=most_bytes
            ),
        )
        for found, step in starts[:NUM_STARTS]
    ]
    return OperatorPlan(layout=best, by_rules=by_rules, searched=searched)


def trace_whole_step(subject: Subject, num_devices: int, remat: str | None) -> Operators:
    """Return the operators of a step of all examples at once."""
    one = subject.state(Choice(layout=Layout(mesh={axes.DATA: num_devices})), num_devices).figures
    ratio = one.optimizer / one.parameters
    model, experts = subject.find_model(remat), TracedExperts(1)
    program = trace_loss(model, subject.loss, subject.batch, True, None, experts, subject.target, scoped=True)
    return trace_operators(program, subject.parameter_paths, ratio)


def shard_by_rules(
    graph: Operators, machine: Machine, sizes: Mapping[str, int], layout: Layout
) -> ShardedStep:
    """Return the step of operators on the mesh of a layout, as its rules shard each.

    Args:
      graph: the operators.
      machine: the devices.
      sizes: axis -> size.
      layout: completed for the model.
    """
    used = {axis: size for axis, size in sizes.items() if size > 1}
    space = ShardedOperators(graph=graph, machine=machine, sizes=used)
    found = []
    for number, operator in enumerate(graph.operators):
        sharding: Sharding = (None,) * len(used)
        for position, axis in enumerate(used):
            for dim in _list_ruled(operator, layout, axis):
                tried = (*sharding[:position], dim, *sharding[position + 1 :])
                if sharding[position] is None and space.fits(number, tried):
                    sharding = tried
        found.append(sharding)
    return ShardedStep.of(space, found)


def _rank_by_rules(
    subject: Subject, machine: Machine, num_devices: int, layout: Layout, graph: Operators
) -> list[tuple[Layout, ShardedStep]]:
    """Return layouts and the steps that their rules shard, the fastest first."""
    found = []
    for each in list_layouts(num_devices, layout):
        sizes = axis_sizes(each.mesh, num_devices)
        # all ZeRO stages send the same bytes if gathered weights are kept for the backward
        if each.zero != 3 or any(size > 1 and axis not in OPERATOR_AXES for axis, size in sizes.items()):
            continue
        try:
            completed = subject.state(Choice(layout=each), num_devices).layout
        except ValueError:
            continue
        found.append((each, shard_by_rules(graph, machine, sizes, completed)))
    if not found:
        raise ValueError(
            f"no layout over only {', '.join(OPERATOR_AXES)} runs on these devices, and operators are"
            " compared with one; leave out --fixed of other axes, or use another number of devices"
        )
    return sorted(found, key=lambda each: each[1].judged.cost)


def _list_ruled(operator: Operator, layout: Layout, axis: str) -> list[str]:
    """Return the dims of an operator that rules shard over an axis."""
    rules = layout.sharded_rules if operator.kind == "update" else layout.activation_rules
    rules = {**rules, axes.BATCH: layout.batch_axes}
    return [SAME_DIM.get(name, name) for name in sorted(operator.names) if axis in rules.get(name, ())]
