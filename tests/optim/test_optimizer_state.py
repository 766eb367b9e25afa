"""Optimizers of optax that need more than gradients, on a mesh as in a plain loop; moments and averages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.evaluated_params import make_exported_params
from shardtrain.checkpoints.flatten import describe_restorable, flatten
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.data import Text, place
from shardtrain.functional.model import Model
from shardtrain.optim.optimizer import Optimizer, make_optimizer
from shardtrain.optim.optimizer_state import (
    AverageState,
    find_evaluated_params,
    find_missing_arguments,
    make_storable,
    parameter_average,
)
from shardtrain.optim.per_layer import per_layer
from shardtrain.optim.schedules import Schedule
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.step import make_step
from shardtrain.trainer.config import Run
from shardtrain.trainer.setup import make_setup
from shardtrain.trainer.strategy import Strategy

EMBED, MLP, ROWS = 8, 4, 16
DIMS = {"bias": ("mlp",), "w": ("embed", "mlp")}
random = np.random.default_rng(0)
BATCH = {"x": random.normal(size=(ROWS, EMBED)).astype(np.float32), "weights": np.ones(ROWS, np.float32)}
LAYOUT = Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2})


def make_model() -> Model:
    def init(key: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        w = jax.random.normal(key, (EMBED, MLP))
        return {"bias": jnp.zeros(MLP), "w": w}, {}

    return Model(
        init=init,
        apply=lambda params, state, rng, train, x: (jnp.tanh(x @ params["w"] + params["bias"]), state),
        dims=DIMS,
    )


def loss(apply, batch):
    losses = ((apply(batch["x"]) - 0.3) ** 2).sum(-1)
    return (losses * batch["weights"]).sum(), batch["weights"].sum()


def on_mesh(optimizer: Any, steps: int) -> Any:
    model, mesh = make_model(), make_mesh(LAYOUT)
    placement = make_placement(model, optimizer, LAYOUT, mesh)
    state = init_state(model, optimizer, placement, seed=0)
    step = make_step(model, loss, optimizer, placement)
    for _ in range(steps):
        state, _ = step(state, place(BATCH, mesh, LAYOUT.batch_axes, 2))
    return state


def in_a_plain_loop(optimizer: Any, steps: int) -> Any:
    model = make_model()
    params: Any = model.init(jax.random.key(jnp.uint32(0)))[0]
    optimizer = optax.with_extra_args_support(optimizer)

    def value(params: Any) -> jax.Array:
        total, count = loss(lambda x: model.apply(params, {}, None, True, x)[0], BATCH)
        return total / count

    @jax.jit
    def update(params: Any, state: Any) -> tuple[Any, Any]:
        found, grads = jax.value_and_grad(value)(params)
        updates, state = optimizer.update(grads, state, params, value=found, grad=grads, value_fn=value)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = update(params, state)
    return params


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(
            optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, rtol=0.9, accumulation_size=1)
        ),
        optax.noisy_sgd(0.1, key=3),
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
    ],
    ids=["reduce_on_plateau", "noisy_sgd", "backtracking"],
)
def test_the_update_on_a_mesh_equals_a_plain_loop(optimizer, assert_same):
    """4 steps: a plateau is reached."""
    state = on_mesh(optimizer, 4)
    assert_same(jax.device_get(state.params), jax.device_get(in_a_plain_loop(optimizer, 4)))
    saved = flatten(state)
    assert describe_restorable(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    )
    assert not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in saved.values())


def test_moments_of_bfloat16_parameters_are_float32():
    """Against AdamW by hand in float64; bfloat16 moments would be off by 1e-3."""
    optimizer, _ = make_optimizer(
        Optimizer(learning_rate=Schedule(name="constant", peak=1e-2), clip=None, weight_decay=0.0), 10, DIMS
    )
    used, params = (
        make_storable(optimizer),
        {"bias": jnp.ones(MLP, jnp.bfloat16), "w": jnp.ones((2, MLP), jnp.bfloat16)},
    )
    state, gradients = used.init(params), random.normal(size=(20, MLP))
    mean = square = np.zeros(MLP)
    for count, g in enumerate(gradients, start=1):
        grads = {"bias": jnp.asarray(g, jnp.float32), "w": jnp.zeros((2, MLP), jnp.float32)}
        found: Any = used.update(grads, state, params)
        updates, state = found
        mean, square = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g * g
        expected = -1e-2 * (mean / (1 - 0.9**count)) / (np.sqrt(square / (1 - 0.95**count)) + 1e-8)
        np.testing.assert_allclose(updates["bias"], expected, rtol=1e-5)
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype("float32")}


LAYERED = {
    "blocks": {"w": ("layers", "embed", "mlp")},
    "others": {"w": ("layers", "mlp")},
    "head": ("embed", "mlp"),
}


@pytest.mark.parametrize("rows", [3, 4])
def test_an_array_whose_path_ends_like_a_stack_is_not_split(rows):
    """Also one whose first dim is as long as the stack has layers."""
    dims = {"head": {"w": ("embed", "mlp")}, "w": ("layers", "embed")}
    stack = jnp.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    params = {"head": {"w": jnp.arange(2.0 * rows).reshape(rows, 2)}, "w": stack}
    grads, optimizer = jax.tree.map(jnp.ones_like, params), optax.scale_by_trust_ratio()
    layered: Any = per_layer(optimizer, dims)
    found, _ = layered.update(grads, layered.init(params), params)
    expected: Any = optimizer.update(grads["head"], optimizer.init(params["head"]), params["head"])
    np.testing.assert_allclose(found["head"]["w"], expected[0]["w"], rtol=1e-6)
    np.testing.assert_allclose(found["w"], stack, rtol=1e-6)


def test_optimizers_that_mix_arrays_cannot_be_mapped_over_layers():
    mixing = per_layer(optax.clip_by_global_norm(1.0), LAYERED)
    params = {
        "blocks": {"w": jnp.ones((3, 4, 5))},
        "others": {"w": jnp.ones((2, 6))},
        "head": jnp.ones((4, 5)),
    }
    with pytest.raises(ValueError, match="vmap"):
        mixing.update(params, mixing.init(params), params)


def test_an_average_of_the_parameters():
    chained = optax.chain(optax.sgd(1.0), parameter_average(0.5))
    params: Any = {"w": jnp.array([8.0])}
    state, expected = chained.init(params), 8.0
    for count, grad in enumerate((1.0, 2.0, 4.0), start=1):
        found: Any = chained.update({"w": jnp.array([grad])}, state, params)
        updates, state = found
        params = optax.apply_updates(params, updates)
        kept = min(0.5, (1 + count) / (10 + count))
        expected = kept * expected + (1 - kept) * float(params["w"][0])
    np.testing.assert_allclose(find_evaluated_params("ema", state, params)["w"], expected, rtol=1e-6)
    assert find_evaluated_params(None, state, params) is params
    assert find_evaluated_params(lambda state, params: {"w": params["w"] * 2}, state, params)["w"][0] == 2.0
    free = optax.contrib.schedule_free_sgd(0.1)
    begun = free.init(params)
    np.testing.assert_allclose(find_evaluated_params("schedule_free", begun, params)["w"], params["w"])
    with pytest.raises(
        ValueError,
        match=r"evaluate_with is 'ema', and the optimizer keeps no such parameters;.* or"
        r" shardtrain\.optim\.optimizer_state\.parameter_average\(0\.999\) as the last",
    ):
        find_evaluated_params("ema", begun, params)
    asked, _ = make_optimizer(Optimizer(ema=0.9), 10, DIMS)
    kept = asked.init(make_model().init(jax.random.key(0))[0])[-1]  # type: ignore[index]
    assert isinstance(kept, AverageState)


@pytest.mark.parametrize(
    ("how", "optimizer"),
    [
        ("ema", optax.chain(optax.sgd(0.1), parameter_average(0.5))),
        ("schedule_free", optax.contrib.schedule_free_sgd(0.1)),
    ],
)
def test_exported_parameters_are_the_evaluated_ones(how, optimizer):
    """From the arrays of a checkpoint by their paths, as export reads them."""
    state = on_mesh(optimizer, 2)
    arrays = jax.device_get(flatten(state))
    expected = find_evaluated_params(how, state.opt_state, state.params)
    exported = make_exported_params(how, arrays, arrays.__getitem__)
    for name, value in expected.items():
        np.testing.assert_allclose(exported(name), value, rtol=1e-6)
        assert abs(value - state.params[name]).max() > 1e-3
    assert make_exported_params(None, arrays, arrays.__getitem__)("w") is arrays["params/w"]
    with pytest.raises(ValueError, match="evaluates with runs:mine, a function that"):
        make_exported_params("runs:mine", arrays, arrays.__getitem__)


def test_plateau_and_average_are_restored_from_a_checkpoint(tmp_path):
    plateau = optax.contrib.reduce_on_plateau(patience=1, rtol=0.9)
    state = on_mesh(optax.chain(optax.sgd(0.1), plateau, parameter_average(0.5)), 4)
    _, kept, average = state.opt_state
    assert float(kept.scale) < 1
    assert int(average.count) == 4
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Checkpoints(tmp_path, CheckpointPolicy()) as checkpoints:
        checkpoints.save(4, state, {})
        restored = checkpoints.restore(abstract)
    assert restored is not None
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    for path, x in flatten(state).items():
        found = flatten(restored.state)[path]
        assert (found.dtype, found.sharding) == (x.dtype, x.sharding), path
        np.testing.assert_array_equal(found, x, err_msg=path)


def test_missing_arguments_of_an_optimizer_are_listed():
    params = {"w": jnp.ones(2)}
    assert find_missing_arguments(optax.lbfgs(), params, line_search=True) == []
    assert find_missing_arguments(optax.lbfgs(), params, line_search=False) == ["value_fn"]
    assert find_missing_arguments(optax.contrib.reduce_on_plateau(), params, line_search=False) == []


def test_runs_with_missing_arguments_or_parameters_are_refused():
    def make_run(**changes: Any) -> Run:
        run = {"model": make_model(), "data": Text(), "loss": loss, "strategy": Strategy(layout=LAYOUT)}
        return Run(**{**run, **changes})

    adasum = Strategy(layout=LAYOUT, synchronisation="adasum")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"needs value_fn in every update.*needs one island and --combine mean"
    ):
        make_setup(make_run(optimizer=optax.lbfgs(), strategy=adasum))
    with pytest.raises(ValueError, match=r"evaluate_with is 'ema', and the optimizer keeps no such"):
        make_setup(make_run(evaluate_with="ema"))
    accumulating = make_run(optimizer=optax.MultiSteps(optax.sgd(0.1), 2)).optimizer
    assert isinstance(accumulating, optax.GradientTransformation)
