"""Shardings of single operators: the seconds of the planner for its rules, the best of small graphs."""

import random
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from planned_steps import subject_of

from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.machine import Link, Machine, Rates
from shardtrain.plan.operators.graph import Operator, Operators, Part, Use, Value, trace_operators
from shardtrain.plan.operators.search import (
    plan_operators,
    search_shardings,
    shard_by_rules,
    trace_whole_step,
)
from shardtrain.plan.operators.shardings import Rest, ShardedOperators, ShardedStep
from shardtrain.plan.predict import predict_choices
from shardtrain.plan.prediction import Choice
from shardtrain.plan.search import search
from shardtrain.plan.space import Space
from shardtrain.plan.trace import trace
from shardtrain.report.operators import operators_text
from shardtrain.report.quantities import bytes_text
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


def planned(subject, num_devices, mesh, machine=MACHINE):
    space = Space(layout=Layout(mesh=mesh), accumulates=(1,), remats=("none",))
    best, *_ = search(subject, machine, num_devices, space, most=1).ranked
    return plan_operators(subject, machine, num_devices, space=space, best=best)


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
    kinds = [each.kind for each in graph.operators]
    computed = sum(step.computed[number] for number, kind in enumerate(kinds) if kind != "update")
    assert computed == pytest.approx(predicted.seconds.compute, rel=0.01)
    # an embedding's gradient has two parts
    sent = sum(step.sum_moves("seconds").values())
    theory = sum(predicted.seconds.collectives.values())
    assert theory * 0.99 <= sent <= theory * (1 + extra)


def test_a_change_gives_the_step_that_is_made_anew(subject):
    (searched,) = planned(subject, 4, {"data": 2, "tensor": 2}).searched
    space = searched.result.start.space
    step = ShardedStep.of(space, draw_shardings(space, seed=1))
    rng = random.Random(0)
    others = [draw_shardings(space, seed=seed) for seed in range(2, 5)]
    for _ in range(15):
        other = rng.choice(others)
        step = step.changed({i: other[i] for i in rng.sample(range(len(other)), rng.choice([1, 1, 3]))})
        anew = ShardedStep.of(space, step.shardings)
        assert (step.computed, step.moved) == (anew.computed, anew.moved)


def moved(made, required, result=("rows", "columns"), sizes=(4, 2), **use):
    """Kind, axes and bytes of the collectives of a value of 1,024 bytes between two operators."""
    of = {"names": frozenset(), "sizes": {"rows": 8, "columns": 8, "other": 8}, "work": ()}
    operators = tuple(Operator(name=name, kind="forward", result=result, **of) for name in "ab")
    uses = (Use(operator=1, messages=1, num_bytes=1024.0),)
    if use:
        uses += (Use(operator=1, messages=1, num_bytes=1024.0, **use),)
    graph = Operators(
        operators=operators, values=(Value(dims=frozenset(("rows", "columns")), source=0, uses=uses),)
    )
    space = ShardedOperators(
        graph=graph, machine=MACHINE, sizes=dict(zip(("fsdp", "tensor"), sizes, strict=True))
    )
    return [(each.kind, each.axes, each.num_bytes) for each in space.moves(0, (made, required))]


def test_values_move_as_compilers_move_them():
    whole = (None, None)
    # dim by dim, the last first: a device sends 1/2 of 1/4, then 3/4
    gathers = [("all-gather", ("tensor",), 128.0), ("all-gather", ("fsdp",), 768.0)]
    assert moved(("rows", "columns"), whole) == gathers
    assert moved(("rows", "columns"), whole, ("columns", "rows")) == [
        ("all-gather", ("fsdp",), 384.0),
        ("all-gather", ("tensor",), 512.0),
    ]
    assert moved(("rows", "rows"), whole) == [("all-gather", ("fsdp", "tensor"), 896.0)]
    # tensor, which stays, is not the slowest axis of the rows: parts change devices
    assert moved(("rows", "rows"), (None, "rows")) == [
        ("all-gather", ("fsdp",), 384.0),
        ("collective-permute", ("fsdp", "tensor"), 128.0),
    ]
    assert moved(("rows", "rows"), ("rows", None)) == [("all-gather", ("tensor",), 128.0)]
    assert moved(("other", "rows"), ("rows", "rows")) == [
        ("all-reduce", ("fsdp",), 768.0),
        ("collective-permute", ("fsdp", "tensor"), 128.0),
    ]
    assert moved(("other", None), ("rows", None)) == [("reduce-scatter", ("fsdp",), 768.0)]
    # a backward that is computed again gathers again, and has the sums of before
    assert moved(("rows", "columns"), whole, recomputes=True) == 2 * gathers
    assert moved(("other", None), whole, recomputes=True) == [("all-reduce", ("fsdp",), 1536.0)]


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
        Value(dims=mlp, source=3, uses=(Use(operator=0, messages=1, num_bytes=weight),)),
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
    start = ShardedStep.of(space, draw_shardings(space, seed))
    found = search_shardings(start)
    assert found.best.judged.cost == pytest.approx(best, rel=1e-12)
    assert found.best.judged.cost <= found.start.judged.cost
    again = search_shardings(start)
    assert found.best.shardings == again.best.shardings


def test_the_best_sends_no_more_than_allowed():
    space = ShardedOperators(graph=small_graph(0), machine=MACHINE, sizes={"slow": 2, "fast": 2})
    whole = ShardedStep.of(space, ((None, None),) * 4)
    sent = search_shardings(whole).best.sent_bytes
    found = search_shardings(whole, most_bytes=sent / 2)
    assert found.best.sent_bytes <= sent / 2 < sent


def test_a_search_ends_if_a_layout_takes_less_than_its_operators():
    space = ShardedOperators(
        graph=small_graph(0), machine=MACHINE, sizes={"slow": 2, "fast": 2}, rest=Rest(-1e3, 0.0)
    )
    found = search_shardings(ShardedStep.of(space, ((None, None),) * 4))
    assert found.best.judged.seconds == pytest.approx(sum(found.best.computed.values()))


def test_a_step_that_does_not_fit_costs_more():
    graph = small_graph(0)
    whole = ((None,),) * 4
    space = ShardedOperators(graph=graph, machine=MACHINE, sizes={"all": 2})
    needed = space.kept_bytes(whole)
    assert (needed, space.activation_bytes(whole)) == (graph.operators[3].kept_bytes, 0)
    half = Machine(rates=Rates(flops_per_second=1e12, memory_bytes=needed / 2))
    small = ShardedOperators(graph=graph, machine=half, sizes={"all": 2})
    step = ShardedStep.of(small, whole)
    seconds = sum(step.computed.values()) + sum(step.sum_moves("seconds").values())
    assert step.judged == (21 * seconds, seconds, False)
    step = step.changed({3: ("mlp",)})
    assert step.judged.cost == step.judged.seconds
    with pytest.raises(ValueError, match=r"operator 3, weight, cannot be sharded by \('batch',\)"):
        ShardedStep.of(space, [*whole[:3], ("batch",)])


def test_what_is_found_is_no_worse_than_rules(subject):
    config = DecoderConfig(vocab=512, seq=32, embed=256, num_layers=2, num_heads=8, mlp=1024)
    fast = replace(MACHINE, rates=replace(MACHINE.rates, flops_per_second=1e14, memory_bytes_per_second=1e12))
    found = planned(subject_of(config, rows=8), 8, {}, fast)
    assert len(found.searched) == 3
    for each in found.searched:
        start, best = each.result.start, each.result.best
        # the prediction of the layout, and what was found is its change
        assert start.judged.seconds == pytest.approx(each.layout.prediction.seconds.total)
        assert best.judged.seconds == pytest.approx(each.prediction.seconds.total)
        assert best.judged.cost <= start.judged.cost
        assert best is start or each.sent_bytes <= found.best_bytes
    assert found.best is not None
    text = operators_text(found)
    assert "operators: searched from --mesh tensor=8" in text
    assert f"less time than the best layout; a device sends {bytes_text(found.best.sent_bytes)}" in text
    assert "nothing that is better, and sends no more" in operators_text(planned(subject, 4, {}))
    assert "no layout to start from" in operators_text(replace(found, searched=[]))
    with pytest.raises(ValueError, match="one device has no operators to shard"):
        planned(subject, 1, {})
    with pytest.raises(ValueError, match="no layout over only data, fsdp, tensor runs on these devices"):
        planned(subject, 7, {"pipeline": 7})


def test_sums_of_a_derivative_are_sent_once():
    x, weights = jax.ShapeDtypeStruct((8, 16), float), jax.ShapeDtypeStruct((16, 4), float)

    def loss(weights, x):
        found = jnp.tanh(jnp.tanh(x @ weights[0]))
        return jnp.tanh(found @ weights[1]).sum() + jnp.tanh(found @ weights[2]).sum()

    shapes = [weights, *2 * [jax.ShapeDtypeStruct((4, 4), float)]]
    names = [("embed", "mlp"), ("mlp", "heads"), ("mlp", "heads")]
    program = trace(
        jax.value_and_grad(loss), (shapes, x), [*names, ("batch", None)], [None, *names], [False, *3 * [True]]
    )
    graph = trace_operators(program, ["first", "second", "third"], 1.0)
    added = [value for value in graph.values if value.added]
    assert [graph.operators[value.source].name for value in added] == ["dot_general (batch, mlp)"]
    space = ShardedOperators(graph=graph, machine=MACHINE, sizes={"tensor": 2})
    (number,) = (i for i, value in enumerate(graph.values) if value.added)
    split = [("heads",) if space.fits(i, ("heads",)) else (None,) for i in range(len(graph.operators))]
    assert list(space.moves(number, split)) == []
    split[added[0].added[0]] = (None,)
    assert [each.kind for each in space.moves(number, split)] == ["all-reduce"]
