"""The compiled tasks of a stage: a backward in two halves costs what it costs in one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_language_model import TinyConfig

from shardtrain.data import place
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.pipeline.costs import Traced
from shardtrain.pipeline.cuts import make_partition
from shardtrain.pipeline.options import Pipeline
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.placement import make_placement
from shardtrain.train_step.stage_functions import StageFunctions, TaskInputs
from shardtrain.train_step.stage_programs import StagePrograms

STAGES, ROWS = 3, 4


def make_stage(stage, replicas):
    """The functions of a stage of so many devices, its parameters and a batch."""
    config = TinyConfig(vocab=32, seq=16, embed=32, mlp=64, num_layers=6, dropout=0.3, tied=False)
    model, layout = from_nnx(config), Layout(mesh={"data": replicas})
    mesh = make_mesh(layout, jax.devices()[:replicas])
    tokens = np.arange(ROWS * 17, dtype=np.int32).reshape(ROWS, 17) % 32
    batch = {"tokens": tokens, "weights": np.ones(ROWS, np.float32)}
    stages = make_partition(model, Pipeline(), STAGES, next_token_loss, batch)
    traced = Traced(model, next_token_loss, batch)
    stage_model = StageModel(model=model, stages=stages, traced=traced, stage=stage)
    placement = make_placement(stage_model.as_model(), optax.sgd(0.0), layout, mesh)
    flow = stage_model.flow(batch)
    functions = StageFunctions(stage_model, flow, placement, {}, start_row=0, train=True)
    params = init_state(stage_model.as_model(), optax.sgd(0.0), placement, 0).params
    return functions, params, place(batch, mesh, layout.batch_axes)


@pytest.mark.parametrize(
    ("stage", "replicas"),
    [pytest.param(0, 1, marks=pytest.mark.full), (1, 2), pytest.param(STAGES - 1, 1, marks=pytest.mark.full)],
)
def test_a_backward_and_a_weight_task_cost_one_backward_and_give_its_gradients(stage, replicas):
    functions, params, batch = make_stage(stage, replicas)
    flow, key = functions.flow, jax.random.key(1)

    def values(names, number):
        """An array for each value between parts, with a dim of replicas."""
        keys = jax.random.split(jax.random.key(number), len(names))
        shapes = (flow.shapes[name] for name in names)
        return {
            name: jax.random.normal(k, (replicas, x.shape[0] // replicas, *x.shape[1:]), x.dtype)
            for name, k, x in zip(names, keys, shapes, strict=True)
        }

    inputs, cotangents = values(flow.reads[stage], 2), values(flow.writes[stage], 3)
    found = []
    for has_weight in (False, True):
        programs = StagePrograms(functions)
        programs.begin(params, {}, key, batch, has_weight)
        programs.forward(stage, 0, inputs)
        sent = programs.backward(stage, 0, inputs, cotangents)
        if has_weight:
            programs.weight(stage, 0)
        found.append((sent, programs.take_sums()))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), *found)
    assert all(jnp.any(x != 0) for x in jax.tree.leaves(found[0][1].grads))

    # the same tasks as programs, for what they cost
    rows, first_rows, model_state = functions.by_replica(batch, {})
    given = (params, model_state, key, first_rows, rows, np.int32(0))
    task = TaskInputs(*given, list(inputs.values()), list(cotangents.values()))
    sums = functions.compiled(functions.initial_sums, stage)(task)
    whole = flops(functions.compiled(functions.backward, stage), sums, task)
    first = functions.compiled(functions.input_backward, stage)
    grads = first(sums, task)[-1].given(task)
    second = flops(functions.compiled(functions.weight, stage), sums, grads)
    assert whole * 0.98 < flops(first, sums, task) + second < whole * 1.02
    # the first stage sends no cotangents, so all of its backward is the weight task
    assert second > 0.95 * whole if stage == 0 else second < 0.6 * whole


def flops(compiled, *arguments):
    return compiled.lower(*arguments).compile().cost_analysis().get("flops", 0.0)
