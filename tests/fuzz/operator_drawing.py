"""Draw a sharding of its own for each operator and parameter of a case. Next: `checked.py`."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from case import Case

import shardtrain as st
from shardtrain.functional.model import group_by_path
from shardtrain.functional.rng import new_key
from shardtrain.train_step.step import trace_operators
from shardtrain.trainer.config import Run, make_model

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))


def draw_operator_case(case: Case, number: int) -> Case:
    """Return a case with random shardings of operators, on 8 devices."""
    rng = random.Random(f"operators {case.seed} {number}")
    sizes = rng.choice(MESHES)
    names = sorted(rng.sample(("data", "fsdp", "tensor"), len(sizes)))
    remat = case.remat if case.remat in (None, "full", "dots", "none") else None
    mesh = dict(zip(names, sizes, strict=True))
    accumulate = min(case.accumulate, 2)
    case = replace(case, accumulate=accumulate, rows=16 * accumulate, samples=0, shares=(), packed=False)
    layout = {"unnamed": "replicate"} if case.names == "none" else {}
    return replace(
        case, mesh=mesh, layout=layout, remat=remat, operators=number + 1, schedule="1f1b", virtual=1
    )


def with_operators(case: Case, run: Run, samples: list[dict[str, np.ndarray]]) -> Run:
    """Return a run whose layout has the shardings that the number of the case draws."""
    rng, model = random.Random(case.operators), make_model(run)
    rows = case.rows // case.accumulate
    batch = {
        name: jax.ShapeDtypeStruct((rows, *np.shape(x)), np.asarray(x).dtype)
        for name, x in samples[0].items()
    }
    batch["weights"] = batch.get("weights", jax.ShapeDtypeStruct((rows,), np.float32))
    layout = run.strategy.layout
    # each axis splits something, so that rows of no replica are alone
    whole = replace(layout, operators={"": dict.fromkeys(case.mesh, "0")})
    found = trace_operators(model, run.loss, batch, whole, st.make_mesh(layout)).operators
    table: dict[str, Any] = {}
    for name, operator in found.items():
        if rng.random() < 0.8:
            table[name] = draw_shards(rng, operator.dims, case.mesh)
    for path, array in group_by_path(jax.eval_shape(model.init, new_key(0))[0]).items():
        if rng.random() < 0.5:
            dims = {str(number): size for number, size in enumerate(array.shape)}
            table[path] = draw_shards(rng, dims, case.mesh)
    return replace(run, strategy=replace(run.strategy, layout=replace(layout, operators=table)))


def draw_shards(rng: random.Random, dims: Mapping[str, int], mesh: Mapping[str, int]) -> dict[str, str]:
    """Draw the dim that each axis splits, or none; seldom one that it does not divide."""
    found: dict[str, str] = {}
    left = dict(dims)
    for axis in rng.sample(sorted(mesh), len(mesh)):
        fitting = [dim for dim, size in left.items() if size % mesh[axis] == 0 and size > 0]
        if fitting and rng.random() < 0.85:
            dim = rng.choice(fitting)
            left[dim] //= mesh[axis]
            found[axis] = dim
    return {axis: found[axis] for axis in mesh if axis in found}
