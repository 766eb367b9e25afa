"""The state: where each array of it lies, the same numbers on any mesh, never whole where it is sharded."""

import math
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.functional.model import Model, path_text
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.mlp import MlpConfig
from shardtrain.optim.optimizer import OPTIMIZERS, Optimizer, make_optimizer
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement, restorable_state, state_specs
from shardtrain.train_step.state import abstract_state

MODEL = from_nnx(MlpConfig(features=16, mlp=32, num_layers=1, classes=8, dropout=0.1))
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
MESHES = [{"data": 8}, {"fsdp": 2, "tensor": 4}, CUBE]


def placed(layout, optimizer=None, model=MODEL):
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    mesh = make_mesh(layout, jax.devices()[: math.prod(layout.mesh.values())])
    return make_placement(model, optimizer, layout, mesh)


@cache
def reference():
    return jax.tree.map(
        np.asarray, init_state(MODEL, optax.adam(1e-3), placed(Layout(mesh={"data": 1})), seed=5)
    )


@pytest.mark.parametrize(("mesh", "zero"), list(zip(MESHES, (1, 3, 1), strict=True)), ids=str)
def test_the_state_is_the_same_on_any_mesh(mesh, zero):
    layout = Layout(mesh=mesh, zero=zero)
    placement = placed(layout)
    state = init_state(MODEL, optax.adam(1e-3), placement, seed=5)
    jax.tree.map(np.testing.assert_array_equal, state, reference())
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    for leaf, sharding in zip(jax.tree.leaves(state), leaves(placement.state), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert_shards(leaf, sharding.spec, placement.mesh)


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def assert_shards(leaf, spec, mesh):
    """Every device holds the share that the spec says, and no more."""
    names = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    parts = [math.prod(mesh.shape[axis] for axis in entry) for entry in names]
    parts += [1] * (leaf.ndim - len(parts))
    shape = tuple(size // part for size, part in zip(leaf.shape, parts, strict=True))
    assert {shard.data.shape for shard in leaf.addressable_shards} == {shape}


def test_a_parameter_without_elements_is_refused():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Param(jnp.ones((4, 8)), out_sharding=("embed", "mlp"))
            self.head = nnx.Param(jnp.ones((8, 0)), out_sharding=("mlp", "vocab"))

    text = (
        "the model has parameters without elements; leave them out, or give each dim a size of 1 or more:\n"
        "  - head has shape (8, 0)"
    )
    for mesh in ({"data": 1}, {"data": 8}):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            placed(Layout(mesh=mesh), model=from_nnx(Model))


UP, GAIN = PartitionSpec("fsdp", "tensor"), PartitionSpec("fsdp")
WHOLE_UP, WHOLE = PartitionSpec(None, "tensor"), PartitionSpec(None)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_each_zero_stage_shards(zero):
    placement = placed(Layout(mesh=CUBE, zero=zero))
    up = placement.specs.params["blocks"]["0"]["up"]["kernel"]
    gain = placement.specs.params["blocks"]["0"]["norm"]["scale"]
    assert (up, gain) == ((UP, GAIN) if zero == 3 else (WHOLE_UP, WHOLE))
    assert placement.specs.sharded["blocks"]["0"]["up"]["kernel"] == UP
    assert placement.specs.sharded["blocks"]["0"]["norm"]["scale"] == GAIN
    assert jax.tree.map(lambda s: s.spec, placement.state.params) == placement.specs.params
    for moment in (placement.state.opt_state[0].mu, placement.state.opt_state[0].nu):
        assert jax.tree.map(lambda s: s.spec, moment) == placement.specs.sharded
    assert placement.state.opt_state[0].count.spec == PartitionSpec()
    assert placement.batch == NamedSharding(placement.mesh, PartitionSpec(None, ("data", "fsdp")))


OTHERS = {
    "multi_transform": lambda dims: optax.multi_transform(
        {"a": optax.adamw(1e-3), "b": optax.sgd(1e-2, momentum=0.9)},
        lambda params: jax.tree.map_with_path(lambda path, _: "ab"["bias" in path_text(path)], params),
    ),
    "masked": lambda dims: optax.masked(
        optax.adam(1e-3), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    ),
    "multi_steps": lambda dims: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "noise": lambda dims: optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(1e-2)),
}
ALL = [*OPTIMIZERS, *OTHERS]
PARAMETERS, MATRICES, OF_BLOCKS, BIASES = 8, 3, 2, 4
FOLLOWERS = {
    "sgd": PARAMETERS,
    "lion": PARAMETERS,
    "adafactor": PARAMETERS,
    "masked": 2 * MATRICES,
    "multi_steps": 3 * PARAMETERS,
    "noise": 0,
    "muon": OF_BLOCKS + 2 * (PARAMETERS - OF_BLOCKS),
    "multi_transform": BIASES + 2 * (PARAMETERS - BIASES),
}
"""How many arrays of its state have the shape of their parameter, where these are not two each."""


def optimizer_of(name, dims=MODEL.dims):
    return OTHERS[name](dims) if name in OTHERS else make_optimizer(Optimizer(name=name), 10, dims)[0]


@pytest.mark.parametrize("name", ALL)
def test_optimizer_state_follows_its_parameters(name):
    """Whatever of it has the shape of the parameter whose path it ends in lies like that parameter."""
    optimizer = optimizer_of(name)
    specs = state_specs(MODEL, optimizer, Layout(mesh=CUBE), CUBE)
    by_path = {
        path_text(path): (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree.leaves_with_path(specs.abstract.params), leaves(specs.params), strict=True
        )
    }
    followers = 0
    opt_leaves = jax.tree.leaves_with_path(specs.abstract.opt_state)
    for (path, leaf), spec in zip(opt_leaves, leaves(specs.state.opt_state), strict=True):
        owner = [p for p in by_path if path_text(path).endswith("/" + p)]
        expected = PartitionSpec()
        if owner and by_path[max(owner, key=len)][0] == leaf.shape:
            expected = by_path[max(owner, key=len)][1]
            followers += 1
        assert spec == expected, path_text(path)
    assert followers == FOLLOWERS.get(name, 2 * PARAMETERS)


@pytest.mark.parametrize("name", ALL)
def test_the_state_of_every_optimizer_lies_as_placed_and_survives_a_step(name):
    """Dtypes, shapes and structure before and after an update are those of `restorable_state`."""
    optimizer = optimizer_of(name)
    placement = placed(Layout(mesh={"fsdp": 4, "tensor": 2}), optimizer)
    restorable = restorable_state(placement)

    def updated(state):
        grads = jax.tree.map(jnp.ones_like, state.params)
        _, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return state._replace(opt_state=opt_state)

    state = init_state(MODEL, optimizer, placement)
    after = jax.eval_shape(updated, state)
    assert jax.tree.structure(state) == jax.tree.structure(restorable) == jax.tree.structure(after)
    for leaf, spec, later in zip(*map(jax.tree.leaves, (state, restorable, after)), strict=True):
        assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype) == (later.shape, later.dtype)
        assert not leaf.aval.weak_type
        assert leaf.sharding.is_equivalent_to(spec.sharding, leaf.ndim)
        assert_shards(leaf, spec.sharding.spec, placement.mesh)


def test_a_path_that_ends_in_another_path():
    """`a/w` is not taken for `w`, though both end in `w` and have one shape."""
    model = Model(
        init=lambda key: ({"a": {"w": jnp.ones((4, 8))}, "w": jnp.ones((4, 8))}, {}),
        apply=lambda *inputs: (inputs, {}),
        dims={"a": {"w": ("embed", "mlp")}, "w": ("mlp", "embed")},
    )
    specs = state_specs(model, optax.adam(1e-3), Layout(), {"fsdp": 2, "tensor": 2})
    mu = specs.state.opt_state[0].mu
    assert mu == {"a": {"w": PartitionSpec("fsdp", "tensor")}, "w": PartitionSpec("tensor", "fsdp")}


def test_a_state_of_another_shape_is_replicated():
    """Adafactor's row and column statistics of a factored parameter."""
    model = Model(
        init=lambda key: ({"w": jnp.ones((128, 256))}, {}),
        apply=lambda *inputs: (inputs, {}),
        dims={"w": ("embed", "mlp")},
    )
    specs = state_specs(model, optax.adafactor(1e-3), Layout(), {"fsdp": 2, "tensor": 2})
    shapes = {leaf.shape for leaf in jax.tree.leaves(specs.abstract.opt_state)}
    assert {(128,), (256,)} <= shapes
    assert set(leaves(specs.state.opt_state)) == {PartitionSpec()}


def test_everything_that_does_not_fit_is_listed():
    layout = Layout(mesh={"fsdp": 3, "tensor": 5})
    with pytest.raises(ValueError) as error:
        state_specs(MODEL, optax.adam(1e-3), layout, {"fsdp": 3, "tensor": 5})
    lines = str(error.value).splitlines()[1:]
    paths = {line.split(":")[0].removeprefix("  - ") for line in lines}
    shapes, _ = jax.eval_shape(MODEL.init, jax.random.key(0))
    assert paths == {path_text(path) for path, _ in jax.tree.leaves_with_path(shapes)}


class Statistics(nnx.Variable):
    pass


class Counting(nnx.Module):
    """Weakly typed and integer values, as users make them."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.asarray(1.0), out_sharding=())
        self.calls = Statistics(jnp.asarray(0))


def test_weak_types_are_made_strong():
    model = from_nnx(Counting)
    layout = Layout(mesh={"data": 8})
    state: Any = init_state(model, optax.adam(1e-3), placed(layout, model=model))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    assert (state.params["scale"].dtype, state.model_state["calls"].dtype) == (jnp.float32, jnp.int32)


LARGE = 2**24
"""Bytes of one parameter."""


def large(rngs):
    return nnx.Linear(
        1024, LARGE // 4096, use_bias=False, rngs=rngs,
        kernel_init=nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp")),
    )  # fmt: skip


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_a_parameter_is_never_whole_while_it_is_made(mesh):
    model, optimizer = from_nnx(large), optax.adam(1e-3)
    placement = placed(Layout(mesh=mesh), optimizer, model)
    create = jax.jit(lambda: init_state(model, optimizer, placement, seed=0), out_shardings=placement.state)
    memory: Any = create.lower().compile().memory_analysis()
    share = LARGE / 8
    assert 3 * share <= memory.output_size_in_bytes < 3.1 * share
    assert memory.temp_size_in_bytes < LARGE / 2  # bits and the numbers made of them, in shares


def test_abstract_state_computes_nothing():
    state = abstract_state(MODEL, optax.adam(1e-3))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), reference()
    )


def test_a_rule_for_a_dim_that_no_parameter_has_is_refused():
    model = from_nnx(MlpConfig(features=4, mlp=4, num_layers=1, classes=2))
    sizes = axis_sizes({"data": 1}, 1)
    with pytest.raises(ValueError, match=r"no such dim: 'embdd' \(did you mean 'embed'\?\)"):
        state_specs(model, optax.identity(), Layout(mesh={"data": 1}, parameters={"embdd": ("fsdp",)}), sizes)
