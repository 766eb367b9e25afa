"""What is saved is in the model's own order, whatever pipeline the mesh has; and comes back as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardtrain.layout import Layout
from shardtrain.mesh import make_mesh
from shardtrain.model import from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.pipeline.rows import Stages
from shardtrain.saved import from_saved, saved_state, to_saved
from shardtrain.state import init_state, make_placement

MODEL = from_nnx(DecoderConfig(vocab=32, seq=8, embed=16, num_layers=5, num_heads=2, mlp=32))
OPTIMIZER = optax.adam(1e-3)


def placed(sizes, stages=None):
    layout = Layout(mesh=sizes)
    mesh = make_mesh(layout, jax.devices()[: int(np.prod(list(sizes.values())))])
    placement = make_placement(MODEL, OPTIMIZER, layout, mesh, stages=stages)
    # moments that differ from zero, and from each other
    state = init_state(MODEL, OPTIMIZER, placement, seed=3)
    return placement, state


def with_moments(placement, state):
    adam, *rest = state.opt_state
    moments = jax.tree.map(lambda x: x * 2, state.params)
    opt_state = (adam._replace(mu=moments), *rest)
    return jax.device_put(state._replace(opt_state=opt_state), placement.state)


@pytest.mark.parametrize(
    ("sizes", "stages"),
    [
        ({"pipeline": 4}, Stages(num_stages=4, counts=(1, 2, 1, 1))),
        ({"pipeline": 2, "fsdp": 2}, Stages(num_stages=2, num_chunks=2, counts=(1, 2, 1, 1))),
    ],
    ids=["filled up", "interleaved"],
)
def test_a_pipelines_state_is_saved_as_one_device_would(sizes, stages):
    one = with_moments(*placed({"data": 1}))
    placement, state = placed(sizes, stages)
    state = with_moments(placement, state)
    saved = to_saved(placement)(state)
    jax.tree.map(np.testing.assert_array_equal, saved, one)
    abstract = saved_state(placement)
    for (path, a), b in zip(jax.tree.leaves_with_path(abstract), jax.tree.leaves(saved), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim), path
    # a device holds a share of it still, where another dim divides
    kernel = abstract.params["blocks"]["mlp"]["up"]["kernel"]
    assert "pipeline" in str(kernel.sharding.spec)
    back = from_saved(placement)(saved)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_factored_moments_and_what_a_combiner_keeps_are_saved_too():
    factored = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    layout, stages = Layout(mesh={"pipeline": 2}), Stages(num_stages=2, counts=(3, 2))
    mesh = make_mesh(layout, jax.devices()[:2])
    placement = make_placement(MODEL, factored, layout, mesh, stages=stages)
    state = init_state(MODEL, factored, placement)
    # rows that are told apart, as the mesh has them
    number = jnp.asarray(stages.rows, jnp.float32)
    opt_state = jax.tree.map(
        lambda x: x + number.reshape(-1, *[1] * (x.ndim - 1)) if x.shape[:1] == (6,) else x, state.opt_state
    )
    kept = [{"x": jnp.ones(3)}]
    saved = to_saved(placement)(state._replace(opt_state=opt_state, combine_state=kept))
    assert saved.combine_state is kept
    moments = jax.tree.leaves_with_path(saved.opt_state)
    rows = [np.asarray(x) for path, x in moments if "v_row" in str(path) and "kernel" in str(path)]
    rows = [x for x in rows if x.shape[0] == 5]
    assert len(rows) == 6  # q, k, v, o, up, down
    for x in rows:
        np.testing.assert_array_equal(x.reshape(5, -1)[:, 0], np.arange(5))


def test_stages_that_are_stored_in_order_are_saved_as_they_lie():
    model = from_nnx(DecoderConfig(vocab=32, seq=8, embed=16, num_layers=4, num_heads=2, mlp=32))
    layout = Layout(mesh={"pipeline": 2})
    mesh = make_mesh(layout, jax.devices()[:2])
    stages = Stages(num_stages=2, counts=(2, 2))
    placement = make_placement(model, OPTIMIZER, layout, mesh, stages=stages)
    state = init_state(model, OPTIMIZER, placement)
    assert to_saved(placement)(state) is state
