"""A function over the replicas of a mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardtrain.functional.nnx_model import convert_model
from shardtrain.models.mlp import MlpConfig
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import make_placement
from shardtrain.train_step.replica_sums import map_replicas

MODEL = convert_model(MlpConfig(features=4, mlp=4, num_layers=1, classes=2))


def placed(num_replicas):
    layout = Layout(mesh={"data": num_replicas})
    return make_placement(MODEL, optax.sgd(0.1), layout, make_mesh(layout, jax.devices()[:num_replicas]))


def test_a_function_may_have_callbacks():
    seen = []

    def function(x):
        jax.debug.callback(lambda x: seen.append(float(x.sum())), x)
        return 2 * x

    run = jax.jit(map_replicas(function, (0,), placed(2)))
    np.testing.assert_allclose(run(np.arange(4.0).reshape(2, 2)), [[0, 2], [4, 6]])
    jax.effects_barrier()
    assert sorted(seen) == [1, 5]


@pytest.mark.parametrize(
    ("num_replicas", "in_parts", "shape"), [(1, True, "4,8"), (2, False, "4,8"), (2, True, "2,4,8")]
)
def test_arrays_of_several_replicas_have_a_dim_more_only_where_the_program_is_cut(
    num_replicas, in_parts, shape
):
    run = map_replicas(jnp.tanh, (0,), replace(placed(num_replicas), in_parts=in_parts))
    traced = jax.make_jaxpr(run)(jnp.ones((num_replicas, 4, 8)))
    [line] = [line for line in str(traced).splitlines() if " tanh " in line]
    assert f":f32[{shape}] = tanh" in line
