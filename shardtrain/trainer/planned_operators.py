"""Write what a search over operators or layers found as the strategy of a run.

Next: `jaxpr/operators.py`, which names the operators; `planned.py`, strategies of layouts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod

import jax

from shardtrain import axes
from shardtrain.functional.model import group_by_path
from shardtrain.functional.rng import new_key
from shardtrain.jaxpr.operators import Operator
from shardtrain.plan.layers.compare import LayerPlan, is_even
from shardtrain.plan.layers.partition import TYPE_I, TYPE_II, TYPE_III, Split
from shardtrain.plan.operators.graph import Operator as PlannedOperator
from shardtrain.plan.operators.search import LayoutSearch
from shardtrain.plan.search import RankedChoice
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.sharding.single_arrays import OPERATOR_AXES, Shards, is_operator
from shardtrain.train_step.traced_operators import trace_operators
from shardtrain.trainer.config import Run, make_model
from shardtrain.trainer.strategy import Strategy

Batch = Mapping[str, jax.ShapeDtypeStruct]


def make_operator_choice(run: Run, batch: Batch, found: LayoutSearch) -> RankedChoice:
    """Return what a search found as a choice: its layout names the operators that rules do not shard.

    Args:
      run: the run.
      batch: name -> shape and dtype.
      found: the result of the search.
    """
    result, choice = found.result, found.layout.choice
    space, shapes = result.best.space, _shapes(run)
    operators = _trace(run, batch, choice.layout)
    table: dict[str, Shards] = {}
    for lead, members in space.graph.groups.items():
        if result.best.shardings[lead] == result.start.shardings[lead]:
            continue
        for number in members:
            each = space.graph.operators[number]
            if number == lead:
                dims = operators[each.scope].dims
            elif each.kind == "update":
                dims = {str(n): size for n, size in enumerate(shapes[each.scope])}
            else:
                continue
            pairs = zip(space.sizes, result.best.shardings[number], strict=True)
            split = {axis: dim for axis, dim in pairs if dim and axis != axes.DATA}
            table[each.scope] = _fit(dims, space.sizes, _list_named(each, dims, split))
    return RankedChoice(
        choice=replace(choice, layout=replace(choice.layout, operators=table)),
        prediction=found.prediction,
        fits=result.best.judged.fits,
        change=found.change,
    )


def make_layer_strategy(run: Run, batch: Batch, plan: LayerPlan) -> Strategy:
    """Return a run's strategy with the best partition of each layer: types are splits of operators.

    Args:
      run: the run.
      batch: name -> shape and dtype.
      plan: the partitions.

    Raises:
      ValueError: its parts are unequal, or too many levels differ.
    """
    name = plan.best_without_copies
    best = plan.ways[name]
    if not is_even(best):
        raise ValueError(
            f"the parts of {name} are unequal, and the devices of a mesh are equal: ratios of features are an"
            " analysis, and islands take unequal rows by --shares"
        )
    levels = [level.chosen for level in best.levels]
    # neighbouring levels that split all layers alike are one axis
    runs = [list(same) for _, same in groupby(levels, key=lambda chosen: [split.way for split in chosen])]
    if len(runs) > len(OPERATOR_AXES):
        raise ValueError(
            f"the {len(levels)} levels of {name} are {len(runs)} axes, and operators have"
            f" {', '.join(OPERATOR_AXES)}; plan for {2 ** len(OPERATOR_AXES)} devices"
        )
    sizes = {axis: 2 ** len(same) for axis, same in zip(OPERATOR_AXES, runs, strict=False)}
    # all axes split operators, so that no rows are a replica's
    whole = replace(run.strategy.layout, mesh=sizes, operators={"": dict.fromkeys(sizes, "0")})
    operators, shapes = _trace(run, batch, whole), _shapes(run)
    blocks: dict[str, dict[int, Shards]] = {}
    table: dict[str, Shards] = {}
    for number, layer in enumerate(plan.layers):
        if not layer.has_weights:
            continue
        ways = {axis: same[0][number] for axis, same in zip(sizes, runs, strict=True)}
        for path in layer.name.split(" + "):
            path, _, block = path.partition("[")
            for each in _find_operators(operators, path):
                shards = _fit(each.dims, sizes, {axis: _list_split(each, way) for axis, way in ways.items()})
                blocks.setdefault(each.name, {})[int(block.rstrip("]") or 0)] = shards
    for name, of_blocks in blocks.items():
        table |= _join_blocks(name, of_blocks)
        each = operators[name]
        if each.path in shapes:
            ((common, _),) = Counter(tuple(shards.items()) for shards in of_blocks.values()).most_common(1)
            if (stored := _store(each, dict(common), shapes[each.path])) is not None:
                table[each.path] = stored
    return _make_strategy(run, sizes, table)


def _trace(run: Run, batch: Batch, layout: Layout) -> Mapping[str, Operator]:
    """Return the operators of a run with a layout."""
    mesh = abstract_mesh(axis_sizes(layout.mesh, prod(layout.mesh.values())))
    return trace_operators(make_model(run), run.loss, batch, layout, mesh).operators


def _make_strategy(run: Run, sizes: Mapping[str, int], table: Mapping[str, Shards]) -> Strategy:
    """Return the strategy with a table."""
    by_rows = (
        shards.get(axes.DATA) == ("0" if is_operator(name) else None) for name, shards in table.items()
    )
    if all(by_rows):
        # then devices of data are replicas, which add up gradients once
        rest = {name: dict(shards) for name, shards in table.items()}
        for shards in rest.values():
            shards.pop(axes.DATA, None)
        table = rest
    own = {"mesh": dict(sizes), "operators": table, "sequence_sharded": False, "collective_matmul": False}
    layout = replace(run.strategy.layout, **own)
    return replace(run.strategy, layout=layout, accumulate=1, islands={})


def _shapes(run: Run) -> dict[str, tuple[int, ...]]:
    params = jax.eval_shape(make_model(run).init, new_key(0))[0]
    return {path: x.shape for path, x in group_by_path(params).items()}


def _list_named(
    each: PlannedOperator, dims: Mapping[str, int], split: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return axis -> the dims of an operator with the name that it splits; sums have the same sizes."""
    found = {}
    for axis, name in split.items():
        summed = [dim for dim, size in dims.items() if dim.startswith("sum") and size == each.sizes[name]]
        found[axis] = [str(n) for n, known in enumerate(each.result) if known == name] or summed
    return found


def _list_split(each: Operator, split: Split) -> list[str]:
    """Return the dims of an operator that a type splits, the first ones first."""
    if each.weight is None:
        return []
    weight, other = (each.operands[i] for i in (each.weight, 1 - each.weight))
    of_type = {
        TYPE_I: [dim for dim in other if dim.isdigit()][:1],
        TYPE_II: [dim for dim in weight if dim.startswith("sum")],
        TYPE_III: [dim for dim in weight if dim.isdigit()],
    }
    return of_type.get(split.way, [])


def _fit(dims: Mapping[str, int], sizes: Mapping[str, int], wanted: Mapping[str, Sequence[str]]) -> Shards:
    """Return axis -> the first of its dims that it divides; an axis without one splits nothing."""
    left, found = dict(dims), {}
    for axis, options in wanted.items():
        dim = next((dim for dim in options if dim in left and left[dim] % sizes[axis] == 0), None)
        if dim is not None:
            left[dim] //= sizes[axis]
            found[axis] = dim
    return found


def _find_operators(operators: Mapping[str, Operator], path: str) -> list[Operator]:
    """Return the operators that read a parameter, or else the one that reads a module's as one."""
    exact = [each for each in operators.values() if each.path == path and each.weight is not None]
    weighted = (each for each in operators.values() if each.weight is not None)
    return exact or [each for each in weighted if path.startswith(f"{each.path}/")][:1]


def _join_blocks(name: str, of_blocks: Mapping[int, Shards]) -> dict[str, Shards]:
    """Return the keys of an operator: blocks that are sharded alike are one range."""
    alike = groupby(sorted(of_blocks), key=lambda number: of_blocks[number])
    ranges = [(shards, list(numbers)) for shards, numbers in alike]
    if len(ranges) == 1:
        return {name: ranges[0][0]}
    return {f"{name}[{numbers[0]}-{numbers[-1]}]": shards for shards, numbers in ranges}


def _store(each: Operator, shards: Shards, shape: Sequence[int]) -> Shards | None:
    """Return the shards of a parameter as its operator reads it; None if it reads another form."""
    assert each.weight is not None
    names = each.operands[each.weight]
    before = len(shape) - len(names)
    if before != bool(each.num_blocks):
        return None
    if any(each.dims.get(dim, size) != size for dim, size in zip(names, shape[before:], strict=True)):
        return None
    return {axis: str(names.index(dim) + before) for axis, dim in shards.items() if dim in names}
