"""Shardings of single operators: the seconds of the planner for its rules, the best of small graphs."""

import random
from itertools import product

import pytest
from planned_steps import subject_of

from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.machine import Link, Machine, Rates
from shardtrain.plan.predict import predict_choices
from shardtrain.plan.prediction import Choice
from shardtrain.plan.simulator.operator_search import (
    OperatorPlan,
    SearchResult,
    ShardedStep,
    plan_operators,
    search_shardings,
    shard_by_rules,
    trace_whole_step,
)
from shardtrain.plan.simulator.operator_shardings import ShardedOperators
from shardtrain.plan.simulator.operators import Operator, Operators, Part, Use, Value
from shardtrain.plan.simulator.task_graph import simulate
from shardtrain.report.operators import operators_text
from shardtrain.report.quantities import seconds_text
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout

MACHINE = Machine(
    rates=Rates(flops_per_second=1e12, memory_bytes_per_second=1e11, kernel_seconds=1e-6, memory_bytes=1e10),
    devices_per_node=4,
    device_link=Link(bytes_per_second=3e10),
    node_link=Link(bytes_per_second=1e10),
)


@pytest.fixture(scope="module")
def subject():
    return subject_of(DecoderConfig(vocab=64, seq=64, embed=32, num_layers=7, num_heads=4, mlp=128), rows=24)


def planned(subject, num_devices, mesh, proposals=0):
    return plan_operators(
        subject, MACHINE, num_devices, layout=Layout(mesh=mesh), remat="none", proposals=proposals, seed=0
    )


def draw_shardings(space, seed=0):
    """A random sharding of each operator."""
    rng, found = random.Random(seed), []
    for number, operator in enumerate(space.graph.operators):
        options = product((None, *operator.sizes), repeat=len(space.sizes))
        found.append(rng.choice([each for each in options if space.fits(number, each)]))
    return tuple(found)


@pytest.mark.parametrize(
    ("mesh", "extra"), [({"tensor": 4}, 0.01), ({"data": 8}, 0.2), ({"data": 3}, 0.2), ({"fsdp": 4}, 0.2)]
)
def test_rules_take_what_the_planner_predicts(subject, mesh, extra):
    (number,) = mesh.values()
    choice = Choice(layout=Layout(mesh=mesh), remat="none")
    (predicted,) = predict_choices(subject, MACHINE, number, [choice])
    completed = subject.state(choice, number).layout
    graph = trace_whole_step(subject, number, "none")
    step = shard_by_rules(graph, MACHINE, axis_sizes(mesh, number), completed)
    tasks = step.tasks.values()
    computed = sum(task.seconds for task in tasks if task.kind in ("forward", "backward"))
    assert computed == pytest.approx(predicted.seconds.compute, rel=0.01)
    # partial sums that are added are each completed here, and an embedding's gradient has two
    sent = sum(task.seconds for task in tasks if task.kind == "collective")
    theory = sum(predicted.seconds.collectives.values())
    assert theory * 0.99 <= sent <= theory * (1 + extra)
    assert step.judged.cost <= sum(task.seconds for task in tasks)


def test_a_change_gives_the_step_that_is_made_anew(subject):
    space = planned(subject, 4, {"data": 2, "tensor": 2}).by_rules.space
    step = ShardedStep.of(space, draw_shardings(space, seed=1))
    rng = random.Random(0)
    others = [draw_shardings(space, seed=seed) for seed in range(2, 5)]
    for _ in range(15):
        other = rng.choice(others)
        step = step.changed({i: other[i] for i in rng.sample(range(len(other)), rng.choice([1, 1, 3]))})
        assert step.tasks == ShardedStep.of(space, step.shardings).tasks


def small_graph(seed):
    """A product, an elementwise chain, a product back, and two parameters, of random sizes."""
    rng = random.Random(seed)
    rows, wide = rng.choice([8, 64, 512]), rng.choice([8, 64, 512])
    batch, mlp, both = frozenset({"batch"}), frozenset({"mlp"}), frozenset({"batch", "mlp"})
    hidden, weight, out = 4e3 * rows * wide, 4e3 * wide, 4e3 * rows

    def operator(name, kind, flops, dims, arrays, kept=0.0):
        sizes = {dim: {"batch": rows, "mlp": wide}[dim] for dim in dims}
        moved = tuple(Part(size, of) for size, of in arrays)
        work = ((Part(flops, frozenset(dims)), moved, 1),)
        names, choices = frozenset(dims), tuple(sorted(dims))
        return Operator(
            name=name, kind=kind, names=names, sizes=sizes, work=work, kept_bytes=kept, choices=choices
        )

    up = operator("up", "forward", 1e6 * rows * wide, both, [(out, batch), (weight, mlp), (hidden, both)])
    act = operator("tanh", "forward", 0.0, both, [(hidden, both), (hidden, both)])
    down = operator("down", "forward", 1e6 * rows * wide, both, [(hidden, both), (out, batch)])
    first = operator("weight", "update", 0.0, mlp, [(3 * weight, mlp)], kept=4 * weight)
    values = (
        Value(dims=both, source=0, uses=(Use(operator=1, messages=1, num_bytes=hidden),)),
        Value(dims=both, source=1, uses=(Use(operator=2, messages=1, num_bytes=hidden),)),
        Value(dims=batch, source=2, uses=(Use(operator=3, messages=1, num_bytes=out),)),
        Value(dims=mlp, source=3, uses=(Use(operator=0, messages=1, num_bytes=weight),), is_parameter=True),
    )
    return Operators(operators=(up, act, down, first), values=values)


@pytest.mark.parametrize("seed", range(2))
def test_the_best_of_a_small_graph_is_found(seed):
    space = ShardedOperators(graph=small_graph(seed), machine=MACHINE, sizes={"slow": 2, "fast": 2})
    every = [
        [each for each in product((None, *sorted(one.sizes)), repeat=2) if space.fits(number, each)]
        for number, one in enumerate(space.graph.operators)
    ]
    best = min(ShardedStep.of(space, shardings).judged.cost for shardings in product(*every))
    found = search_shardings(space, draw_shardings(space, seed), proposals=400, seed=seed)
    assert found.best.judged.cost == pytest.approx(best, rel=1e-12)
    assert found.best.judged.cost <= found.start.judged.cost
    again = search_shardings(space, draw_shardings(space, seed), proposals=400, seed=seed)
    assert found.best.shardings == again.best.shardings


def test_the_best_sends_no_more_than_allowed():
    space = ShardedOperators(graph=small_graph(0), machine=MACHINE, sizes={"slow": 2, "fast": 2})
    whole = ((None, None),) * 4
    sent = sum(search_shardings(space, whole, proposals=200).best.sent_bytes.values())
    found = search_shardings(space, whole, proposals=200, most_bytes=sent / 2)
    assert sum(found.best.sent_bytes.values()) <= sent / 2 < sent


def test_a_step_that_does_not_fit_costs_more():
    graph = small_graph(0)
    whole = ((None,),) * 4
    space = ShardedOperators(graph=graph, machine=MACHINE, sizes={"all": 2})
    needed = space.memory_bytes(whole)
    assert needed == graph.operators[3].kept_bytes
    half = Machine(rates=Rates(flops_per_second=1e12, memory_bytes=needed / 2))
    small = ShardedOperators(graph=graph, machine=half, sizes={"all": 2})
    step = ShardedStep.of(small, whole)
    assert step.judged == (21 * simulate(step.tasks).makespan, simulate(step.tasks).makespan, False)
    layout = Layout(mesh={"data": 2})
    plan = OperatorPlan(
        layout=layout, by_rules=step, searched=[(layout, SearchResult(start=step, best=step, accepted=0))]
    )
    # seconds, without what a search adds to them
    assert operators_text(plan, 0).count(f"{seconds_text(step.judged.seconds)}, too large") == 2
    step = step.changed({3: ("mlp",)})
    assert step.judged.cost == step.judged.seconds
    with pytest.raises(ValueError, match=r"operator 3, weight, cannot be sharded by \('batch',\)"):
        ShardedStep.of(space, [*whole[:3], ("batch",)])


def test_what_is_found_is_no_worse_than_rules(subject):
    found = planned(subject, 4, {}, proposals=60)
    sent = sum(found.by_rules.sent_bytes.values())
    for _, each in found.searched:
        assert each.best.judged.cost <= each.start.judged.cost
        assert each.best is each.start or sum(each.best.sent_bytes.values()) <= sent
    assert operators_text(found, 60).count("operators, 60 proposals") == 1
    with pytest.raises(ValueError, match="one device has no operators to shard"):
        planned(subject, 1, {})
    with pytest.raises(ValueError, match="no layout over only data, fsdp, tensor runs on these devices"):
        planned(subject, 7, {"pipeline": 7})
