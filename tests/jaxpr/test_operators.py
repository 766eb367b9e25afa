"""Operators of a traced loss have names, and shardings of their own give the gradients of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from shardtrain.jaxpr.operators import OperatorPass, run_operators, shard_operators

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
X = jnp.linspace(-1, 1, 8 * 4 * 6).reshape(8, 4, 6)
TABLE = jnp.linspace(0, 1, 16 * 6).reshape(16, 6)


def make_weights():
    keys = jax.random.split(jax.random.key(0), 3)
    up, down, kernel = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, ((3, 6, 8), (3, 8, 6), (3, 6, 4)), strict=True)
    )
    up, down = up / 3, down / 3
    return {"blocks": {"up": up, "down": down}, "first": {"kernel": kernel}, "table": TABLE}


def loss(weights, x):
    """A convolution along positions, looked-up rows, residual blocks in a scan, scores without weights."""
    first = jnp.concatenate([weights["first"]["kernel"]] * 2, -1)[..., :6]
    x = lax.conv_general_dilated(x, first, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    x = x + weights["table"][jnp.arange(32).reshape(8, 4) % 16 + x[..., 0].astype(int) * 0]

    @jax.checkpoint
    def block(x, own):
        return x + jnp.tanh(x @ own["up"]) @ own["down"], None

    x, _ = lax.scan(block, x, weights["blocks"])
    return jnp.tanh(x @ jnp.swapaxes(x, 1, 2)).sum() + (x**2).mean()


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2, 2, 2), tuple(SIZES), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        yield mesh


def check(table, num_scans=1):
    weights = make_weights()
    sharded = shard_operators(loss, table, SIZES)
    found = jax.jit(jax.value_and_grad(sharded))(weights, X)
    expected = jax.value_and_grad(loss)(weights, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    traced = jax.make_jaxpr(sharded)(weights, X)
    assert sum(each.primitive.name == "scan" for each in traced.eqns) == num_scans


def test_operators_have_the_paths_of_their_parameters():
    each = OperatorPass(sizes=SIZES)
    jax.eval_shape(run_operators(loss, each), make_weights(), X)
    dims = {name: (dict(found.dims), found.num_blocks) for name, found in each.operators.items()}
    assert dims == {
        "first/kernel:conv_general_dilated": ({"0": 8, "2": 6, "sum0": 6}, 0),
        "table:gather": ({"0": 8, "1": 4, "2": 6}, 0),
        "blocks/up:dot_general": ({"0": 8, "1": 4, "2": 8, "sum0": 6}, 3),
        "blocks/down:dot_general": ({"0": 8, "1": 4, "2": 6, "sum0": 8}, 3),
        ":dot_general": ({"0": 8, "1": 4, "2": 4, "sum0": 6}, 0),
    }


def test_splits_of_rows_features_and_sums_give_the_gradients_of_one_device(mesh):
    check(
        {
            "first/kernel:conv_general_dilated": {"data": "0", "fsdp": "2", "tensor": "sum0"},
            "table:gather": {"data": "1", "fsdp": "0", "tensor": "2"},
            "blocks/up:dot_general": {"data": "0", "fsdp": "0", "tensor": "2"},
            "blocks/down:dot_general": {"data": "sum0", "tensor": "sum0"},
            ":dot_general": {"data": "2", "fsdp": "sum0", "tensor": "1"},
        }
    )


def test_blocks_with_other_shards_are_scans_of_their_own(mesh):
    up, down = {"data": "0", "tensor": "2"}, {"fsdp": "sum0"}
    check({"blocks/up:dot_general": up, "blocks/up:dot_general[1]": down}, num_scans=3)
    check({"blocks/up:dot_general[1-2]": up, "blocks/down:dot_general[1-2]": down}, num_scans=2)


@pytest.mark.parametrize(
    ("shards", "parts", "spec"),
    [
        ({"data": "0"}, (2, 3), ("data",)),
        ({}, (2, 3), ()),
        ({"tensor": "2"}, (2, 3), (None, None, "tensor")),
        ({"tensor": "2"}, (3, 2), None),
        ({"fsdp": "1"}, (2, 3), (None, "fsdp")),
    ],
)
def test_a_reshape_is_followed_unless_it_cuts_the_parts_of_a_dim(mesh, shards, parts, spec):
    def grouped(weights, x):
        return jnp.tanh((x @ weights["w"]).reshape(8, 4, *parts)).sum()

    sharded = shard_operators(grouped, {"w:dot_general": shards}, SIZES)
    traced = jax.make_jaxpr(sharded)({"w": TABLE[:6]}, X)
    constraints = [each for each in traced.eqns if each.primitive.name == "sharding_constraint"]
    found = [each.params["sharding"].spec for each in constraints if each.outvars[0].aval.ndim == 4]
    wanted = spec and tuple(spec) + (None,) * (4 - len(spec))
    assert [tuple(each) for each in found] == ([] if spec is None else [wanted or (None,) * 4] * 2)


def test_what_does_not_fit_is_refused_by_name(mesh):
    table = {
        "blocks/upp:dot_general": {"data": "0"},
        "blocks/down:dot_general[2-3]": {"data": "0"},
        "blocks/up:dot_general": {"data": "3", "tensor": "sum0", "fsdp": "sum0"},
        ":dot_general[1]": {},
    }
    with pytest.raises(ValueError, match="the operators of the layout do not fit the model") as problem:
        jax.eval_shape(shard_operators(loss, table, SIZES), make_weights(), X)
    assert str(problem.value).split("\n  - ")[1:] == [
        "blocks/up:dot_general: data splits dim '3' (known: 0, 1, 2, sum0)",
        "blocks/up:dot_general: dim 'sum0' of size 6 cannot be split over axes ['tensor', 'fsdp'] of total"
        " size 4: 6 % 4 = 2. Use a total of 2, or another of its dims: 0, 1, 2, sum0",
        "there is no operator 'blocks/upp:dot_general' (did you mean 'blocks/up:dot_general' or"
        " 'blocks/down:dot_general'?)",
        "blocks/down:dot_general[2-3] has blocks up to 3, and a scan computes 3; use 0 to 2",
        ":dot_general[1] has blocks up to 1, and a scan computes 0; leave them out",
    ]
