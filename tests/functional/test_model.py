"""Pure functions of nnx and linen modules equal the modules; dims, rng streams, refused values."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer

from shardtrain.functional.linen_model import from_linen
from shardtrain.functional.model import Model, name_arrays, path_text
from shardtrain.functional.nnx_model import convert_model, from_nnx
from shardtrain.sharding.array_dims import NamedArray

KEY, RNG = jax.random.key(3), jax.random.key(4)
ROWS, EMBED, MLP = 8, 4, 6
X = np.random.default_rng(0).normal(1.0, 2.0, (ROWS, EMBED)).astype(np.float32)


def named(*dims):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), dims)


class Net(nnx.Module):
    """A bit of everything: running statistics, dropout, a list, stacked layers, a shared parameter."""

    def __init__(self, rngs):
        self.up = nnx.Linear(EMBED, MLP, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.norm = nnx.BatchNorm(MLP, momentum=0.75, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        # eleven, for the order of their names; constant, as random ones are long to compile
        constant = nnx.initializers.constant(0.1)
        self.layers = nnx.List([nnx.Linear(MLP, MLP, kernel_init=constant, rngs=rngs) for _ in range(11)])

        @nnx.split_rngs(splits=3)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs):
            return Block(rngs)

        self.blocks = stack(rngs)
        self.down = nnx.Param(
            0.3 * jax.random.normal(rngs.params(), (MLP, EMBED)), out_sharding=("mlp", "embed")
        )
        self.tied = self.down

    def __call__(self, x):
        x = self.dropout(self.norm(self.up(x)))
        for layer in self.layers[9:]:
            x = x + jnp.tanh(layer(x))
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return x @ self.down[...] @ self.tied[...].T


class Block(nnx.Module):
    def __init__(self, rngs):
        self.mlp = nnx.Linear(MLP, MLP, kernel_init=named(None, "mlp"), rngs=rngs)

    def __call__(self, x):
        return x + jnp.sin(self.mlp(x))


class LinenNet(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Dense(MLP, kernel_init=init, name="up")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.75, name="norm")(x)
        return nn.Dense(EMBED)(nn.Dropout(self.rate, deterministic=not train)(x))


class Deterministic(nn.Module):
    @nn.compact
    def __call__(self, x, *, deterministic=True):
        return nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(EMBED, use_bias=False)(x))


class Neither(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(EMBED)(x)


@functools.cache
def nnx_model():
    return compiled(from_nnx(Net))


def compiled(model):
    return Model(init=jax.jit(model.init), apply=jax.jit(model.apply, static_argnums=3), dims=model.dims)


@functools.cache
def linen_model(kind):
    return compiled(from_linen(kind(), jax.ShapeDtypeStruct((1, EMBED), jnp.float32)))


def assert_same(a, b, rtol=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6), a, b)


def nested(state):
    tree = {}
    for path, variable in nnx.to_flat_state(state):
        *parents, name = map(str, path)
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[name] = variable[...]
    return tree


def own_module(key):
    with nnx.use_eager_sharding(False):
        return Net(nnx.Rngs(key))


@jax.jit
def own_init(key):
    """The module's own parameters and statistics."""
    module = own_module(key)
    return tuple(nested(nnx.state(module, kind)) for kind in (nnx.Param, nnx.BatchStat))


def test_nnx_init_equals_the_module():
    params, model_state = nnx_model().init(KEY)
    assert_same((params, model_state), own_init(KEY))
    assert list(model_state) == ["norm"]
    assert set(params) == {
        "up",
        "norm",
        "layers",
        "blocks",
        "down",
    }  # `tied` is `down`, and stands there once
    assert list(params["layers"]) == sorted(map(str, range(11)))
    assert params["blocks"]["mlp"]["kernel"].shape == (3, MLP, MLP)
    assert type(params["layers"]["10"]["kernel"]) is type(jnp.ones(1))


def test_modes_that_are_attributes_of_a_users_module_are_set():
    class Own(nnx.Module):
        def __init__(self, rngs):
            self.deterministic, self.inner = False, nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return jnp.array([self.deterministic, self.inner.deterministic])

    model = from_nnx(lambda rngs: nnx.Sequential(Own(rngs)))
    for train in (True, False):
        found, _ = model.apply({}, model.init(KEY)[1], RNG, train, X)
        assert found.tolist() == [not train, not train]


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_dropout_is_on_in_training_only_and_depends_on_the_rng(framework):
    if framework == "nnx":
        model = compiled(from_nnx(lambda rngs: nnx.Dropout(0.5, rngs=rngs)))
    else:
        model = linen_model(Deterministic)
    params, model_state = model.init(KEY)
    outputs = {
        (rng, train): np.asarray(model.apply(params, model_state, jax.random.key(rng), train, X)[0])
        for rng in (0, 1)
        for train in (False, True)
    }
    np.testing.assert_array_equal(outputs[0, False], outputs[1, False])
    assert not np.allclose(outputs[0, True], outputs[0, False])
    assert not np.allclose(outputs[0, True], outputs[1, True])
    again, _ = model.apply(params, model_state, jax.random.key(0), True, X)
    np.testing.assert_array_equal(again, outputs[0, True])


def test_stacked_layers_draw_different_dropout():
    class Ones(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self):
            return self.dropout(jnp.ones(64))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Ones))(rngs)

        def __call__(self):
            return nnx.vmap(lambda layer: layer())(self.layers)

    masks, _ = from_nnx(Stack).apply({}, {}, RNG, True)
    assert len(np.unique(masks, axis=0)) == 3


def test_rng_streams_and_layers_draw_different_numbers():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = (nnx.Dropout(0.5, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            return self.first(x), self.second(x)

    class Streams(nn.Module):
        @nn.compact
        def __call__(self, x):
            return tuple(jax.random.normal(self.make_rng(name), x.shape) for name in ("a", "b"))

    for model in (from_nnx(Two), from_linen(Streams(), X, rng_streams=("a", "b"))):
        (first, second), _ = model.apply({}, {}, RNG, True, np.ones((8, 8), np.float32))
        assert not np.array_equal(first, second)


def test_linen_init_equals_the_module():
    module = LinenNet()
    variables = nn.unbox(module.init({"params": KEY}, jnp.zeros((1, EMBED)), train=False))
    params, model_state = linen_model(LinenNet).init(KEY)
    assert_same({"params": params, **model_state}, variables)


def test_a_linen_module_without_a_mode():
    model = linen_model(Neither)
    params, model_state = model.init(KEY)
    assert model_state == {}
    for train in (False, True):
        outputs, state = model.apply(params, model_state, RNG, train, X)
        assert_same(outputs, Neither().apply({"params": params}, X), rtol=1e-5)
        assert state == {}


def test_a_linen_module_without_parameters():
    class Double(nn.Module):
        def __call__(self, x):
            return 2 * x

    model = from_linen(Double(), X)
    assert (model.dims, model.init(KEY)) == ({}, ({}, {}))
    np.testing.assert_array_equal(model.apply({}, {}, RNG, True, X)[0], 2 * X)


def test_dims_of_nnx():
    linear = {"kernel": None, "bias": None}
    assert nnx_model().dims == {
        "up": {"kernel": ("embed", "mlp"), "bias": None},
        "norm": {"scale": None, "bias": None},
        "layers": {str(i): linear for i in range(11)},
        "blocks": {"mlp": {"kernel": ("layers", None, "mlp"), "bias": None}},
        "down": ("mlp", "embed"),
    }


def test_named_arrays_pair_dims_with_shapes():
    model = nnx_model()
    found = name_arrays(model, jax.eval_shape(model.init, KEY)[0])
    assert found["blocks/mlp/kernel"] == NamedArray(dims=("layers", None, "mlp"), shape=(3, MLP, MLP))
    assert found["down"] == NamedArray(dims=("mlp", "embed"), shape=(MLP, EMBED))
    assert found["layers/10/bias"] == NamedArray(dims=None, shape=(MLP,))
    assert found["up/kernel"] == NamedArray(dims=("embed", "mlp"), shape=(EMBED, MLP))
    leaves = jax.tree.leaves_with_path(model.init(KEY)[0])
    assert list(found) == [path_text(path) for path, _ in leaves]
    assert [array.shape for array in found.values()] == [leaf.shape for _, leaf in leaves]


def test_no_array_is_allocated_when_a_model_is_made():
    """An nnx factory runs under tracing alone: no parameter is ever whole on one device."""
    seen = []

    def factory(rngs):
        seen.append(rngs.params())
        return nnx.Linear(2, 2, rngs=rngs)

    model = from_nnx(factory)
    jax.eval_shape(model.init, KEY)
    assert len(seen) == 2
    assert all(isinstance(key, Tracer) for key in seen)


def test_a_model_can_be_a_static_argument():
    model = linen_model(Neither)
    assert jax.jit(lambda model: len(model.dims), static_argnums=0)(model) == 1
    assert {model: 1}[model] == 1


def test_as_model():
    model = linen_model(Neither)
    assert convert_model(model) is model
    assert convert_model(lambda rngs: nnx.Linear(2, 3, rngs=rngs)).dims == {"kernel": None, "bias": None}


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            Neither(),
            "model is the linen module Neither, whose inputs are not known;"
            " write from_linen(module, jax.ShapeDtypeStruct(...)) with the shape of one batch",
        ),
        (
            nnx.Module(),
            "model is an nnx module Module that is already initialised on one device;"
            " give its class, Module, or the function that makes it: lambda rngs: Module(..., rngs=rngs)",
        ),
        ("gpt", "model is 'gpt'; allowed: a Model, or a function rngs -> nnx.Module"),
    ],
)
def test_values_that_are_no_model_are_refused(model, text):
    with pytest.raises(ValueError) as error:
        convert_model(model)
    assert str(error.value) == text
