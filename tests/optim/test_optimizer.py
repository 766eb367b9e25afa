"""Schedules by value; updates of each optimizer on a small model; refused options."""

import math
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from shardtrain.optim.optimizer import OPTIMIZERS, Optimizer, find_muon_dims, make_optimizer, select_decayed
from shardtrain.optim.schedules import SCHEDULES, Schedule, make_schedule
from shardtrain.optim.separable import coupling_problems, order_problems, share_problems
from shardtrain.sharding.array_dims import is_dims


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (Schedule(name="constant"), {0: 2.0, 50: 2.0, 110: 2.0, 1000: 2.0}),
        (Schedule(name="constant", warmup=10, start=0.25), {0: 0.5, 5: 1.25, 10: 2.0, 110: 2.0}),
        (Schedule(name="constant", start=0.25), {0: 2.0, 110: 2.0}),
        (
            Schedule(name="cosine", warmup=10, final=0.25),
            {0: 0.0, 4: 0.8, 10: 2.0, 60: 1.25, 110: 0.5, 500: 0.5},
        ),
        (
            Schedule(name="wsd", warmup=10, final=0.25, decay=0.5),
            {0: 0.0, 9: 1.8, 10: 2.0, 55: 2.0, 110: 0.5, 88: 1.1, 500: 0.5},
        ),
        (Schedule(name="wsd", final=0.0, decay=0.0), {0: 2.0, 109: 2.0, 110: 0.0}),
        (Schedule(name="wsd", warmup=10, final=0.0, decay=1.0), {5: 1.0, 10: 2.0, 60: 1.0, 110: 0.0}),
        (Schedule(name="inverse_sqrt", warmup=10), {0: 0.0, 5: 1.0, 10: 2.0, 40: 1.0, 90: 2 / 3, 1000: 0.2}),
        (Schedule(name="inverse_sqrt"), {0: 2.0, 3: 1.0, 8: 2 / 3}),
        (
            Schedule(name="polynomial", warmup=10, final=0.25, power=2.0),
            {0: 0.0, 5: 1.0, 10: 2.0, 60: 0.875, 110: 0.5, 500: 0.5},
        ),
        (Schedule(name="polynomial", final=0.5, power=0.5), {0: 2.0, 82.5: 1.5, 110: 1.0}),
    ],
    ids=lambda x: x.name if isinstance(x, Schedule) else "",
)
def test_schedules_by_value(schedule, rates):
    rate: Any = make_schedule(replace(schedule, peak=2.0), 110)
    found = {step: float(rate(step)) for step in rates}
    assert found == pytest.approx(rates, abs=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_shorter_than_its_warmup(name):
    for steps in (0, 5):
        rate: Any = make_schedule(Schedule(name=name, peak=1.0, warmup=5), steps)
        assert [float(rate(step)) for step in range(6)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_all_problems_of_a_schedule_at_once():
    with pytest.raises(ValueError) as error:
        Schedule(name="cosin", peak=math.nan, warmup=-1, start=-1.0, final=1.5, decay=-0.5, power=0.0)  # type: ignore[arg-type]
    assert str(error.value) == (
        "this schedule cannot be used:"
        "\n  - name is 'cosin'; allowed: constant, cosine, wsd, inverse_sqrt, polynomial"
        "\n  - peak is nan; give a number, finite"
        "\n  - power is 0.0; it must be a number above 0, such as 1 (linear) or 2"
        "\n  - warmup is -1 steps; it must be 0 or more"
        "\n  - start is -1.0; it must lie between 0 and 1"
        "\n  - final is 1.5; it must lie between 0 and 1"
        "\n  - decay is -0.5; it must lie between 0 and 1"
    )


def test_all_problems_of_an_optimizer_at_once():
    with pytest.raises(ValueError) as error:
        Optimizer(name="adam", b1=1.0, b2=-0.1, eps=-1.0, weight_decay=-0.1, clip=0.0)  # type: ignore[arg-type]
    assert str(error.value) == (
        "this optimizer cannot be used:"
        "\n  - name is 'adam'; allowed: adamw, sgd, lion, adafactor, lamb, muon"
        "\n  - b1 is 1.0; it must lie in [0, 1)"
        "\n  - b2 is -0.1; it must lie in [0, 1)"
        "\n  - eps is -1.0; it must be a number above 0, for it keeps 0 from dividing 0"
        "\n  - weight_decay is -0.1; it must be a number, 0 or more"
        "\n  - clip is 0.0; it must be above 0, or None for no clipping"
    )


DIMS = {
    "table": ("vocab", "embed"),
    "up": ("layers", "embed", "mlp"),
    "q": ("layers", "embed", "heads", "head_dim"),
    "out": ("layers", "heads", "head_dim", "embed"),
    "q_bias": ("layers", "heads", "head_dim"),
    "head_gain": ("layers", "head_dim"),
    "one_head": ("embed", "head_dim"),
    "experts": ("layers", "experts", "mlp", "embed"),
    "expert_bias": ("layers", "experts", "mlp"),
    "conv": ("height", "width", "channels_in", "channels_out"),
    "seq": ("seq", "embed"),
    "gain": ("layers", "embed"),
    "scale": (),
    "nameless": None,
    "nameless_bias": None,
}
MATRICES = {"table", "up", "q", "out", "one_head", "experts", "conv", "seq", "nameless"}


def make_params():
    sizes = dict.fromkeys(("vocab", "embed", "mlp", "heads", "head_dim", "layers", "experts", "seq"), 2)
    shapes = {
        name: tuple(sizes.get(dim, 3) for dim in dims) for name, dims in DIMS.items() if dims is not None
    }
    shapes |= {"nameless": (4, 4), "nameless_bias": (4,)}
    random = np.random.default_rng(0)
    return {name: jnp.asarray(random.normal(1.0, 1.0, shape), jnp.float32) for name, shape in shapes.items()}


PARAMS = make_params()
FEW = {name: PARAMS[name] for name in ("up", "q_bias")}
"""A matrix and a bias of blocks: most tests need no more."""


def test_weight_decay_applies_to_matrices():
    assert select_decayed(DIMS, PARAMS) == {name: name in MATRICES for name in DIMS}


def test_muon_takes_the_matrices_of_the_blocks():
    assert {name: found for name, found in find_muon_dims(DIMS).items() if found is not None} == {
        "up": MuonDimensionNumbers((1,), (2,)),
        "q": MuonDimensionNumbers((1,), (2, 3)),
        "out": MuonDimensionNumbers((1, 2), (3,)),
        "one_head": MuonDimensionNumbers((0,), (1,)),
        "experts": MuonDimensionNumbers((2,), (3,)),
        "conv": MuonDimensionNumbers((0, 1, 2), (3,)),
    }


def one_update(grads=None, params=FEW, **changes):
    """What the first step of an optimizer adds to the parameters."""
    options = {"learning_rate": Schedule(name="constant", peak=0.01), "clip": None}
    dims = {name: DIMS[name] for name in params}
    optimizer, _ = make_optimizer(Optimizer(**{**options, **changes}), 10, dims)
    grads = jax.tree.map(jnp.zeros_like, params) if grads is None else grads
    return jax.jit(lambda: optimizer.update(grads, optimizer.init(params), params)[0])()


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "lamb"])
def test_weight_decay_is_decoupled(name):
    """Without a gradient a matrix shrinks by rate times decay, the same for every optimizer."""
    updates = one_update(name=name, weight_decay=0.5)
    for path, update in updates.items():
        share = 0.01 * 0.5 if path in MATRICES else 0
        np.testing.assert_allclose(update, -share * PARAMS[path], rtol=1e-5, atol=1e-9, err_msg=path)


def test_lamb_scales_the_decay_with_the_update():
    """You et al. 2020: the trust ratio makes the step as long as rate times the parameter."""
    updates = one_update(name="lamb", weight_decay=0.5)
    np.testing.assert_allclose(updates["up"], -0.01 * FEW["up"], rtol=1e-5)
    np.testing.assert_array_equal(updates["q_bias"], 0)


def test_optimizers_equal_those_of_optax():
    """The update of each, against optax called by hand, on a matrix and a vector."""
    dims = {"w": ("embed", "mlp"), "b": ("mlp",)}
    params = {"w": jnp.arange(6.0).reshape(2, 3) + 1, "b": jnp.ones(3)}
    grads = jax.tree.map(lambda p: jnp.cos(p), params)
    mask = {"w": True, "b": False}
    references = {
        "adamw": optax.adamw(0.01, 0.8, 0.9, 1e-3, weight_decay=0.5, mask=mask),
        "lion": optax.lion(0.01, 0.8, 0.9, weight_decay=0.5, mask=mask),
        "lamb": optax.lamb(0.01, 0.8, 0.9, 1e-3, weight_decay=0.5, mask=mask),
        "adafactor": optax.chain(optax.adafactor(0.01), optax.add_decayed_weights(-0.01 * 0.5, mask=mask)),
        "sgd": optax.chain(optax.sgd(0.01, 0.8), optax.add_decayed_weights(-0.01 * 0.5, mask=mask)),
    }
    for name, reference in references.items():
        asked = Optimizer(
            name=name,  # type: ignore[arg-type]
            learning_rate=Schedule(name="constant", peak=0.01),
            weight_decay=0.5,
            b1=0.8,
            b2=0.9,
            eps=1e-3,
            clip=None,
        )
        results = []
        for optimizer in (make_optimizer(asked, 10, dims)[0], reference):
            state, updates = optimizer.init(params), {}
            for scale in (1.0, -0.5):
                scaled = jax.tree.map(lambda g, scale=scale: scale * g, grads)
                updates, state = optimizer.update(scaled, state, params)
            results.append(updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *results)


def test_muon_makes_matrices_orthogonal():
    """Its update has equal singular values: here all of one size up to Newton and Schulz's five steps."""
    random = np.random.default_rng(0)
    grads = {name: jnp.asarray(random.normal(size=p.shape), jnp.float32) for name, p in PARAMS.items()}
    updates = one_update(grads, PARAMS, name="muon", weight_decay=0.0)
    for layer in np.asarray(updates["q"]).reshape(2, 2, 4):
        singular = np.linalg.svd(layer, compute_uv=False)
        assert singular.max() < 1.8 * singular.min()


def test_adamw_updates_what_muon_does_not():
    random = np.random.default_rng(0)
    grads = {name: jnp.asarray(random.normal(size=p.shape), jnp.float32) for name, p in PARAMS.items()}
    got = one_update(grads, PARAMS, name="muon", weight_decay=0.0, b1=0.8, b2=0.9)
    adamw = optax.adamw(0.01, 0.8, 0.9, weight_decay=0.0, nesterov=True)
    expected, _ = jax.jit(lambda: adamw.update(grads, adamw.init(PARAMS), PARAMS))()
    for name in ("table", "seq", "gain", "q_bias", "expert_bias", "nameless"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, err_msg=name)


def test_eps_reaches_the_optimizers_that_have_it():
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-3), FEW)
    for name in ("adamw", "muon"):
        small, large = (one_update(grads, name=name, weight_decay=0.0, eps=eps) for eps in (1e-8, 1.0))
        assert abs(large["q_bias"]).max() < 0.01 * abs(small["q_bias"]).max()


def test_clipping_is_of_the_global_norm():
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    dims = {"a": ("embed",), "b": ("embed",)}
    grads = {"a": jnp.full(3, 2.0), "b": jnp.full(4, 1.0)}  # of norm 4
    sgd = Optimizer(name="sgd", learning_rate=Schedule(name="constant", peak=1.0), b1=0.0)
    for clip, share in ((1.0, 0.25), (8.0, 1.0), (None, 1.0)):
        optimizer, _ = make_optimizer(replace(sgd, clip=clip), 10, dims)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        np.testing.assert_allclose(updates["a"], -2.0 * share, rtol=1e-6)  # type: ignore[index]
        np.testing.assert_allclose(updates["b"], -1.0 * share, rtol=1e-6)  # type: ignore[index]
    # a step gives the norm that it has computed
    optimizer = optax.with_extra_args_support(make_optimizer(replace(sgd, clip=1.0), 10, dims)[0])
    updates, _ = optimizer.update(grads, optimizer.init(params), params, grad_norm=jnp.float32(8.0))
    np.testing.assert_allclose(updates["a"], -2.0 / 8, rtol=1e-6)  # type: ignore[index]


def test_a_transformation_of_optax_is_used_unchanged():
    given = optax.adam(1e-3)
    assert make_optimizer(given, 10, DIMS) == (given, None)


def test_the_learning_rate_is_the_schedule_of_the_run():
    asked = Optimizer(name="sgd", b1=0.0, clip=None, learning_rate=Schedule(peak=1.0, warmup=2, final=0.0))
    rate: Any
    optimizer, rate = make_optimizer(asked, 4, {"w": ("embed",)})
    params = {"w": jnp.zeros(1)}
    state = optimizer.init(params)
    for step in range(4):
        updates, state = optimizer.update({"w": jnp.ones(1)}, state, params)
        np.testing.assert_allclose(updates["w"], -rate(step), rtol=1e-6)  # type: ignore[index]
    assert [round(float(rate(step)), 6) for step in range(5)] == [0, 0.5, 1, 0.5, 0]


def scaled_together(wanted, limit):
    """Divide the arrays of a group by their norm, if that is above a limit."""

    def update(grads, state, params=None):
        norm = jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(grads) if wanted(x)))
        factor = jnp.where(norm > limit, limit / norm, 1)
        return jax.tree.map(lambda x: x * factor if wanted(x) else x, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), cast(Any, update))


ARRAYS, LAYERS_OF_A_STACK = "of one array depends", "of one layer depends"
A_PART = "a part of the parameters is updated otherwise"


def by_label(labels):
    """Two rates, by labels of the leaves in their order."""

    def tree_of(tree):
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, labels(tree)[: len(leaves)])

    return optax.multi_transform({"a": optax.sgd(0.1), "b": optax.sgd(0.01)}, tree_of)


def by_number(grad):
    """A rate for each entry of the first dim, by its number."""
    return grad * (0.5 ** jnp.arange(len(grad))).reshape(-1, *[1] * (grad.ndim - 1))


@pytest.mark.parametrize(
    ("optimizer", "problems"),
    [
        (Optimizer(name="adamw", clip=1.0), [ARRAYS, LAYERS_OF_A_STACK]),
        (optax.contrib.reduce_on_plateau(), []),
        (scaled_together(lambda x: x.ndim < 3, 1e12), [ARRAYS, LAYERS_OF_A_STACK]),
        (optax.apply_if_finite(optax.sgd(0.1), 3), [ARRAYS, LAYERS_OF_A_STACK]),
        (optax.chain(optax.clip_by_block_rms(1e12), optax.sgd(0.1)), [LAYERS_OF_A_STACK]),
        (optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), []),
        (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), [A_PART]),
        (by_label(lambda tree: ["a", "b"] * 50), [A_PART]),
        (by_label(lambda tree: ["a" if x.ndim > 1 else "b" for x in jax.tree.leaves(tree)]), []),
        (optax.stateless(lambda grads, _: jax.tree.map(lambda g: g / g.size, grads)), [A_PART]),
    ],
)
def test_optimizers_that_mix_arrays_or_layers_are_detected(optimizer, problems):
    dims = {
        "blocks": {"bias": ("layers", "mlp"), "kernel": ("layers", "embed", "mlp")},
        "head": {"bias": ("vocab",), "kernel": ("embed", "vocab")},
        "input": {"bias": ("embed",), "kernel": ("features", "embed")},
    }
    params = jax.tree.map(lambda names: np.ones((3, 4, 5)[: len(names)]), dims, is_leaf=is_dims)
    made, _ = make_optimizer(optimizer, 100, dims)
    found = coupling_problems(made, dims, params) or share_problems(made, dims, params)
    assert len(found) == len(problems)
    assert all(part in text for part, text in zip(problems, found, strict=True))


def test_labels_given_as_a_tree_of_the_whole_model_are_refused_for_stages():
    params = {"a": np.ones((2, 2)), "b": np.ones(2)}
    labelled = optax.multi_transform({"x": optax.sgd(0.1), "y": optax.sgd(0.2)}, {"a": "x", "b": "y"})
    (text,) = share_problems(labelled, {"a": ("embed", "mlp"), "b": ("mlp",)}, params)
    assert text.startswith("it does not update a part of the parameters: ")


EVEN, UNEVEN = (0, 2, 1, 3), (0, 1, 2, 3, 4, -1)
"""The blocks of two virtual stages, and of a cut with one row of zeros."""


def is_late(step, **_):
    return jnp.asarray(step) > 99


@pytest.mark.parametrize(
    ("optimizer", "stored_blocks", "is_right"),
    [
        (optax.lars(0.1), UNEVEN, True),
        (optax.lbfgs(0.1), UNEVEN, True),
        (optax.chain(optax.clip_by_block_rms(0.05), optax.sgd(0.1)), EVEN, True),
        (optax.chain(optax.clip_by_block_rms(0.05), optax.sgd(0.1)), UNEVEN, False),
        (optax.adafactor(optax.linear_schedule(0, 1e-3, 9999), min_dim_size_to_factor=2), UNEVEN, False),
        (optax.conditionally_transform(optax.clip_by_block_rms(0.05), is_late), UNEVEN, False),
        (optax.stateless(lambda grads, _: jax.tree.map(by_number, grads)), EVEN, False),
    ],
)
def test_optimizers_that_read_the_order_or_number_of_layers_are_found(optimizer, stored_blocks, is_right):
    params, dims = {"w": np.ones((5, 2, 3))}, {"w": ("layers", "embed", "mlp")}
    assert (order_problems(optimizer, dims, params, stored_blocks) == []) == is_right
