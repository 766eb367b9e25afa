"""Losses: against optax, over splits of the batch, with padding rows of any values."""

import itertools
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.cross_entropy import (
    cross_entropy,
    soft_cross_entropy,
    sum_regularized_cross_entropy,
)
from shardtrain.functional.loss import Regularized, classification_loss, masked_token_loss, next_token_loss
from shardtrain.functional.metrics import add_metrics
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh

RANDOM = np.random.default_rng(0)
LOGITS: Any = (3 * RANDOM.normal(size=(6, 5, 11))).astype(np.float32)
TARGETS: Any = RANDOM.integers(0, 11, (6, 5)).astype(np.int32)
WEIGHTS: Any = np.array([1, 1, 0.25, 1, 0, 0], np.float32)[:, None] * np.ones((6, 5), np.float32)

compiled = jax.jit(cross_entropy)


def test_cross_entropy_equals_optax():
    expected = optax.softmax_cross_entropy_with_integer_labels(LOGITS, TARGETS)
    total, count = compiled(LOGITS, TARGETS)
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-6)
    assert (total.dtype, total.shape, count.dtype, float(count)) == (jnp.float32, (), jnp.float32, 30)


def of_one_device(logits, targets, weights):
    """The loss under the rules of one device, which looks the logits of the targets up."""
    layout = Layout()
    mesh = make_mesh(layout, jax.devices()[:1])
    with activation_rules(layout.activation_rules, mesh, *layout.tracing):
        return cross_entropy(logits, targets, weights)[0]


def test_one_device_computes_the_same_by_a_lookup():
    # padding has any targets and logits
    logits, targets = LOGITS.copy(), TARGETS.copy()
    logits[4:], targets[5] = np.inf, -100
    texts = [str(jax.make_jaxpr(f)(logits, targets, WEIGHTS)) for f in (of_one_device, cross_entropy)]
    assert ["gather" in text for text in texts] == [True, False]
    plain = jax.jit(jax.value_and_grad(lambda x: cross_entropy(x, targets, WEIGHTS)[0]))(logits)
    found = jax.jit(jax.value_and_grad(of_one_device))(logits, targets, WEIGHTS)
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    assert np.isfinite(found[0])
    # one row of targets for all rows
    looked_up = jax.jit(of_one_device)
    found = looked_up(LOGITS, TARGETS[0], WEIGHTS)
    np.testing.assert_array_equal(found, compiled(LOGITS, TARGETS[0], WEIGHTS)[0])
    assert np.isnan(looked_up(LOGITS, np.where(TARGETS[0, 0] == TARGETS, 11, TARGETS), WEIGHTS))


def test_the_gradient_is_that_of_the_single_steps_backward_and_forward():
    def steps(logits):
        return (optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS) * WEIGHTS).sum()

    def loss(logits):
        return cross_entropy(logits, TARGETS, WEIGHTS)[0]

    along = np.sin(np.arange(LOGITS.size, dtype=np.float32)).reshape(LOGITS.shape)
    got, expected = (
        jax.jit(lambda x, f=f: (jax.grad(f)(x), jax.jvp(f, (x,), (along,))[1]))(LOGITS) for f in (loss, steps)
    )
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)


def test_label_smoothing_and_a_z_loss_are_those_of_optax_and_of_the_definition():
    # targets that are shares, and the square of the logarithm of the sum, by their single steps
    def steps(logits):
        shares = optax.smooth_labels(jax.nn.one_hot(TARGETS, 11), 0.2)
        squares = jnp.square(jax.nn.logsumexp(logits, -1))
        return ((optax.softmax_cross_entropy(logits, shares) + 0.1 * squares) * WEIGHTS).sum()

    def loss(logits):
        return sum_regularized_cross_entropy(logits, TARGETS, WEIGHTS, label_smoothing=0.2, z_loss=0.1)[0]

    got, expected = (
        jax.jit(lambda x, f=f: (jax.jvp(f, (x,), (x[::-1],)), jax.grad(f)(x)))(LOGITS) for f in (loss, steps)
    )
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-6)
    # without both it is the plain one, which is always the metric
    plain = compiled(LOGITS, TARGETS, WEIGHTS)
    regularized = jax.jit(sum_regularized_cross_entropy, static_argnames=("label_smoothing", "z_loss"))
    assert regularized(LOGITS, TARGETS, WEIGHTS)[:2] == plain
    metrics = regularized(LOGITS, TARGETS, WEIGHTS, label_smoothing=0.2, z_loss=0.1)[2]
    assert metrics == {"cross_entropy": plain}


def test_padding_is_not_regularized():
    logits, targets = LOGITS.copy(), TARGETS.copy()
    logits[4:], targets[5] = np.inf, -100
    loss = partial(sum_regularized_cross_entropy, label_smoothing=0.2, z_loss=0.1)
    of = jax.jit(jax.value_and_grad(lambda logits, targets: loss(logits, targets, WEIGHTS)[0]))
    jax.tree.map(np.testing.assert_array_equal, of(logits, targets), of(LOGITS, TARGETS))
    assert np.isnan(of(LOGITS, np.where(TARGETS[0, 0] == TARGETS, 11, TARGETS))[0])


def test_what_cannot_be_regularized_is_refused():
    with pytest.raises(ValueError, match=r"below 1\n.*z_loss is -1.0; use 0 \(none\) or more"):
        Regularized(next_token_loss, label_smoothing=1.0, z_loss=-1.0)
    with pytest.raises(ValueError, match="classification_loss, which takes no argument `entropy`"):
        Regularized(classification_loss, z_loss=1e-4)
    # a wrapper passes on what it takes itself
    wrapper = wraps(next_token_loss)(lambda apply, batch: next_token_loss(apply, batch))
    for loss in (wrapper, max, add_metrics(next_token_loss, mine=lambda outputs, batch: (0.0, 1.0))):
        with pytest.raises(ValueError, match="takes no argument `entropy`"):
            Regularized(loss, z_loss=1e-4)
    Regularized(lambda *inputs, **options: next_token_loss(*inputs, **options), z_loss=1e-4)
    some: Any = "0.1"
    with pytest.raises(ValueError, match="label_smoothing"):
        Regularized(next_token_loss, label_smoothing=some)


def test_bfloat16_logits_are_summed_in_float32():
    logits = LOGITS.astype(jnp.bfloat16)
    total, _ = compiled(logits, TARGETS)
    np.testing.assert_allclose(total, compiled(logits.astype(np.float32), TARGETS)[0], rtol=1e-6)
    grad = jax.jit(jax.grad(lambda logits: cross_entropy(logits, TARGETS)[0]))(jnp.asarray(logits))
    assert grad.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_targets_of_any_integer_dtype(dtype):
    """More classes than the dtype counts: class 256 must not be taken for class 0."""
    logits = RANDOM.normal(size=(4, 600)).astype(np.float32)
    targets = np.array([0, 1, 44, 127])
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, targets).sum()
    np.testing.assert_allclose(compiled(logits, targets.astype(dtype))[0], expected, rtol=1e-6)


def test_a_class_that_is_masked_out():
    logits = LOGITS.copy()
    logits[..., 3] = -np.inf
    targets = np.where(TARGETS == 3, 4, TARGETS)
    (total, _), grad = jax.jit(jax.value_and_grad(cross_entropy, has_aux=True))(logits, targets)
    expected = optax.softmax_cross_entropy_with_integer_labels(
        np.delete(logits, 3, -1), targets - (targets > 3)
    )
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-6)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_padding_rows_may_have_any_values(bad):
    weights = np.where(np.arange(6) < 3, WEIGHTS[:, 0], 0).astype(np.float32)[:, None].repeat(5, 1)
    logits = np.where(weights[..., None] > 0, LOGITS, bad)
    logits[4, 2] = LOGITS[4, 2]
    logits[4, 2, 5] = bad

    def loss(logits, targets, weights):
        return cross_entropy(logits, targets, weights)[0]

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    value, grad = value_and_grad(logits, TARGETS, weights)
    expected, expected_grad = value_and_grad(LOGITS[:3], TARGETS[:3], weights[:3])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_array_equal(grad[3:], 0)
    np.testing.assert_allclose(grad[:3], expected_grad, rtol=1e-6)


LOSSES = {
    "tokens": (
        jax.jit(lambda batch: next_token_loss(lambda tokens: 0.1 * LOGITS[0, 0] * tokens[..., None], batch)),
        {"tokens": RANDOM.integers(0, 11, (6, 5)).astype(np.int32), "weights": WEIGHTS[:, 0]},
    ),
    "masked": (
        jax.jit(
            lambda batch: masked_token_loss(
                lambda tokens, mask, segments: (
                    LOGITS[0, 0] * tokens[..., None] + 0.1 * mask[..., None] + segments[..., None]
                ),
                batch,
            )
        ),
        {
            "tokens": RANDOM.integers(0, 11, (6, 5)).astype(np.int32),
            "targets": RANDOM.integers(0, 11, (6, 5)).astype(np.int32),
            "segments": RANDOM.integers(0, 2, (6, 5)).astype(np.int32),
            "chosen": np.ones((6, 5), np.int8),
            "weights": WEIGHTS[:, 0],
        },
    ),
    "images": (
        jax.jit(lambda batch: classification_loss(lambda image: image, batch)),
        {"image": LOGITS[:, 0], "label": TARGETS[:, 0], "weights": WEIGHTS[:, 0]},
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(0, 6), max_size=3))
def test_sums_and_counts_add_up_over_any_split_of_the_batch(name, cuts):
    loss, batch = LOSSES[name]
    edges = [0, *sorted(cuts), 6]
    parts = [
        jax.tree.leaves(loss({key: value[first:last] for key, value in batch.items()}))
        for first, last in itertools.pairwise(edges)
        if last > first
    ]
    whole = jax.tree.leaves(loss(batch))
    np.testing.assert_allclose(np.sum(parts, 0), whole, rtol=1e-5)
    assert whole[1] == WEIGHTS[:, 0].sum() * {"tokens": 4, "masked": 5, "images": 1}[name]


def test_masked_token_loss_counts_chosen_tokens_and_passes_optional_inputs():
    tokens, chosen = np.array([[1, 2, 0]], np.int32), np.array([[0, 1, 0]], np.int8)
    batch: Any = {"tokens": tokens, "targets": tokens[:, ::-1] + 1, "chosen": chosen, "weights": np.ones(1)}
    seen: list[Any] = []

    def apply(*inputs):
        seen.append(inputs)
        return jnp.where(np.arange(4) == 3, 2.0, 0) * jnp.ones((1, 3, 1))

    total, count = masked_token_loss(apply, batch)
    np.testing.assert_allclose((total, count), (np.log(3 + np.exp(2)) - 2, 1), rtol=1e-6)
    assert len(seen[0]) == 1
    batch["segments"] = tokens
    masked_token_loss(apply, batch)
    np.testing.assert_array_equal(np.concatenate(seen[1]), [*tokens, [1, 1, 1], *tokens])


def test_accuracy_ignores_padding_rows():
    logits = np.eye(4, dtype=np.float32)
    batch: Any = {
        "image": logits,
        "label": np.array([0, 1, 0, 3]),
        "weights": np.array([1, 1, 1, 0], np.float32),
    }
    total, count, metrics = classification_loss(lambda image: image, batch)
    right, out_of = metrics["accuracy"]
    assert (list(metrics), float(right), float(out_of), float(count)) == (["accuracy"], 2, 3, 3)
    np.testing.assert_allclose(total, cross_entropy(batch["image"][:3], batch["label"][:3])[0], rtol=1e-6)
    batch["image"] = logits * np.array([1, 1, 1, np.nan], np.float32)[:, None]
    assert jax.tree.all(jax.tree.map(jnp.isfinite, classification_loss(lambda image: image, batch)))


def test_shares_of_classes_are_targets_too():
    """A label of one class is that class; a mixed one has the mixed loss, and the gradient of it."""
    rows: Any = {"image": LOGITS[:, 0], "weights": np.array(WEIGHTS[:, 0])}
    first, second = TARGETS[:, 0], (TARGETS[:, 0] + 1) % LOGITS.shape[-1]
    one_hot: Any = np.eye(LOGITS.shape[-1], dtype=np.float32)

    @jax.jit
    def weighted(label, image, weights):
        return classification_loss(lambda image: image, {"image": image, "label": label, "weights": weights})

    def loss(label, image=rows["image"]):
        return weighted(label, image, rows["weights"])

    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), loss(one_hot[first]), loss(first))
    mixed = 0.75 * one_hot[first] + 0.25 * one_hot[second]
    total, _, metrics = loss(mixed)
    np.testing.assert_allclose(total, 0.75 * loss(first)[0] + 0.25 * loss(second)[0], rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"][0], loss(first)[2]["accuracy"][0])
    gradients = [
        jax.grad(lambda image, label=label: loss(label, image)[0])(rows["image"])
        for label in (mixed, first, second)
    ]
    np.testing.assert_allclose(gradients[0], 0.75 * gradients[1] + 0.25 * gradients[2], rtol=1e-5, atol=1e-6)
    # a row of weight 0 may be anything
    rows["weights"] = rows["weights"] * (np.arange(len(first)) > 0)
    damaged = np.array(rows["image"])
    damaged[0] = np.inf
    assert all(np.isfinite(x) for x in (loss(mixed, damaged)[0], *loss(mixed, damaged)[2]["accuracy"]))


def test_an_invalid_target_makes_the_loss_nan():
    for target in (4, -1):
        total, _ = cross_entropy(jnp.zeros((2, 4)), jnp.array([0, target]))
        assert jnp.isnan(total)
    total, count = cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 4]), jnp.array([1.0, 0.0]))
    assert (round(float(total), 4), float(count)) == (1.3863, 1.0)


def test_soft_targets_of_padding_and_shares_of_nothing_take_no_part():
    logits = jnp.array([[0.0, -jnp.inf], [1.0, 2.0]])
    targets = jnp.array([[1.0, 0.0], [jnp.nan, jnp.nan]])
    total, count = soft_cross_entropy(logits, targets, jnp.array([1.0, 0.0]))
    assert (float(total), float(count)) == (0.0, 1.0)
    with pytest.raises(ValueError, match="shares of 2 classes, and the model has 5"):
        soft_cross_entropy(jnp.zeros((1, 5)), jnp.ones((1, 2)), jnp.ones(1))
