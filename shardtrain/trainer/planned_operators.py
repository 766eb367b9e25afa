"""Write what a search over operators found as the strategy of a run.

Next: `jaxpr/operators.py`, which names the operators; `planned.py`, strategies of layouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import jax

from shardtrain import axes
from shardtrain.functional.model import group_by_path
from shardtrain.functional.rng import new_key
from shardtrain.plan.operators.graph import Operator as PlannedOperator
from shardtrain.plan.operators.search import LayoutSearch
from shardtrain.plan.search import RankedChoice
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.sharding.single_arrays import Shards
from shardtrain.train_step.step import trace_operators
from shardtrain.trainer.config import Run, make_model


def make_operator_choice(
    run: Run, batch: Mapping[str, jax.ShapeDtypeStruct], found: LayoutSearch
) -> RankedChoice:
    """Return what a search found as a choice: its layout names the operators that rules do not shard.

    Args:
      run: the run.
      batch: name -> shape and dtype.
      found: the result of the search.

    Raises:
      ValueError: it shards an operator that a run does not.
    """
    result, choice = found.result, found.layout.choice
    space, model = result.best.space, make_model(run)
    shapes = {p: x.shape for p, x in group_by_path(jax.eval_shape(model.init, new_key(0))[0]).items()}
    mesh = abstract_mesh(axis_sizes(choice.layout.mesh, prod(choice.layout.mesh.values())))
    operators = trace_operators(model, run.loss, batch, choice.layout, mesh).operators
    table: dict[str, Shards] = {}
    for lead, members in space.graph.groups.items():
        if result.best.shardings[lead] == result.start.shardings[lead]:
            continue
        for number in members:
            each = space.graph.operators[number]
            if number == lead and each.scope not in operators:
                raise ValueError(
                    f"a run computes {each.scope} by code for each device, and the search would shard it;"
                    " use the best layout"
                )
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


def _list_named(
    each: PlannedOperator, dims: Mapping[str, int], split: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return axis -> the dims of an operator with the name that it splits; sums have the same sizes."""
    found = {}
    for axis, name in split.items():
        summed = [dim for dim, size in dims.items() if dim.startswith("sum") and size == each.sizes[name]]
        found[axis] = [str(n) for n, known in enumerate(each.result) if known == name] or summed
    return found


def _fit(dims: Mapping[str, int], sizes: Mapping[str, int], wanted: Mapping[str, Sequence[str]]) -> Shards:
    """Return axis -> the first of its dims that it divides; an axis without one splits nothing."""
    left, found = dict(dims), {}
    for axis, options in wanted.items():
        dim = next((dim for dim in options if dim in left and left[dim] % sizes[axis] == 0), None)
        if dim is not None:
            left[dim] //= sizes[axis]
            found[axis] = dim
    return found
