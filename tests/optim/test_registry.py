"""The contract of every optimizer and schedule, over the registries themselves: no entry can escape it."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from shardtrain.checkpoints.flatten import flatten
from shardtrain.errors.field_types import wrong_types
from shardtrain.optim import optimizer as optimizers
from shardtrain.optim.clip import TakesNorm
from shardtrain.optim.optimizer import OPTIMIZERS, Optimizer, make_optimizer
from shardtrain.optim.optimizer_state import make_storable
from shardtrain.optim.schedules import SCHEDULES, Schedule, make_schedule
from shardtrain.optim.separable import coupling_problems
from shardtrain.sharding.array_dims import NamedArray
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.specs import partition_specs

DIMS = {
    "blocks": {"w": ("layers", "embed", "mlp"), "bias": ("layers", "mlp")},
    "others": {"w": ("layers", "mlp")},
    "head": ("embed", "vocab"),
}
SHAPES = {"blocks": {"w": (3, 4, 8), "bias": (3, 8)}, "others": {"w": (2, 8)}, "head": (4, 8)}


def draw(seed: int) -> Any:
    """Arrays of these shapes; the layers of a stack differ in size, so that mixing them is seen."""
    random = np.random.default_rng(seed)

    def array(shape: tuple[int, ...]) -> jax.Array:
        scale = 10.0 ** np.arange(shape[0]) if shape[0] in (2, 3) else np.ones(shape[0])
        values = random.normal(1.0, 1.0, shape) * scale.reshape(-1, *[1] * (len(shape) - 1))
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map(array, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


PARAMS, GRADS = draw(0), (draw(1), draw(2))


def options(name: Any) -> Optimizer:
    rate = Schedule(name="constant", peak=0.1)
    return Optimizer(name=name, learning_rate=rate, weight_decay=0.5, clip=None)


@cache
def whole_update(maker: Any) -> Any:
    """The second update of all arrays by the maker that is registered as `name`, made once."""
    (name,) = (each for each, registered in OPTIMIZERS.items() if registered is maker)
    return second_update(name, PARAMS, GRADS, DIMS)


def second_update(name: str, params: Any, grads: Any, dims: Any) -> Any:
    """What an optimizer adds to the parameters in its second step."""
    optimizer: Any = make_optimizer(options(name), 10, dims)[0]

    @jax.jit
    def updates(params: Any, grads: Any) -> Any:
        _, state = optimizer.update(grads[0], optimizer.init(params), params)
        return optimizer.update(grads[1], state, params)[0]

    return updates(params, grads)


def stage(tree: Any, layers: slice, *, first: bool) -> Any:
    """The part of a pipeline stage: some of the blocks; the rest is owned by the first stage."""
    blocks = {"blocks": jax.tree.map(lambda x: x[layers], tree["blocks"])}
    return {**tree, **blocks} if first else blocks


def check_stages(name: str) -> None:
    """Stages that each update their own parameters make the update of all parameters."""
    together = whole_update(OPTIMIZERS[name])
    for layers, first in ((slice(1), True), (slice(1, 3), False)):
        params, *grads = (stage(tree, layers, first=first) for tree in (PARAMS, *GRADS))
        dims = DIMS if first else {"blocks": DIMS["blocks"]}
        found = second_update(name, params, tuple(grads), dims)
        expected = stage(together, layers, first=first)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    optimizer, _ = make_optimizer(options(name), 10, DIMS)
    assert coupling_problems(optimizer, DIMS, PARAMS) == []


def check_layers(name: str) -> None:
    """Each layer of a stack is updated as an array of its own, also in stacks of different length."""

    def unstacked(tree: Any) -> Any:
        layers = {
            f"{stack}{i}": {path: x[i] for path, x in tree[stack].items()}
            for stack, num_layers in (("blocks", 3), ("others", 2))
            for i in range(num_layers)
        }
        return {**layers, "head": tree["head"]}

    dims = {
        f"{stack}{i}": {path: names[1:] for path, names in DIMS[stack].items()}  # type: ignore[union-attr]
        for stack, num_layers in (("blocks", 3), ("others", 2))
        for i in range(num_layers)
    }
    stacked = whole_update(OPTIMIZERS[name])
    alone = second_update(
        name, unstacked(PARAMS), tuple(map(unstacked, GRADS)), {**dims, "head": DIMS["head"]}
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), unstacked(stacked), alone
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestOptimizer:
    def test_it_takes_the_norm_that_a_step_has_computed(self, name):
        dims, params, grads = ({"head": tree["head"]} for tree in (DIMS, PARAMS, GRADS[0]))
        optimizer, _ = make_optimizer(replace(options(name), clip=1.0), 10, dims)
        assert isinstance(optimizer, TakesNorm)
        state, norm = optimizer.init(params), optax.tree.norm(grads)
        found = (optimizer.update(grads, state, params, grad_norm=given)[0] for given in (None, norm))
        jax.tree.map(np.testing.assert_array_equal, *found)
        some, _ = make_optimizer(replace(options(name), clip=1.0), 10, DIMS, frozen={"head"})
        assert isinstance(some, TakesNorm)

    def test_options_take_its_name(self, name):
        assert wrong_types(options(name)) == []

    def test_state_of_bfloat16_parameters_is_float32_and_can_be_saved(self, name):
        optimizer = make_storable(make_optimizer(options(name), 10, DIMS)[0])
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
        init = jax.jit(optimizer.init)(params)
        _, updated = jax.jit(optimizer.update)(params, init, params)
        for state in (init, updated):
            arrays = flatten(state)
            floats = {x.dtype for x in arrays.values() if jnp.issubdtype(x.dtype, jnp.floating)}
            assert floats <= {jnp.dtype("float32")}
        assert jax.tree.structure(init) == jax.tree.structure(updated)

    def test_stages_can_update_separately(self, name):
        check_stages(name)

    def test_each_layer_of_a_stack_is_updated_as_if_alone(self, name):
        check_layers(name)

    def test_sharded_update_equals_that_of_one_device(self, name):
        layout = Layout(mesh={"fsdp": 2, "tensor": 4})
        mesh = make_mesh(layout)
        names = jax.tree.leaves(DIMS, is_leaf=lambda x: isinstance(x, tuple))
        arrays = {
            jax.tree_util.keystr(path): NamedArray(dims=dims, shape=x.shape)
            for (path, x), dims in zip(jax.tree.leaves_with_path(PARAMS), names, strict=True)
        }
        specs = partition_specs(arrays, PARAMS, layout.parameter_rules, mesh.shape, "refuse")
        params, *grads = (
            jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)
            for tree in (PARAMS, *GRADS)
        )
        assert not params["head"].is_fully_replicated
        found = second_update(name, params, tuple(grads), DIMS)
        expected = whole_update(OPTIMIZERS[name])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def clipped(o: Any, rate: Any, dims: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate))


def stack_ratio(o: Any, rate: Any, dims: Any) -> Any:
    return optax.lars(rate)


@pytest.mark.parametrize(
    ("maker", "check"),
    [(clipped, check_stages), (stack_ratio, check_stages), (stack_ratio, check_layers)],
)
def test_the_contract_refuses_an_optimizer_that_mixes(monkeypatch, maker, check):
    monkeypatch.setitem(optimizers.OPTIMIZERS, "adamw", maker)
    with pytest.raises(AssertionError):
        check("adamw")


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_rises_to_its_peak_and_never_rises_again(name, warmup):
    """Over the run of 40 steps and beyond, in a compiled step as outside."""
    rate: Any = make_schedule(Schedule(name=name, peak=2.0, warmup=warmup), 40)
    rates = np.asarray(jax.jit(jax.vmap(rate))(jnp.arange(60)))
    np.testing.assert_allclose(rates[:warmup], 2.0 * np.arange(warmup) / max(warmup, 1), rtol=1e-5)
    assert rates[warmup] == pytest.approx(2.0)
    assert (np.diff(rates[warmup:]) <= 1e-6).all()
    assert (rates[warmup:] > 0).all()
    for step in (warmup, 30, 59):
        assert float(rate(step)) == pytest.approx(rates[step], rel=1e-5)
