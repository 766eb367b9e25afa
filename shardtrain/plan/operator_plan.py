"""Plan the sharding of each operator of a run, from several starts, beside the best that rules by name give.

An analysis: a run's rules shard dims by name, the same dim alike in all operators. The search itself:
`simulator/markov_chain.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtrain import axes
from shardtrain.plan.machine import Machine
from shardtrain.plan.prediction import Choice
from shardtrain.plan.simulator.markov_chain import (
    Searched,
    ShardedStep,
    random_shardings,
    search_shardings,
)
from shardtrain.plan.simulator.operator_shardings import ShardedOperators, Sharding
from shardtrain.plan.simulator.operators import SAME_DIM, Operator, Operators
from shardtrain.plan.simulator.program_operators import operators_of
from shardtrain.plan.space import layouts, mesh_text
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import axis_sizes, divisors
from shardtrain.sharding.layout import Layout


@dataclass(frozen=True, kw_only=True)
class OperatorPlan:
    """The result of a search over the shardings of operators.

    Args:
      space: the operators on a mesh.
      rules: the best layout by rules, as the command line takes it.
      by_rules: its sharding of each operator.
      searched: start -> what was found from it.
    """

    space: ShardedOperators
    rules: str
    by_rules: tuple[Sharding, ...]
    searched: Mapping[str, Searched]

    @property
    def best(self) -> Searched:
        """The best of all starts."""
        return min(self.searched.values(), key=lambda each: each.found.cost)


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
    """Search the shardings of all operators, from data parallelism, the best layout by rules, and at random.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: how many.
      layout: what layouts have in common: rules, and sizes of axes that are fixed.
      remat: what the backward computes again.
      proposals: of each start.
      seed: of all that is random.

    Raises:
      ValueError: there is one device alone, or no layout without a pipeline.
    """
    if num_devices == 1:
        raise ValueError("one device has no operators to shard; give 2 devices or more")
    graph = graph_of(subject, num_devices, remat)
    space, rules, by_rules = _best_by_rules(subject, machine, num_devices, layout, graph)
    starts = {
        "data parallel": _by_rules(space, Layout(mesh={axes.DATA: -1}), None),
        f"rules: {rules}": by_rules,
        "random": random_shardings(space, seed),
    }
    searched = {
        name: search_shardings(space, start, proposals=proposals, seed=seed) for name, start in starts.items()
    }
    return OperatorPlan(space=space, rules=rules, by_rules=by_rules, searched=searched)


def graph_of(subject: Subject, num_devices: int, remat: str | None) -> Operators:
    """Return the operators of a step of all examples at once."""
    one = subject.state(Choice(layout=Layout(mesh={axes.DATA: num_devices})), num_devices).figures
    ratio = one.optimizer / one.parameters
    return operators_of(subject.program(remat), subject.num_parameter_arrays, ratio)


def sharded_by_rules(
    graph: Operators, machine: Machine, sizes: Mapping[str, int], layout: Layout
) -> tuple[ShardedOperators, tuple[Sharding, ...]]:
    """Return operators on the mesh of a layout, and how its rules shard each.

    Args:
      graph: the operators.
      machine: the devices.
      sizes: axis -> size.
      layout: completed for the model.
    """
    space = ShardedOperators(graph=graph, machine=machine, sizes=_prime_axes(sizes))
    return space, _by_rules(space, layout, [axis.split()[0] for axis in space.sizes])


def _best_by_rules(
    subject: Subject, machine: Machine, num_devices: int, layout: Layout, graph: Operators
) -> tuple[ShardedOperators, str, tuple[Sharding, ...]]:
    """Return the layout whose rules give the fastest step, its mesh and its sharding of each operator."""
    found = []
    for each in layouts(num_devices, layout):
        sizes = axis_sizes(each.mesh, num_devices)
        # where a gathered weight is kept for the backward, ZeRO stages move the same
        if sizes[axes.PIPELINE] > 1 or each.zero != 3:
            continue
        try:
            completed = subject.state(Choice(layout=each), num_devices).layout
        except ValueError:
            continue
        space, shardings = sharded_by_rules(graph, machine, sizes, completed)
        found.append((ShardedStep(space, shardings).cost, len(found), space, mesh_text(each), shardings))
    if not found:
        raise ValueError(
            "no layout without a pipeline runs on these devices, and operators are compared with one; leave"
            " out --fixed pipeline, or use another number of devices"
        )
    _, _, space, rules, shardings = min(found)
    return space, rules, shardings


def _prime_axes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a mesh in which each axis is one of as many axes as its size has prime factors.

    >>> _prime_axes({"data": 6, "fsdp": 1, "tensor": 2})
    {'data 0': 2, 'data 1': 3, 'tensor 0': 2}
    """
    found = {}
    for axis, size in sizes.items():
        number = 0
        while size > 1:
            found[f"{axis} {number}"] = divisors(size)[1]
            size //= divisors(size)[1]
            number += 1
    return found


def _by_rules(
    space: ShardedOperators, layout: Layout, mesh_axes: Sequence[str] | None
) -> tuple[Sharding, ...]:
    """Return how rules shard each operator; None: the examples of a batch over all axes."""
    found = []
    for number, operator in enumerate(space.graph.operators):
        sharding: Sharding = (None,) * len(space.sizes)
        for position in range(len(sharding)):
            dims = [axes.BATCH] if mesh_axes is None else _ruled(operator, layout, mesh_axes[position])
            for dim in dims:
                tried = (*sharding[:position], dim, *sharding[position + 1 :])
                if sharding[position] is None and space.fits(number, tried):
                    sharding = tried
        found.append(sharding)
    return tuple(found)


def _ruled(operator: Operator, layout: Layout, axis: str) -> list[str]:
    """Return the dims of an operator that rules shard over an axis."""
    rules = layout.sharded_rules if operator.kind == "update" else layout.activation_rules
    rules = {**rules, axes.BATCH: layout.batch_axes}
    return [SAME_DIM.get(name, name) for name in sorted(operator.names) if axis in rules.get(name, ())]
