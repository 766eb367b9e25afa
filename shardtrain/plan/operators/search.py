"""Search a sharding for each operator, from the best layouts and by their prediction.

Shardings are those of FlexFlow (Jia et al. 2019). The search is AccPar's (Song et al. 2020): dynamic
programming over the operators, one axis after the other. What a run shards together changes together
(`Operators.groups`), and the axis data splits rows alone. The prediction is that of the layout, and what its
operators take more or less.
"""

import math
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import cycle, product

from shardtrain import axes
from shardtrain.plan.machine import Machine
from shardtrain.plan.operators.graph import CONVOLUTION, Operator, Operators, same_dim, trace_operators
from shardtrain.plan.operators.shardings import Move, Needs, Rest, ShardedOperators, ShardedStep, Sharding
from shardtrain.plan.predict import steps, sum_sent_by_axes
from shardtrain.plan.prediction import Choice, OperatorChange, Prediction
from shardtrain.plan.search import RankedChoice, search
from shardtrain.plan.space import Space
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import trace_loss
from shardtrain.plan.traced_experts import TracedExperts
from shardtrain.sharding.axis_sizes import MOST_DEVICES, axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.single_arrays import OPERATOR_AXES

WIDTH = 256
"""Largest number of choices that are alike so far that a sweep keeps."""

LEAST_GAIN = 1e-9
"""Smallest part of a step that a sweep must gain, so that rounding gains nothing."""

PRICES = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Prices of all bytes that a layout sends, relative to the time of its step."""

MOST_BY_RULES = 1.25
"""Largest ratio of the bytes of operators by rules to those of their layout. With more it is no start, as
what is found would seem to gain too much."""

NUM_STARTS = 3
"""Number of layouts from which it searches: the fastest ones, and the fastest without the axis data."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Args:
      start: the step at the start.
      best: the best step.
    """

    start: ShardedStep
    best: ShardedStep


def search_shardings(start: ShardedStep, *, most_bytes: float = math.inf) -> SearchResult:
    """Search from one start: sweep over one axis after the other, until no sweep makes the step faster.

    If what is found sends too much, the search is done again with the lowest price of a byte that is enough.

    Args:
      start: the step from which it begins; a group with the sharding of its first has those of the others.
      most_bytes: the most bytes that a device may send in the best step, if it is not the start.
    """
    unit = start.judged.seconds / max(start.sent_bytes, 1)
    free, *prices, highest = PRICES
    found = _sweep_all(start, free * unit)
    if found.sent_bytes > most_bytes:
        cheapest = _sweep_all(start, highest * unit)
        if cheapest.sent_bytes > most_bytes:
            return SearchResult(start=start, best=start)
        tried = (_sweep_all(start, price * unit) for price in prices)
        found = next((each for each in tried if each.sent_bytes <= most_bytes), cheapest)
    return SearchResult(start=start, best=found if found.judged.cost < start.judged.cost else start)


def _sweep_all(start: ShardedStep, price: float) -> ShardedStep:
    """Return the step in which no sweep over an axis gains, where a byte costs so many seconds."""

    def cost(step: ShardedStep) -> float:
        return step.judged.cost + price * step.sent_bytes

    free = [position for position, axis in enumerate(start.space.sizes) if axis != axes.DATA]
    now, failed = start, 0
    for axis in cycle(free):
        tried = _sweep(start, now, axis, price)
        now, failed = (tried, 0) if cost(now) - cost(tried) > LEAST_GAIN * cost(now) else (now, failed + 1)
        if failed == len(free):
            break
    return now


def _sweep(first: ShardedStep, now: ShardedStep, axis: int, price: float) -> ShardedStep:
    """Return a step with the best dim for one axis in each group, by dynamic programming in their order.

    Of choices that are alike in all groups that the rest of the program shares values with, the cheapest is
    kept. Exact for this axis, but for memory, which it leaves out, if there are never more than `WIDTH`.
    """
    space, values = first.space, first.space.graph.values
    listed = [_list_options(first, now, lead, axis) for lead in space.graph.groups]
    group_of = {number: group for group, (kept, *_) in enumerate(listed) for number in kept}
    # an operator that follows several leads is of the last of them
    options = [
        [{number: each[number] for number in each if group_of[number] == group} for each in of_group]
        for group, of_group in enumerate(listed)
    ]
    unchanged = {n: each for n, each in enumerate(now.shardings) if n not in group_of}
    # groups -> the values that they share
    shared: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, value in enumerate(values):
        readers = (use.operator for use in value.uses)
        of_value = {group_of.get(each) for each in (value.source, *value.added, *readers)}
        shared[tuple(sorted(group for group in of_value if group is not None))].append(number)
    complete: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
    until = list(range(len(options)))
    for groups in filter(None, shared):
        for group in groups:
            until[group] = max(until[group], groups[-1])
        complete[groups[-1]].append(groups)

    @cache
    def find_ends(value: int, group: int | None, option: int) -> tuple[dict[int, Sharding], Needs]:
        shardings = unchanged if group is None else options[group][option]
        return space.find_made(value, shardings), space.find_needs(value, shardings)

    def list_moves(value: int, chosen: Sequence[tuple[int | None, int]]) -> Iterator[Move]:
        made, needs = zip(*(find_ends(value, *each) for each in chosen), strict=True)
        of_source, added = ChainMap(*made), values[value].added
        own = of_source[values[value].source]
        if all(own != of_source[operator] for operator in added):
            yield from space.list_moves(value, own, needs)

    @cache
    def moved_cost(groups: tuple[int, ...], options_of: tuple[int, ...]) -> float:
        chosen = [(None, 0), *zip(groups, options_of, strict=True)]
        moves = (move for value in shared[groups] for move in list_moves(value, chosen))
        return sum(move.seconds + price * move.num_bytes for move in moves)

    # cost, and the number of the option of each group so far
    states: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for group, of_group in enumerate(options):
        own = [sum(space.seconds(number, each[number]) for number in each) for each in of_group]
        still_shared = [i for i in range(group + 1) if until[i] > group]
        found: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
        for (before, chosen), option in product(states, range(len(of_group))):
            chosen = (*chosen, option)
            moved = (moved_cost(groups, tuple(chosen[i] for i in groups)) for groups in complete[group])
            state = (before + own[option] + sum(moved), chosen)
            key = tuple(chosen[i] for i in still_shared)
            found[key] = min(state, found.get(key, state))
        states = sorted(found.values())[:WIDTH]
    (_, chosen), *_ = states
    new = {number: options[group][chosen[group]][number] for number, group in group_of.items()}
    return now.changed({number: each for number, each in new.items() if each != now.shardings[number]})


def _list_options(first: ShardedStep, now: ShardedStep, lead: int, axis: int) -> list[dict[int, Sharding]]:
    """Return the shardings of a group, by the dims that one axis may split: as now, then others."""
    space, kept = first.space, now.shardings[lead]
    known = (None, *space.graph.operators[lead].choices)
    found = [{member: now.shardings[member] for member in space.graph.groups[lead]}]
    for dim in dict.fromkeys((first.shardings[lead][axis], *known)):
        tried = (*kept[:axis], dim, *kept[axis + 1 :])
        others = (each for each, name in zip(tried, space.sizes, strict=True) if name != axes.DATA)
        is_known = tried == first.shardings[lead] or all(each in known for each in others)
        if tried != kept and is_known and space.fits(lead, tried):
            found.append(shard_group(first, lead, tried))
    return found


def shard_group(first: ShardedStep, lead: int, sharding: Sharding) -> dict[int, Sharding]:
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
class LayoutSearch:
    """A search from a layout.

    Args:
      layout: the layout.
      layout_sent: mesh axes -> bytes that a device sends with it.
      result: the result of the search from its rules.
    """

    layout: RankedChoice
    layout_sent: Mapping[tuple[str, ...], float]
    result: SearchResult

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends with what was found."""
        return sum(self.change.predict_sent(self.layout_sent).values())

    @cached_property
    def change(self) -> OperatorChange:
        """What was found changes in the prediction of the layout."""
        start, best = self.result.start, self.result.best
        space, kinds = best.space, [each.kind for each in best.space.graph.operators]
        gained = {True: 0.0, False: 0.0}
        for number, kind in enumerate(kinds):
            gained[kind == "update"] += best.computed[number] - start.computed[number]
        pairs = enumerate(zip(start.shardings, best.shardings, strict=True))
        return OperatorChange(
            # parameters, gradients and optimizer state are split alike
            state_ratio=space.kept_bytes(best.shardings) / space.kept_bytes(start.shardings),
            activations=space.activation_bytes(best.shardings) - space.activation_bytes(start.shardings),
            compute=gained[False],
            update=gained[True],
            flops=sum(space.flops(number, new) - space.flops(number, old) for number, (old, new) in pairs),
            sent_seconds=_subtract(best.sum_moves("seconds"), start.sum_moves("seconds")),
            sent_bytes=_subtract(best.sum_moves("num_bytes"), start.sum_moves("num_bytes")),
        )

    @property
    def prediction(self) -> Prediction:
        """The prediction of what was found."""
        return self.change.predict(self.layout.prediction)


def _subtract(
    one: Mapping[tuple[str, ...], float], other: Mapping[tuple[str, ...], float]
) -> dict[tuple[str, ...], float]:
    return {over: one.get(over, 0.0) - other.get(over, 0.0) for over in dict.fromkeys((*one, *other))}


@dataclass(frozen=True, kw_only=True)
class OperatorPlan:
    """The result of a search over the shardings of operators.

    Args:
      best_layout: the best layout.
      best_bytes: bytes that a device sends in its step.
      searched: the searches, from the best layout without a pipeline on.
    """

    best_layout: RankedChoice
    best_bytes: float
    searched: Sequence[LayoutSearch]

    @property
    def best(self) -> LayoutSearch | None:
        """The best of what was found, which need not be better than the best layout; None if nothing was."""
        changed = (each for each in self.searched if each.result.best is not each.result.start)
        return min(changed, key=lambda each: each.result.best.judged.cost, default=None)


def plan_operators(
    subject: Subject,
    machine: Machine,
    num_devices: int,
    *,
    space: Space,
    best: RankedChoice,
) -> OperatorPlan:
    """Search the shardings of all operators, from the best layouts for one microbatch and one remat policy.

    What is found sends no more bytes than the best layout, unless that does not fit.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: number of devices.
      space: rules and fixed axis sizes of all layouts.
      best: the best layout; its remat policy is kept, or the one of blocks that recompute most.

    Raises:
      ValueError: there is only one device, or no layout without a pipeline.
    """
    if num_devices == 1:
        raise ValueError("one device has no operators to shard; give 2 devices or more")
    remat = best.choice.remat and best.choice.remat.partition("=")[0]
    graph = trace_whole_step(subject, num_devices, remat)
    most_bytes = sum(_count_sent(subject, machine, num_devices, best.choice).values())
    searched = []
    for layout in _find_starts(subject, machine, num_devices, space, remat, graph):
        mesh = axis_sizes(layout.choice.layout.mesh, num_devices)
        start = shard_by_rules(graph, machine, mesh, subject.state(layout.choice, num_devices).layout)
        start = _add_rest(start, layout.prediction)
        sent = _count_sent(subject, machine, num_devices, layout.choice)
        if start.sent_bytes > MOST_BY_RULES * sum(sent.values()):
            continue
        most = most_bytes - sum(sent.values()) + start.sent_bytes if best.fits else math.inf
        result = search_shardings(start, most_bytes=most)
        searched.append(LayoutSearch(layout=layout, layout_sent=sent, result=result))
    return OperatorPlan(best_layout=best, best_bytes=most_bytes, searched=searched)


def _find_starts(
    subject: Subject,
    machine: Machine,
    num_devices: int,
    space: Space,
    remat: str | None,
    graph: Operators,
) -> list[RankedChoice]:
    """Return the best layouts from which operators are searched.

    Raises:
      ValueError: no layout splits only what operators can.
    """
    layout = replace(space.layout, mesh={axes.PIPELINE: 1, **space.layout.mesh})
    space = replace(space, layout=layout, accumulates=(1,), remats=(remat,))
    ranked = [
        each
        for each in search(subject, machine, num_devices, space, most=MOST_DEVICES).ranked
        # all ZeRO stages send the same bytes if gathered weights are kept for the backward
        if each.choice.layout.zero == 3
        and all(size == 1 or axis in OPERATOR_AXES for axis, size in each.choice.layout.mesh.items())
    ]
    if not ranked:
        raise ValueError(
            f"no layout over only {', '.join(OPERATOR_AXES)} runs on these devices, and operators are"
            " searched from one; leave out --fixed of other axes, or use another number of devices"
        )
    # models constrain sequences and the tokens of experts between operators, which the search does not know
    if subject.num_experts:
        return []
    convolves = any(CONVOLUTION in each.name for each in graph.operators)
    # what rules for channels send is predicted too low
    starts = [
        each
        for each in ranked
        if not each.choice.layout.sequence_sharded
        and set(each.choice.layout.mesh) & {axes.FSDP, axes.TENSOR}
        and not (convolves and axes.TENSOR in each.choice.layout.mesh)
    ]
    # operators leave data to the rows
    whole = [each for each in starts if axes.DATA not in each.choice.layout.mesh]
    chosen = starts[: NUM_STARTS - 1]
    return chosen + [each for each in (*whole[:1], *starts[NUM_STARTS - 1 :]) if each not in chosen][:1]


def _count_sent(
    subject: Subject, machine: Machine, num_devices: int, choice: Choice
) -> dict[tuple[str, ...], float]:
    """Return mesh axes -> bytes that a device sends in a step of a layout."""
    (step,) = steps(subject, machine, num_devices, [choice])
    return sum_sent_by_axes(step, simulated=machine.simulated)


def _add_rest(step: ShardedStep, predicted: Prediction) -> ShardedStep:
    """Return the step of a layout with what its prediction has beside its operators."""
    space, shardings = step.space, step.shardings
    memory = predicted.memory.total - space.kept_bytes(shardings) - space.activation_bytes(shardings)
    rest = Rest(predicted.seconds.total - step.judged.seconds, memory)
    return ShardedStep.of(replace(space, rest=rest), shardings)


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


def _list_ruled(operator: Operator, layout: Layout, axis: str) -> list[str]:
    """Return the dims of an operator that rules shard over an axis."""
    rules = layout.sharded_rules if operator.kind == "update" else layout.activation_rules
    rules = {**rules, axes.BATCH: layout.batch_axes}
    names = ((name, rules.get(name.split(":")[0], ())) for name in sorted(operator.names))
    return [same_dim(name) for name, over in names if axis in over]
