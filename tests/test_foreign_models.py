"""What models of other people do: names in many forms, modes fixed early, norms over an axis, sowing."""

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.functional.linen_model import from_linen
from shardtrain.functional.model import name_parameters
from shardtrain.functional.nnx_model import convert_model, from_nnx

KEY = jax.random.key(3)
X = np.random.default_rng(0).normal(1.0, 2.0, (8, 4)).astype(np.float32)


def refused(function, *arguments, **options):
    with pytest.raises(ValueError) as error:
        function(*arguments, **options)
    return str(error.value)


class One(nnx.Module):
    def __init__(self, rngs, **metadata):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 6, 2)), **metadata)

    def __call__(self, x):
        return x


def one(**metadata):
    return from_nnx(lambda rngs: One(rngs, **metadata))


MESH = Mesh(np.array(jax.devices()[:1]), ("embed",))


@pytest.mark.parametrize(
    ("given", "dims"),
    [
        (None, None),
        ((), (None, None, None)),
        (("embed",), ("embed", None, None)),
        (["embed", None, "mlp"], ("embed", None, "mlp")),
        (PartitionSpec(None, "mlp"), (None, "mlp", None)),
        (PartitionSpec(PartitionSpec.UNCONSTRAINED, "mlp"), (None, "mlp", None)),
        ((("data", "fsdp"), (), None), ("data+fsdp", None, None)),
        (NamedSharding(MESH, PartitionSpec("embed")), ("embed", None, None)),
        (("a", "b", "c", "d"), ("a", "b", "c", "d")),
    ],
)
def test_the_forms_of_names(given, dims):
    assert one(out_sharding=given).dims == {"w": dims}


@pytest.mark.parametrize("keyword", ["sharding", "sharding_names"])
def test_names_by_their_older_keywords(keyword):
    with pytest.warns(DeprecationWarning, match="use 'out_sharding' instead"):
        assert one(**{keyword: ("embed", None, "mlp")}).dims == {"w": ("embed", None, "mlp")}


@pytest.mark.parametrize("given", ["embed", (1, 2, 3), (("a", None), None, None)])
def test_what_are_no_names(given):
    text = refused(one, out_sharding=given)
    assert text.startswith(f"w has the names {given!r}; give a name, None or a tuple of names for each")


def test_names_from_outside_come_before_those_of_the_model():
    model = one(out_sharding=("embed", "mlp", None))
    assert name_parameters(model, {"w": ("mlp", None, "embed")}).dims == {"w": ("mlp", None, "embed")}
    assert name_parameters(model, {}) is model
    assert convert_model(lambda rngs: One(rngs), {"*": (None, "mlp", None)}).dims == {
        "w": (None, "mlp", None)
    }
    assert "'v' matches no parameter; there are w" in refused(name_parameters, model, {"v": ()})


class Norm(nnx.Module):
    def __init__(self, rngs, norm: Any = nnx.BatchNorm, **options):
        self.norm = norm(4, rngs=rngs, **options)

    def __call__(self, x):
        return self.norm(x)


class LinenNorm(nn.Module):
    norm: Any = nn.BatchNorm
    axis_name: str | None = "batch"

    @nn.compact
    def __call__(self, x, train=True):
        mode: dict[str, Any] = {"use_running_average": not train} if self.norm is nn.BatchNorm else {}
        return self.norm(axis_name=self.axis_name, **mode)(x)


NORMS = {
    "nnx by name": lambda: from_nnx(lambda rngs: Norm(rngs, axis_name="batch")),
    "nnx by request": lambda: from_nnx(Norm, sync_batch_norm=True),
    "linen by name": lambda: from_linen(LinenNorm(), X),
    "linen by request": lambda: from_linen(LinenNorm(axis_name=None), X, sync_batch_norm=True),
}


@pytest.mark.parametrize("kind", NORMS)
def test_statistics_over_replicas(kind):
    """Alone they are those of the batch, and of replicas those of all together."""
    model = NORMS[kind]()
    assert model.axis_name == ("batch" if "name" in kind else "replicas")
    params, state = model.init(KEY)
    whole, after = model.apply(params, state, KEY, True, X)
    np.testing.assert_allclose(whole, (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-5), rtol=1e-4, atol=1e-5)
    halves = X.reshape(2, 4, 4)
    replicas = jax.vmap(
        lambda x: model.apply(params, state, KEY, True, x), out_axes=(0, None), axis_name=model.axis_name
    )
    found, found_after = replicas(halves)
    np.testing.assert_allclose(found.reshape(8, 4), whole, rtol=1e-5, atol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found_after, after)
    evaluated, _ = model.apply(params, after, KEY, False, X)
    assert not np.allclose(evaluated, whole)


class TwoNorms(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.BatchNorm(4, axis_name="batch", rngs=rngs)
        self.two = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.two(jnp.tanh(self.one(x)))


class LinenTwoNorms(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(axis_name="batch", use_running_average=not train)(x)
        return nn.BatchNorm(use_running_average=not train)(jnp.tanh(x))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_norms_without_an_axis_name_get_the_one_that_others_have(kind):
    if kind == "nnx":
        model = from_nnx(TwoNorms, sync_batch_norm=True)
    else:
        model = from_linen(LinenTwoNorms(), X, sync_batch_norm=True)
    assert model.axis_name == "batch"
    params, state = model.init(KEY)
    call = functools.partial(model.apply, params, state, KEY, True)
    found = jax.vmap(lambda x: call(x)[0], axis_name="batch")(X.reshape(2, 4, 4))
    np.testing.assert_allclose(found.reshape(8, 4), call(X)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_nnx(lambda rngs: Norm(rngs, nnx.LayerNorm, axis_name="batch")),
        lambda: from_linen(LinenNorm(nn.LayerNorm), X),
    ],
)
def test_norms_of_single_examples_are_not_synchronised(make):
    text = refused(make)
    assert "LayerNorm(axis_name='batch') takes means over features" in text
    assert "leave axis_name out" in text


def test_norms_have_one_axis_name():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.norms = nnx.List([nnx.BatchNorm(4, axis_name=name, rngs=rngs) for name in "ab"])

    assert "there are the axis names ['a', 'b']; use one" in refused(from_nnx, Two)


@dataclass(frozen=True)
class Config:
    deterministic: bool = False


class Fixed(nn.Module):
    """Its mode is fixed when it is built."""

    config: Config

    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.5, name="drop")(x, deterministic=self.config.deterministic)
        return nn.BatchNorm(use_running_average=self.config.deterministic, name="norm")(nn.Dense(4)(x))


def test_a_mode_that_is_fixed_when_a_module_is_built():
    assert refused(from_linen, Fixed(Config()), X) == (
        "Fixed would behave in evaluation as in training:"
        "\n  - drop drops out: deterministic is False"
        "\n  - norm takes the statistics of the batch: use_running_average is False"
        "\n  its mode is fixed when it is built; give it twice, as from_linen(Fixed(...), ...,"
        " evaluation=Fixed(...)), the second built for evaluation, or let __call__ take one of"
        " train, training, is_training, deterministic"
    )
    model = from_linen(Fixed(Config()), X, evaluation=Fixed(Config(deterministic=True)))
    params, state = model.init(KEY)
    once, _ = model.apply(params, state, jax.random.key(0), False, X)
    again, _ = model.apply(params, state, jax.random.key(1), False, X)
    np.testing.assert_array_equal(once, again)
    trained, after = model.apply(params, state, jax.random.key(0), True, X)
    assert not np.allclose(trained, once)
    assert not np.allclose(after["batch_stats"]["norm"]["mean"], 0)
    assert from_linen(Fixed(Config()), X, evaluation=Fixed(Config())).dims == model.dims


def test_nnx_modules_are_told_their_mode_in_their_call():
    class Called(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x, *, training, rngs, deterministic=None):
            assert training is not deterministic
            return self.dropout(x, deterministic=deterministic, rngs=rngs)

    model = from_nnx(Called)
    ones = np.ones((8, 8), np.float32)
    drops = [model.apply({}, {}, jax.random.key(seed), True, ones)[0] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(drops[0], drops[1])
    assert not np.array_equal(drops[0], drops[2])
    assert set(np.unique(drops[0])) == {0.0, 2.0}
    np.testing.assert_array_equal(model.apply({}, {}, KEY, False, ones)[0], ones)


def test_linen_draws_from_streams_that_nobody_named():
    class Noise(nn.Module):
        @nn.compact
        def __call__(self, x):
            return tuple(jax.random.normal(self.make_rng(name), x.shape) for name in ("noise", "other"))

    model = from_linen(Noise(), X)
    (first, second), _ = model.apply({}, {}, jax.random.key(0), True, X)
    (third, _), _ = model.apply({}, {}, jax.random.key(1), True, X)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, third)


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("losses", "size", jnp.abs(x).mean())
        self.sow("intermediates", "x", x)
        return nn.Dense(4)(x)


def test_what_linen_sows_is_left_out_by_request():
    model = from_linen(Sowing(), X)
    params, state = model.init(KEY)
    assert list(state) == ["losses"]
    text = refused(model.apply, params, state, KEY, True, X)
    assert "losses/size/1: not there -> ()" in text
    assert "from_linen(..., without=('losses',))" in text
    model = from_linen(Sowing(), X, without=("losses",))
    params, state = model.init(KEY)
    assert model.apply(params, state, KEY, True, X)[1] == state == {}


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_nnx_sows():
    class Sown(nnx.Module):
        def __init__(self, rngs, kind: Any = nnx.Intermediate):
            self.kind = kind

        def __call__(self, x):
            self.sow(self.kind, "x", x)
            return x

    class Loss(nnx.Variable):
        pass

    assert from_nnx(Sown).apply({}, {}, KEY, True, X)[1] == {}
    assert "x/0: not there -> (8, 4)" in refused(
        from_nnx(lambda r: Sown(r, Loss)).apply, {}, {}, KEY, True, X
    )


def test_a_call_may_have_arguments_that_are_no_arrays():
    class Cached(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(4))

        def __call__(self, x, cache, mask):
            return jnp.where(mask, x * self.scale, 0), cache

    (outputs, cache), _ = from_nnx(Cached).apply({"scale": jnp.ones(4)}, {}, KEY, True, X, None, X > 0)
    np.testing.assert_array_equal(outputs, np.where(X > 0, X, 0))
    assert cache is None


def test_arrays_that_are_attributes_are_constants_that_no_mean_rounds():
    class Kept(nnx.Module):
        def __init__(self, rngs):
            self.table, self.half = rngs.normal((4,)), jnp.full(4, 0.1, jnp.bfloat16)

        def __call__(self, x):
            return x * self.table + self.half

    model = from_nnx(Kept)
    params, state = model.init(KEY)
    assert {leaf.dtype.kind for leaf in jax.tree.leaves(state)} == {"u"}
    found, after = model.apply(params, state, KEY, True, X)
    table = nnx.Rngs(KEY).normal((4,))
    np.testing.assert_array_equal(found, X * table + jnp.bfloat16(0.1))
    jax.tree.map(np.testing.assert_array_equal, after, state)
