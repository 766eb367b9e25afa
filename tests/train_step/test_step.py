"""The step: what it changes, what it refuses to change, how shares of a batch are joined."""

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.spmd import with_logical_constraint

from shardtrain.data import place
from shardtrain.functional.loss import classification_loss, next_token_loss
from shardtrain.functional.model import Model
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.functional.rng import step_key
from shardtrain.models.mlp import MlpConfig
from shardtrain.optim.optimizer import Optimizer, make_optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.plan.hlo.collectives import collectives
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement, restorable_state
from shardtrain.train_step.step import make_evaluate, make_gradients, make_step

VOCAB, EMBED, MLP, SEQ, ROWS = 16, 8, 16, 4, 32
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
EIGHT, ONE = tuple(CUBE.items()), (("data", 1),)
SGD = optax.sgd(0.5, momentum=0.9)
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, VOCAB, (ROWS, SEQ + 1), np.int32)
WEIGHTS = np.ones(ROWS, np.float32)


def words():
    """A table, a hidden layer, scores against the table; every dim named."""

    def init(key):
        keys = jax.random.split(key, 3)
        shapes = {"table": (VOCAB, EMBED), "up": (EMBED, MLP), "down": (MLP, EMBED)}
        params = {
            name: 0.5 * jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return {**params, "bias": jnp.zeros(MLP)}, {}

    def apply(params, model_state, rng, train, tokens):
        weights = {name: with_logical_constraint(params[name], DIMS[name]) for name in params}
        x = with_logical_constraint(weights["table"][tokens], ("batch", "seq", "embed"))
        h = jnp.tanh(x @ weights["up"] + weights["bias"])
        h = with_logical_constraint(h, ("batch", "seq", "mlp"))
        x = with_logical_constraint(x + h @ weights["down"], ("batch", "seq", "embed"))
        return with_logical_constraint(x @ weights["table"].T, ("batch", "seq", "vocab")), model_state

    return Model(init=init, apply=apply, dims=DIMS)


DIMS = {"table": ("vocab", "embed"), "up": ("embed", "mlp"), "down": ("mlp", "embed"), "bias": ("mlp",)}
WORDS = words()


def placed(model, optimizer, mesh, **options):
    layout = Layout(mesh=mesh, **options)
    return make_placement(
        model, optimizer, layout, make_mesh(layout, jax.devices()[: math.prod(mesh.values())])
    )


def on_mesh(batch, placement, microbatches=1):
    return place(batch, placement.mesh, placement.layout.batch_axes, microbatches)


def tokens(weights: Any = WEIGHTS, rows: Any = slice(None)):
    return {"tokens": TOKENS[rows], "weights": np.asarray(weights, np.float32)[rows]}


def host(tree):
    return jax.tree.map(np.array, tree)


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol, atol), a, b)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@cache
def word_gradients(mesh=EIGHT, loss=next_token_loss, **options):
    """batch, microbatches -> `Sums` on the host; compiled once for each mesh and shape."""
    placement = placed(WORDS, SGD, dict(mesh), **options)
    state = init_state(WORDS, SGD, placement)
    compiled = jax.jit(make_gradients(WORDS, loss, placement))

    def run(batch, microbatches=1):
        key = step_key(state.seed, state.step)
        return host(compiled(state.params, {}, key, on_mesh(batch, placement, microbatches)))

    return run


class TestState:
    def test_the_old_state_is_donated_and_nothing_is_compiled_again(self):
        placement = placed(WORDS, SGD, CUBE)
        step = make_step(WORDS, next_token_loss, SGD, placement)
        state = init_state(WORDS, SGD, placement)
        batch = on_mesh(tokens(), placement, 2)
        losses = []
        for number in range(3):
            old, (state, metrics) = state, step(state, batch)
            # jax 0.11 keeps the counter of steps once it was read on the host
            kept = {"step"} if jax.__version_info__ >= (0, 11) else set()
            donated = [x for name, x in old._asdict().items() if name not in kept]
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
            assert int(state.step) == number + 1
            losses.append(float(metrics["loss_sum"]))
        assert losses[2] < losses[1] < losses[0]
        assert step._cache_size() == 1  # type: ignore[attr-defined]
        for leaf, spec in zip(*map(jax.tree.leaves, (state, restorable_state(placement))), strict=True):
            assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype)
            assert leaf.sharding.is_equivalent_to(spec.sharding, leaf.ndim)
        assert set(metrics) == {"loss_sum", "count", "grad_norm", "skipped"}
        for value in metrics.values():
            assert (value.shape, value.dtype) == ((), jnp.float32)
            assert value.sharding.is_fully_replicated
        assert float(metrics["count"]) == ROWS * SEQ

    def test_parameters_in_bfloat16_keep_their_dtypes(self):
        """Moments too: optax computes those of bfloat16 parameters in float32."""
        model = Model(
            init=lambda key: ({"w": jnp.ones((EMBED, MLP), jnp.bfloat16)}, {}),
            apply=lambda params, state, rng, train, x: (x @ params["w"], state),
            dims={"w": ("embed", "mlp")},
        )
        optimizer = optax.adamw(1e-2)
        placement = placed(model, optimizer, {"fsdp": 2})
        state = init_state(model, optimizer, placement)
        dtypes = jax.tree.map(lambda x: x.dtype, state)
        step = make_step(
            model, lambda apply, batch: (jnp.square(apply(batch["x"])).sum(), 8.0), optimizer, placement
        )
        batch = on_mesh({"x": np.ones((8, EMBED), jnp.bfloat16)}, placement)
        for _ in range(2):
            state, metrics = step(state, batch)
        assert jax.tree.map(lambda x: x.dtype, state) == dtypes
        assert step._cache_size() == 1  # type: ignore[attr-defined]
        assert float(metrics["skipped"]) == 0
        assert float(state.params["w"][0, 0]) < 1


@pytest.fixture(scope="module", params=[{"data": 2, "fsdp": 2}, {"data": 1}], ids=["mesh", "one CPU"])
def roots(request):
    """Numbers, one step for each -> the states and the metrics; the loss is of their square roots."""
    optimizer = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
    model = Model(
        init=lambda key: ({"w": jnp.full(EMBED, 2.0)}, {"calls": jnp.int32(0), "mean": jnp.float32(0.5)}),
        apply=lambda params, state, rng, train, x: (
            x * params["w"],
            {"calls": state["calls"] + 1, "mean": state["mean"] + x.mean()},
        ),
        dims={"w": ("embed",)},
    )
    placement = placed(model, optimizer, request.param)

    def loss(apply, batch):
        return jnp.sqrt(apply(batch["x"])).sum() + batch["more"].sum(), jnp.float32(batch["x"].shape[0])

    step = make_step(model, loss, optimizer, placement, lambda step: 0.1 - 0.01 * step)

    def run(*numbers, more=0.0):
        state = init_state(model, optimizer, placement)
        states, metrics = [host(state)], []
        for number in numbers:
            x = np.ones((8, EMBED), np.float32)
            x[5, 3] = number
            batch = {"x": x, "more": np.full(8, more if number == numbers[0] else 0, np.float32)}
            state, found = step(state, on_mesh(batch, placement))
            states.append(host(state))
            metrics.append(host(found))
        return states, metrics

    return run


class TestNotFinite:
    """A step whose loss or gradient is not finite changes nothing but the counter."""

    @pytest.mark.parametrize(
        ("bad", "more", "finite"),
        [
            (np.nan, 0, (False, False)),
            (-1.0, 0, (False, False)),
            (0.0, 0, (True, False)),  # the gradient of the square root
            (2.0, np.inf, (False, True)),
        ],
    )
    def test_it_changes_nothing_and_the_next_one_trains_on(self, roots, bad, more, finite):
        (start, skipped, trained), metrics = roots(bad, 1.0, more=more)
        assert tuple(np.isfinite(metrics[0][name]) for name in ("loss_sum", "grad_norm")) == finite
        assert_equal(skipped._replace(step=0), start)
        assert [int(state.step) for state in (start, skipped, trained)] == [0, 1, 2]
        assert [float(found["skipped"]) for found in metrics] == [1, 0]
        (_, expected), _ = roots(1.0)
        assert_equal(trained._replace(step=1), expected)
        assert int(trained.opt_state[0].count) == 1
        assert not np.array_equal(trained.params["w"], start.params["w"])

    @pytest.mark.parametrize("mesh", [ONE, (("data", 2),)], ids=str)
    def test_keeping_the_old_state_copies_no_moments_where_a_replica_is_one_cpu(self, mesh):
        optimizer = optax.adam(0.1)
        placement = placed(WORDS, optimizer, dict(mesh))
        step = make_step(WORDS, next_token_loss, optimizer, placement)
        program = step.lower(restorable_state(placement), on_mesh(tokens(), placement)).compile()  # type: ignore[attr-defined]
        # the shape of a moment, and of nothing else that is copied
        moment = f"f32[{EMBED},{MLP}]{{1,0}}"
        assert f"{moment} parameter(" in program.as_text()
        assert f"{moment} copy(" not in program.as_text()

    def test_the_branch_of_an_update_takes_the_norm_of_the_gradient_from_before_it(self):
        optimizer, _ = make_optimizer(Optimizer(clip=0.01), 10, DIMS)
        placement = placed(WORDS, optimizer, dict(ONE))
        step = make_step(WORDS, next_token_loss, optimizer, placement)
        program = step.lower(restorable_state(placement), on_mesh(tokens(), placement)).compile()  # type: ignore[attr-defined]
        lines = [line for line in program.as_text().splitlines() if "cond/branch_1_fun/" in line]
        assert lines
        assert not [line for line in lines if "branch_1_fun/reduce_sum" in line]

    def test_the_learning_rate_is_a_metric(self, roots):
        _, metrics = roots(1.0, 1.0, 1.0)
        np.testing.assert_allclose(
            [found["learning_rate"] for found in metrics], [0.1, 0.09, 0.08], rtol=1e-6
        )


class TestShares:
    """Padding, and counts that differ among the shares of a batch."""

    @pytest.mark.parametrize(("microbatches", "zero"), [(1, 3), (4, 1)])
    def test_shares_that_are_all_padding(self, microbatches, zero):
        weights = np.where(np.arange(ROWS) < 5, 1, 0)
        got = word_gradients(zero=zero)(tokens(weights), microbatches)
        assert_close(got, word_gradients(ONE)(tokens(rows=slice(5))))

    def test_a_batch_of_padding_alone(self):
        got = word_gradients()(tokens(0 * WEIGHTS), 4)
        assert (float(got.loss_sum), float(got.count)) == (0, 0)
        jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), got.grads)

    def test_counts_below_one(self):
        small, usual = (word_gradients()(tokens(scale * WEIGHTS)) for scale in (2.0**-12, 1.0))
        assert float(small.count) < 1
        assert_close(small.grads, usual.grads)

    def test_rows_have_their_weights(self):
        weights = RANDOM.integers(0, 4, ROWS)
        repeated = np.repeat(np.arange(ROWS), weights)
        expected = word_gradients(ONE)(tokens(rows=repeated))
        assert_close(word_gradients()(tokens(weights), 4), expected)

    def test_logits_of_padding_rows_may_be_anything(self):
        def loss(apply, batch):
            return next_token_loss(
                lambda inputs: jnp.where(batch["weights"][:, None, None] > 0, apply(inputs), jnp.inf), batch
            )

        weights = np.where(np.arange(ROWS) % 3 == 0, 1, 0)
        got = word_gradients(loss=loss)(tokens(weights))
        assert_close(got, word_gradients(ONE)(tokens(rows=weights > 0)))

    def test_a_batch_that_does_not_divide_is_refused(self):
        placement = placed(WORDS, SGD, CUBE)
        with pytest.raises(ValueError) as error:
            on_mesh(tokens(rows=slice(30)), placement, 4)
        assert str(error.value) == (
            "batch 30 cannot be split over axes ('data','fsdp') of total size 4 and 4 microbatches:"
            " 30 % 16 = 14. Use 16 or 32."
        )


def optax_loss(apply, batch):
    """As people write it, with a gather of the target's logit, sharded over the vocabulary or not."""
    logits = apply(batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    right = (logits.argmax(-1) == batch["tokens"][:, 1:]) * batch["weights"][:, None]
    weights = jnp.broadcast_to(batch["weights"][:, None], losses.shape)
    return (losses * weights).sum(), weights.sum(), {"accuracy": (right.sum(), weights.sum())}


class TestLosses:
    def test_a_gather_over_the_vocabulary_and_a_metric(self):
        got = word_gradients(loss=optax_loss)(tokens(), 4)
        expected = word_gradients(ONE)(tokens())
        assert_close(got._replace(metrics={}), expected)
        reference = word_gradients(ONE, loss=optax_loss)(tokens())
        assert_close(got.metrics, reference.metrics)
        right, count = got.metrics["accuracy"]
        assert 0 < right < count == ROWS * SEQ

    def test_evaluation_is_the_training_loss_without_dropout(self):
        images = RANDOM.normal(size=(ROWS, 8)).astype(np.float32)
        weights = np.where(np.arange(ROWS) < ROWS - 5, 1, 0).astype(np.float32)
        batch = {"image": images, "label": TOKENS[:, 0] % 4, "weights": weights}
        config: Any = {"features": 8, "mlp": 8, "num_layers": 1, "classes": 4}
        dropping, plain = (from_nnx(MlpConfig(**config, dropout=rate)) for rate in (0.5, 0.0))
        placement = placed(plain, SGD, CUBE)
        state = init_state(plain, SGD, placement)
        key = step_key(state.seed, state.step)
        training = {
            name: make_gradients(model, classification_loss, placement)
            for name, model in (("plain", plain), ("dropping", dropping))
        }
        on_device = on_mesh(batch, placement, 2)
        found = {
            name: jax.jit(gradients)(state.params, state.model_state, key, on_device)
            for name, gradients in training.items()
        }
        evaluate = make_evaluate(dropping, classification_loss, placement)
        got = host(evaluate(state, on_device))
        expected = found["plain"]
        assert got["count"] == expected.count == ROWS - 5
        assert_close(got["loss_sum"], expected.loss_sum)
        assert_close(got["accuracy"], expected.metrics["accuracy"])
        assert abs(float(found["dropping"].loss_sum) - got["loss_sum"]) > 1e-2
        batch["image"] = np.where(weights[:, None] > 0, images, np.nan)
        assert_close(host(evaluate(state, on_mesh(batch, placement, 2))), got)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))

        def of_mean(apply, batch):
            total, count, *_ = classification_loss(apply, batch)
            return total / count * count, count

        # a replica has rows of padding alone in the second microbatch, whose mean is no number
        weights[-ROWS // 4 :] = 0
        padded = on_mesh({**batch, "image": images}, placement, 2)
        means = make_evaluate(dropping, of_mean, placement)(state, padded)
        assert_close(host(means)["loss_sum"], host(evaluate(state, padded))["loss_sum"])


class TestOptimizer:
    def test_clipping_is_of_the_norm_of_the_whole_gradient(self):
        asked = Optimizer(
            name="sgd", b1=0.0, weight_decay=0.0, clip=0.01, learning_rate=Schedule(name="constant", peak=1.0)
        )
        optimizer, _ = make_optimizer(asked, 10, DIMS)
        placement = placed(WORDS, optimizer, CUBE)
        state = init_state(WORDS, optimizer, placement)
        before = host(state.params)
        after, metrics = make_step(WORDS, next_token_loss, optimizer, placement)(
            state, on_mesh(tokens(), placement)
        )
        moved = jax.tree.map(lambda a, b: a - b, host(after.params), before)
        gradient = word_gradients()(tokens()).grads
        norm = optax.tree.norm(gradient)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        assert norm > 0.1
        assert_close(moved, jax.tree.map(lambda g: -0.01 * g / norm, gradient), rtol=1e-2, atol=1e-6)

    @pytest.mark.parametrize("zero", [1, 3])
    def test_reduced_gradients_lie_in_shards(self, zero):
        """At zero=1 too: the optimizer state is sharded, and each shard needs its own part only."""
        placement = placed(WORDS, SGD, CUBE, zero=zero)
        state = init_state(WORDS, SGD, placement)
        key = step_key(state.seed, state.step)
        compiled = jax.jit(make_gradients(WORDS, next_token_loss, placement))
        grads = compiled(state.params, {}, key, on_mesh(tokens(), placement)).grads
        specs = placement.specs.sharded
        for name, grad in grads.items():
            assert grad.sharding.is_equivalent_to(jax.NamedSharding(placement.mesh, specs[name]), grad.ndim)

    def test_gradients_of_bfloat16_add_up_in_float32(self):
        """256 + 1 is 256 in bfloat16."""
        model = Model(
            init=lambda key: ({"w": jnp.ones(1, jnp.bfloat16)}, {}),
            apply=lambda params, state, rng, train, x: (x * params["w"], state),
            dims={"w": ("seq",)},
        )
        placement = placed(model, SGD, {"data": 2})
        state = init_state(model, SGD, placement)
        gradients = jax.jit(
            make_gradients(model, lambda apply, batch: (apply(batch["x"]).sum(), 0.125), placement)
        )
        x = np.array([256, 1, 1, 1, 1, 1, 1, 1], jnp.bfloat16)[:, None]
        found = gradients(state.params, {}, step_key(state.seed, state.step), on_mesh({"x": x}, placement, 4))
        assert found.grads["w"].dtype == jnp.float32
        assert found.grads["w"].tolist() == [263.0]
        assert (float(found.count), found.loss_sum.dtype) == (1.0, jnp.float32)


class TestModelState:
    """Each replica changes it for itself, microbatch after microbatch; then they are joined."""

    MODEL = Model(
        init=lambda key: (
            {"w": jnp.ones(EMBED)},
            {"mean": jnp.ones(()), "calls": jnp.int32(7), "on": jnp.bool(0)},
        ),
        apply=lambda params, state, rng, train, x: (
            x * params["w"],
            {"mean": 0.5 * state["mean"] + 0.5 * x.mean(), "calls": state["calls"] + 1, "on": ~state["on"]}
            if train
            else state,
        ),
        dims={"w": ("embed",)},
    )

    @staticmethod
    def loss(apply, batch):
        return (apply(batch["x"]) * batch["weights"][:, None]).sum(), batch["weights"].sum()

    def after(self, batch, mesh, microbatches, **options):
        placement = placed(self.MODEL, SGD, mesh, **options)
        step = make_step(self.MODEL, self.loss, SGD, placement)
        state, _ = step(init_state(self.MODEL, SGD, placement), on_mesh(batch, placement, microbatches))
        return host(state.model_state)

    @pytest.mark.parametrize(("mesh", "zero", "replicas"), [({"fsdp": 4}, 3, 1), ({"fsdp": 4}, 1, 4)])
    def test_the_mean_by_count(self, mesh, zero, replicas):
        x = RANDOM.normal(size=(16, EMBED)).astype(np.float32)
        weights = np.where(np.arange(16) < 13, 1, 0).astype(np.float32)
        weights[0] = 3
        means, counts = np.ones(replicas), np.zeros(replicas)
        for rows in np.arange(16).reshape(2, replicas, -1):
            for replica, share in enumerate(rows):
                if weights[share].any():
                    means[replica] = 0.5 * means[replica] + 0.5 * x[share].mean()
                counts[replica] += weights[share].sum()
        got = self.after({"x": x, "weights": weights}, mesh, 2, zero=zero)
        np.testing.assert_allclose(got["mean"], (means * counts).sum() / counts.sum(), rtol=1e-5)
        assert (got["calls"], got["calls"].dtype, got["on"]) == (9, np.int32, False)

    @pytest.mark.parametrize("rows", [8, 0])
    def test_padding_leaves_no_trace(self, rows):
        """Also where it holds what is not finite."""
        x = np.where(np.arange(16)[:, None] < rows, 2.0, np.nan) * np.ones((16, EMBED), np.float32)
        weights = np.where(np.arange(16) < rows, 1, 0).astype(np.float32)

        def loss(apply, batch):
            outputs = jnp.where(batch["weights"][:, None] > 0, apply(batch["x"]), 0)
            return 0 * outputs.sum(), batch["weights"].sum()

        placement = placed(self.MODEL, SGD, {"data": 2})
        state = init_state(self.MODEL, SGD, placement)
        gradients = jax.jit(make_gradients(self.MODEL, loss, placement))
        batch = on_mesh({"x": x, "weights": weights}, placement, 4)
        got = host(
            gradients(state.params, state.model_state, step_key(state.seed, state.step), batch).model_state
        )
        assert got["mean"] == (1.75 if rows else 1)
        assert got["calls"] == (9 if rows else 7)


def test_dropout_changes_with_the_step_and_the_seed_alone():
    model = from_nnx(MlpConfig(features=8, mlp=8, num_layers=1, classes=4, dropout=0.5))
    placement = placed(model, optax.set_to_zero(), {"data": 2})
    step = make_step(model, classification_loss, optax.set_to_zero(), placement)
    batch = {
        "image": RANDOM.normal(size=(8, 8)).astype(np.float32),
        "label": TOKENS[:8, 0] % 4,
        "weights": WEIGHTS[:8],
    }
    on_device = on_mesh(batch, placement)
    losses = []
    for _ in range(2):
        state = init_state(model, optax.set_to_zero(), placement)
        for _ in range(3):
            state, metrics = step(state, on_device)
            losses.append(float(metrics["loss_sum"]))
    assert losses[:3] == losses[3:]
    assert len(set(losses)) == 3


@pytest.mark.parametrize(("mesh", "zero"), [({"data": 4}, 3), ({"fsdp": 4}, 1)])
def test_gradients_are_reduced_once_however_many_microbatches(mesh, zero):
    placement = placed(WORDS, SGD, mesh, zero=zero)
    step = make_step(WORDS, next_token_loss, SGD, placement)
    state = restorable_state(placement)
    batch = {
        "tokens": jax.ShapeDtypeStruct((4, ROWS // 4, SEQ + 1), jnp.int32),
        "weights": jax.ShapeDtypeStruct((4, ROWS // 4), jnp.float32),
    }
    found = collectives(step.lower(state, batch).compile().as_text(), dict(placement.mesh.shape))  # type: ignore[attr-defined]
    assert found
    assert [c for c in found if c.loops] == []
