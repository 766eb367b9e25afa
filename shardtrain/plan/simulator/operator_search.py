"""Search the sharding of each operator of a run by a Markov chain, and compare it with the best layout.

The search is the one of FlexFlow (Jia et al. 2019, section 6): a change is proposed, simulated, and kept by
the rule of Metropolis. What a run shards together changes together (`Operators.groups`).
"""

import math
import random
from collections import Counter
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
from shardtrain.plan.space import list_layouts, mesh_text
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import trace_loss
from shardtrain.plan.traced_experts import TracedExperts
from shardtrain.sharding.axis_sizes import axis_sizes, divisors
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.single_arrays import OPERATOR_AXES

BETA = 300.0
"""Beta times the seconds of the best step: a step slower by 1 / 300 is kept with a probability of 1 / e."""

MEAN_RUN = 8
"""Mean number of consecutive operators of a proposal that changes several."""

MOST_AXES = len(OPERATOR_AXES)

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


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Args:
      shardings: the best sharding of each operator.
      start: score of the start.
      found: score of the best step.
      accepted: number of kept proposals.
    """

    shardings: tuple[Sharding, ...]
    start: StepScore
    found: StepScore
    accepted: int


def search_shardings(
    space: ShardedOperators, start: Sequence[Sharding], *, proposals: int, seed: int = 0
) -> SearchResult:
    """Search from one start.

    Half of the proposals give one group any sharding; half shard one dim over one axis, or no dim, in some
    consecutive groups. A proposal that costs x seconds more is kept with probability exp(-beta x), where
    beta is `BETA` over the seconds of the best step so far. Proposals are not symmetric, so the search does
    not sample a distribution.

    Args:
      space: the operators on a mesh.
      start: a sharding of each operator that fits it.
      proposals: number of proposals.
      seed: seed of the proposals.
    """
    rng = random.Random(seed)
    first = now = best = ShardedStep.of(space, _tie(space, start))
    accepted = 0
    for _ in range(proposals):
        new = _proposal(space, now.shardings, rng)
        if not new:
            continue
        tried = now.changed(new)
        lost = tried.judged.cost - now.judged.cost
        if lost > 0 and rng.random() >= math.exp(-BETA * lost / best.judged.cost):
            continue
        now, accepted = tried, accepted + 1
        if tried.judged.cost < best.judged.cost:
            best = tried
    return SearchResult(shardings=best.shardings, start=first.judged, found=best.judged, accepted=accepted)


def draw_shardings(space: ShardedOperators, seed: int = 0) -> tuple[Sharding, ...]:
    """Return a random sharding of each operator."""
    rng = random.Random(seed)
    return tuple(_any_sharding(space, number, rng) for number in range(len(space.graph.operators)))


def _any_sharding(space: ShardedOperators, number: int, rng: random.Random) -> Sharding:
    """Return a random sharding that fits an operator."""
    options = (None, *space.graph.operators[number].sizes)
    found: Sharding = (None,) * len(space.sizes)
    for axis in rng.sample(range(len(found)), len(found)):
        tried = (*found[:axis], rng.choice(options), *found[axis + 1 :])
        found = tried if space.fits(number, tried) else found
    return found


def _proposal(
    space: ShardedOperators, shardings: Sequence[Sharding], rng: random.Random
) -> dict[int, Sharding]:
    """Return new shardings of some operators that fit them."""
    leads = list(space.graph.groups)
    first = rng.randrange(len(leads))
    if rng.random() < 0.5:
        new = {leads[first]: _any_sharding(space, leads[first], rng)}
    else:
        length = 1 + int(rng.expovariate(1 / MEAN_RUN))
        axis, dim = rng.randrange(len(space.sizes)), rng.choice((None, *space.dims))
        new = {
            number: (*shardings[number][:axis], dim, *shardings[number][axis + 1 :])
            for number in leads[first : first + length]
        }
    fitting = {number: sharding for number, sharding in new.items() if space.fits(number, sharding)}
    tied = {
        member: _project(space, member, sharding)
        for number, sharding in fitting.items()
        for member in space.graph.groups[number]
    }
    return {number: sharding for number, sharding in tied.items() if sharding != shardings[number]}


def _tie(space: ShardedOperators, shardings: Sequence[Sharding]) -> list[Sharding]:
    """Return shardings in which all operators of a group are sharded by the dims of its first."""
    found = list(shardings)
    for lead, members in space.graph.groups.items():
        for member in members:
            found[member] = _project(space, member, shardings[lead])
    return found


def _project(space: ShardedOperators, number: int, sharding: Sharding) -> Sharding:
    """Return a sharding with only the dims that an operator has."""
    found: Sharding = (None,) * len(sharding)
    for axis, dim in enumerate(sharding):
        tried = (*found[:axis], dim, *found[axis + 1 :])
        found = tried if space.fits(number, tried) else found
    return found


@dataclass(frozen=True, kw_only=True)
class OperatorPlan:
    """The result of a search over the shardings of operators.

    Args:
      space: the operators on a mesh.
      rules: the best layout by rules, as on the command line.
      by_rules: its sharding of each operator.
      searched: name of a start -> result of the search from it.
    """

    space: ShardedOperators
    rules: str
    by_rules: tuple[Sharding, ...]
    searched: Mapping[str, SearchResult]

    @property
    def best(self) -> SearchResult:
        """The best result of all starts."""
        return min(self.searched.values(), key=lambda each: each.found.cost)

    @property
    def is_faster(self) -> bool:
        """Whether the best is faster than rules."""
        return self.best.found.cost < ShardedStep.of(self.space, self.by_rules).judged.cost

    @property
    def mesh(self) -> dict[str, int]:
        """The axes of a run: axis -> size."""
        return dict(zip(OPERATOR_AXES, self.space.sizes.values(), strict=False))


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
    """Search the shardings of all operators from three starts: data parallel, the best layout, and random.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: number of devices.
      layout: rules and fixed axis sizes of all layouts.
      remat: remat policy.
      proposals: number of proposals from each start.
      seed: seed of the random start and the proposals.

    Raises:
      ValueError: there is only one device, or no layout without a pipeline.
    """
    if num_devices == 1:
        raise ValueError("one device has no operators to shard; give 2 devices or more")
    graph = trace_whole_step(subject, num_devices, remat)
    space, rules, by_rules = _best_by_rules(subject, machine, num_devices, layout, graph)
    starts = {
        "data parallel": _shard_by_rules(space, Layout(mesh={axes.DATA: -1}), None),
        f"rules: {rules}": by_rules,
        "random": draw_shardings(space, seed),
    }
    searched = {
        name: search_shardings(space, start, proposals=proposals, seed=seed) for name, start in starts.items()
    }
    return OperatorPlan(space=space, rules=rules, by_rules=by_rules, searched=searched)


def trace_whole_step(subject: Subject, num_devices: int, remat: str | None) -> Operators:
    """Return the operators of a step of all examples at once."""
    one = subject.state(Choice(layout=Layout(mesh={axes.DATA: num_devices})), num_devices).figures
    ratio = one.optimizer / one.parameters
    model, experts = subject.find_model(remat), TracedExperts(1)
    program = trace_loss(model, subject.loss, subject.batch, True, None, experts, subject.target, scoped=True)
    return trace_operators(program, subject.parameter_paths, ratio)


def shard_by_rules(
    graph: Operators, machine: Machine, sizes: Mapping[str, int], layout: Layout
) -> tuple[ShardedOperators, tuple[Sharding, ...]]:
    """Return operators on the mesh of a layout, and how its rules shard each.

    Args:
      graph: the operators.
      machine: the devices.
      sizes: axis -> size.
      layout: completed for the model.
    """
    space = ShardedOperators(graph=graph, machine=machine, sizes=_split_axes(sizes))
    return space, _shard_by_rules(space, layout, [axis.split()[0] for axis in space.sizes])


def _best_by_rules(
    subject: Subject, machine: Machine, num_devices: int, layout: Layout, graph: Operators
) -> tuple[ShardedOperators, str, tuple[Sharding, ...]]:
    """Return the layout whose rules give the fastest step, its mesh and its sharding of each operator."""
    found = []
    for each in list_layouts(num_devices, layout):
        sizes = axis_sizes(each.mesh, num_devices)
        # all ZeRO stages send the same bytes if gathered weights are kept for the backward
        if sizes[axes.PIPELINE] > 1 or each.zero != 3 or sum(n > 1 for n in sizes.values()) > MOST_AXES:
            continue
        try:
            completed = subject.state(Choice(layout=each), num_devices).layout
        except ValueError:
            continue
        space, shardings = shard_by_rules(graph, machine, sizes, completed)
        found.append(
            (ShardedStep.of(space, shardings).judged.cost, len(found), space, mesh_text(each), shardings)
        )
    if not found:
        raise ValueError(
            "no layout without a pipeline runs on these devices, and operators are compared with one; leave"
            " out --fixed pipeline, or use another number of devices"
        )
    _, _, space, rules, shardings = min(found)
    return space, rules, shardings


def _split_axes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Split the axes of a mesh, the largest first, until there are as many as single operators may have.

    >>> _split_axes({"data": 6, "fsdp": 1, "tensor": 2})
    {'data 0': 3, 'data 1': 2, 'tensor 0': 2}
    """
    found = [(axis, size) for axis, size in sizes.items() if size > 1]
    while len(found) < MOST_AXES:
        size, at = max(
            ((size, -i) for i, (_, size) in enumerate(found) if len(divisors(size)) > 2), default=(0, 0)
        )
        if not size:
            break
        axis, least = found[-at][0], divisors(size)[1]
        found[-at : 1 - at] = [(axis, size // least), (axis, least)]
    numbers = Counter[str]()
    names = []
    for axis, _ in found:
        names.append(f"{axis} {numbers[axis]}")
        numbers[axis] += 1
    return dict(zip(names, (size for _, size in found), strict=True))


def _shard_by_rules(
    space: ShardedOperators, layout: Layout, mesh_axes: Sequence[str] | None
) -> tuple[Sharding, ...]:
    """Return how rules shard each operator; without `mesh_axes`, all axes shard the batch."""
    found = []
    for number, operator in enumerate(space.graph.operators):
        sharding: Sharding = (None,) * len(space.sizes)
        for position in range(len(sharding)):
            dims = [axes.BATCH] if mesh_axes is None else _list_ruled(operator, layout, mesh_axes[position])
            for dim in dims:
                tried = (*sharding[:position], dim, *sharding[position + 1 :])
                if sharding[position] is None and space.fits(number, tried):
                    sharding = tried
        found.append(sharding)
    return tuple(found)


def _list_ruled(operator: Operator, layout: Layout, axis: str) -> list[str]:
    """Return the dims of an operator that rules shard over an axis."""
    rules = layout.sharded_rules if operator.kind == "update" else layout.activation_rules
    rules = {**rules, axes.BATCH: layout.batch_axes}
    return [SAME_DIM.get(name, name) for name in sorted(operator.names) if axis in rules.get(name, ())]
