"""Models outside a run: built as a run begins, loaded as any layout has trained them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.origins import make_find_origins, select_saved_state
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.functional.model import path_text
from shardtrain.optim.optimizer_state import AverageState
from shardtrain.pipeline.stacking import Partition
from shardtrain.trainer.config import describe

CONFIG = TinyConfig(embed=16, mlp=64, num_layers=4, dropout=0.5)
TOKENS = jnp.arange(16).reshape(2, 8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run whose mesh stores the blocks out of their order, and shards each."""
    folder = tmp_path_factory.mktemp("run")
    layout, optimizer, pure = st.Layout(mesh={"pipeline": 2, "fsdp": 4}), optax.adam(1.0), st.from_nnx(CONFIG)
    stages = Partition(num_stages=2, num_chunks=2, counts=(1, 1, 1, 1))
    placement = st.make_placement(pure, optimizer, layout, st.make_mesh(layout), stages=stages)
    state = select_saved_state(st.init_state(pure, optimizer, placement, seed=5))
    with Checkpoints(folder / "checkpoints", CheckpointPolicy()) as checkpoints:
        checkpoints.save(2, state, {"run": describe(CONFIG, "model")}, make_find_origins(placement)(state))
    return folder


def test_a_run_of_a_pipeline_is_loaded_into_the_module(saved):
    model, begun = st.load(saved, CONFIG), st.build(CONFIG, seed=5)
    params = nnx.state(model, nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, params, nnx.state(begun, nnx.Param))
    assert jax.tree.leaves(params)[0].devices() == {jax.devices()[0]}
    # dropout is off, and may be switched on
    logits = model(TOKENS)
    np.testing.assert_array_equal(model(TOKENS), logits)
    training = nnx.view(model, deterministic=False, raise_if_not_found=False)
    assert jnp.abs(training(TOKENS) - logits).max() > 1e-3


def test_another_model_is_refused_with_its_arrays_and_options(saved):
    with pytest.raises(ValueError, match="is of another model than was given") as error:
        st.load(saved, replace(CONFIG, mlp=32, tied=False))
    lines = str(error.value).splitlines()[1:]
    assert lines == [
        "  - params/blocks/down: saved float32 (4, 64, 16), asked for float32 (4, 32, 16)",
        "  - params/blocks/up: saved float32 (4, 16, 64), asked for float32 (4, 16, 32)",
        "  - params/head: asked for float32 (16, 256), not saved",
        "  - of the run's options model.mlp: 64 -> 32; give the model with the first",
        "  - of the run's options model.tied: True -> False; give the model with the first",
    ]


def test_a_step_that_is_not_there_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match=r"holds no complete checkpoint of step 7: it has steps \[2\]"):
        st.load(saved, CONFIG, step=7)
    with pytest.raises(ValueError, match="nothing does not exist; give the folder of a run"):
        st.load(saved / "nothing", CONFIG)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"has safetensors, but no config\.json; put that file"):
        st.load(tmp_path, CONFIG)


class Normed(nnx.Module):
    """With names on a parameter, which Flax alone cannot make without a mesh, and running statistics."""

    def __init__(self, rngs: nnx.Rngs):
        named = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.layers = nnx.List([nnx.Linear(4, 4, kernel_init=named, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.dropout(self.norm(x))


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))


def shifted_checkpoint(folder, pure):
    """A checkpoint of the model as seed 0 begins it, with 1 added to every number."""
    params, model_state = pure.init(jax.random.key(0))
    tree = {"params": params, "model_state": model_state}
    arrays = {path_text(path): jnp.asarray(x) + 1 for path, x in jax.tree.leaves_with_path(tree)}
    with Checkpoints(folder / "checkpoints", CheckpointPolicy()) as checkpoints:
        checkpoints.save(3, arrays, {"run": {}})
    return {name.partition("/")[2]: np.asarray(x) for name, x in arrays.items()}


def test_running_statistics_come_with_the_parameters_of_an_nnx_module(tmp_path):
    with pytest.raises(ValueError, match="An auto mesh context or metadata is required"):
        Normed(nnx.Rngs(0))
    expected = shifted_checkpoint(tmp_path, st.from_nnx(Normed))
    model = st.load(tmp_path, Normed)
    found = {
        "/".join(map(str, path)): np.asarray(variable[...])
        for path, variable in nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    }
    assert found.keys() == expected.keys() >= {"layers/1/kernel", "norm/mean"}
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    # running averages are used: a row does not depend on the others
    x = jnp.arange(8.0).reshape(2, 4)
    np.testing.assert_allclose(model(x)[:1], model(x[:1]), rtol=1e-6)


def test_what_is_loaded_is_what_the_run_evaluates(tmp_path):
    """The average of its parameters; running statistics have none."""
    pure = st.from_nnx(Normed)
    params, model_state = pure.init(jax.random.key(0))
    average = jax.tree.map(lambda x: x + 2, params)
    opt_state = (optax.EmptyState(), AverageState(jnp.int32(1), average))
    tree = {"params": params, "model_state": model_state, "opt_state": opt_state}
    arrays = {path_text(path): x for path, x in jax.tree.leaves_with_path(tree)}

    with Checkpoints(tmp_path / "checkpoints", CheckpointPolicy()) as checkpoints:
        checkpoints.save(1, arrays, {"run": {"evaluate_with": "ema"}})
        checkpoints.save(2, arrays, {"run": {"evaluate_with": "runs:mine"}})
    for evaluated, expected in ((True, average), (False, params)):
        model = st.load(tmp_path, Normed, step=1, evaluated=evaluated)
        np.testing.assert_array_equal(model.norm.scale[...], expected["norm"]["scale"])
        np.testing.assert_array_equal(model.norm.mean[...], 0)
    with pytest.raises(ValueError, match=r"runs:mine, a function .*load\(run_dir, model, evaluated=False\)"):
        st.load(tmp_path, Normed)


def test_of_a_linen_model_the_variables_are_loaded(tmp_path):
    pure = st.from_linen(LinenNormed(), jax.ShapeDtypeStruct((1, 3), jnp.float32))
    expected = shifted_checkpoint(tmp_path, pure)
    variables = st.load(tmp_path, pure)
    assert variables.keys() == {"params", "batch_stats"} == st.build(pure).keys()
    for path, x in jax.tree.leaves_with_path(variables):
        np.testing.assert_array_equal(x, expected[path_text(path).removeprefix("params/")])
    outputs = LinenNormed().apply(variables, jnp.ones((2, 3)))
    assert isinstance(outputs, jax.Array)
    assert outputs.shape == (2, 4)


def test_a_model_is_built_as_a_run_begins():
    layout = st.Layout(mesh={"data": 8}, unnamed="replicate")
    optimizer, model = optax.sgd(1.0), st.from_nnx(Normed)
    placement = st.make_placement(model, optimizer, layout, st.make_mesh(layout))
    expected = st.init_state(model, optimizer, placement, seed=5).params
    found = nnx.to_pure_dict(nnx.state(st.build(Normed, seed=5), nnx.Param))
    np.testing.assert_array_equal(found["layers"][1]["kernel"], expected["layers"]["1"]["kernel"])
