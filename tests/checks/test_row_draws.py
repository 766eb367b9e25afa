"""Random draws of a model: each row gets the numbers of its place in the batch, or the line is named."""

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.checks.row_draws import find_draws
from shardtrain.functional.linen_model import from_linen
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.functional.rng import BITS, SPLIT, Draw, row_key

SEQ, EMBED, WIDTH = 6, 4, 8
X = np.random.default_rng(0).normal(size=(12, SEQ, EMBED)).astype(np.float32)


def loss(apply, batch):
    return (apply(batch["x"]) ** 2).sum(), jnp.float32(len(batch["x"]))


def model_of(call):
    class Drawing(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(EMBED, WIDTH, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return call(self, x)

    return from_nnx(Drawing)


def windows(m, x):
    y = m.dense(x).reshape(len(x), 2, 3, WIDTH).swapaxes(1, 2).reshape(-1, 2, WIDTH)
    return m.drop(nnx.softmax(jnp.einsum("btd,bsd->bts", y, y)))


def scanned_keys(m, x):
    def step(carried, inputs):
        key, x_t = inputs
        carried = jnp.tanh(carried + x_t)
        return carried * jax.random.bernoulli(key, 0.5, carried.shape), carried

    inputs = jax.random.split(m.drop.rngs(), SEQ), jnp.swapaxes(m.dense(x), 0, 1)
    return jax.lax.scan(step, jnp.zeros((len(x), WIDTH)), inputs)[0]


def scanned_tokens(m, x):
    """What is carried has rows from the first step on: it begins as zeros of merged dims."""

    def step(carried, key):
        carried = carried + m.dense(x).reshape(-1, WIDTH)
        return carried * jax.random.bernoulli(key, 0.5, carried.shape), None

    return jax.lax.scan(step, jnp.zeros((x.shape[0] * SEQ, WIDTH)), jax.random.split(m.drop.rngs(), 2))[0]


def key_of_each(m, x):
    keys = jax.random.split(m.drop.rngs(), len(x))
    return jax.vmap(lambda key, y: y * jax.random.bernoulli(key, 0.5, y.shape))(keys, m.dense(x))


def key_of_each_token(m, x):
    y = m.dense(x).reshape(-1, WIDTH)
    keys = jax.random.split(m.drop.rngs(), len(y))
    return y + jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)


def recomputed(m, x):
    key = m.drop.rngs()
    flat = lambda y: y.reshape(-1, WIDTH) * jax.random.bernoulli(key, 0.5, (y.size // WIDTH, 1))  # noqa: E731
    return jax.checkpoint(flat)(m.dense(x))


CALLS = {
    "rows first": lambda m, x: m.drop(m.dense(x)),
    "tokens, as in the issue": lambda m, x: m.drop(m.dense(x).reshape(-1, WIDTH)).reshape(*x.shape[:2], -1),
    "time before rows": lambda m, x: m.drop(m.dense(x).swapaxes(0, 1).reshape(-1, WIDTH)),
    "rows last": lambda m, x: m.drop(m.dense(x).transpose(1, 2, 0)),
    "all dims merged": lambda m, x: m.drop(m.dense(x).reshape(-1)),
    "windows": windows,
    "one mask for all tokens": lambda m, x: m.dense(x) * jax.random.normal(m.drop.rngs(), (len(x), 1, 1)),
    "weights": lambda m, x: x @ (m.dense.kernel[...] + jax.random.normal(m.drop.rngs(), (EMBED, WIDTH))),
    "a scan over time": scanned_keys,
    "a scan over layers": scanned_tokens,
    "recomputed": recomputed,
    "a key of each row": key_of_each,
    "a key of each token": key_of_each_token,
    "gamma": lambda m, x: m.dense(x) * jax.random.gamma(m.drop.rngs(), 2.0, (len(x), SEQ, WIDTH)),
}


def by_split(model, draws, sizes, x=X):
    """The loss of a batch of 12 rows in microbatches of each of these sizes."""
    params, model_state = model.init(jax.random.key(1))

    def part(rows, first):
        key = row_key(jax.random.key(3), first, len(rows), draws)
        return loss(lambda *i: model.apply(params, model_state, key, True, *i)[0], {"x": rows})[0]

    part = jax.jit(part)
    return [sum(float(part(x[i : i + n], i)) for i in range(0, len(x), n)) for n in sizes]


# these draw by rejection, in loops that take long to compile, or are like others
LEFT_OUT = ("gamma", "a key of each token", "a scan over layers")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in LEFT_OUT)) for name in CALLS]
)
def test_any_split_of_a_batch_draws_as_the_whole_batch(name):
    model = model_of(CALLS[name])
    found = find_draws(model, loss, {"x": X})
    assert found.problems == ()
    whole, quarters = by_split(model, found.draws, (12, 3))
    assert quarters == pytest.approx(whole, rel=1e-5)


def test_masks_of_rows_are_those_of_the_plain_rule():
    """A run that was begun with `row_key` without draws continues with the same numbers."""
    model = model_of(CALLS["rows first"])
    assert by_split(model, find_draws(model, loss, {"x": X}).draws, [6]) == by_split(model, None, [6])


def test_a_dim_that_equals_the_rows_by_chance_counts_no_rows():
    """Here 4 rows, and weights of 4 x 8: one noise for all rows, as with any other number of rows."""
    model = model_of(CALLS["weights"])
    draws = find_draws(model, loss, {"x": X}).draws
    whole, part = by_split(model, draws, (12, 4))
    assert part == pytest.approx(whole, rel=1e-5)
    assert by_split(model, None, [4])[0] != pytest.approx(whole, rel=1e-3)


def test_a_linen_module_that_merges_tokens():
    class Drawing(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            return nn.Dropout(0.5, deterministic=not train)(nn.Dense(WIDTH)(x).reshape(-1, WIDTH))

    model = from_linen(Drawing(), jax.ShapeDtypeStruct(X.shape, X.dtype))
    (draw,) = find_draws(model, loss, {"x": X}).draws
    assert draw.shape == (SEQ, WIDTH)
    assert draw.dim == 0
    whole, halves = by_split(model, (draw,), (12, 6))
    assert halves == pytest.approx(whole, rel=1e-5)


def fold_in_numbers(m, x):
    key = m.drop.rngs()
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(x)))
    return jax.vmap(lambda key, y: y * jax.random.bernoulli(key, 0.5, y.shape))(keys, m.dense(x))


def seeded_numbers(m, x):
    return m.dense(x) + jax.vmap(lambda i: jax.random.normal(jax.random.key(i), (1, 1)))(jnp.arange(len(x)))


def by_python(m, x):
    return jnp.stack([m.drop(y) for y in m.dense(x)])


REFUSED = {
    "unmet": (
        lambda m, x: m.dense(x).sum() * jax.random.normal(m.drop.rngs(), (len(x) * SEQ,)).sum(),
        "draws (6 * rows): which of these entries belong to which row is not known",
    ),
    "pairs of rows": (
        lambda m, x: jax.random.normal(m.drop.rngs(), (len(x), len(x))) @ m.dense(x).reshape(len(x), -1),
        "draws (2, 2): its shape does not count each row once",
    ),
    "one row less": (
        lambda m, x: m.dense(x[1:]) * jax.random.normal(m.drop.rngs(), (len(x) - 1, 1, 1)),
        "draws (1, 1, 1): its shape does not count each row once",
    ),
    "a key of its own": (
        lambda m, x: m.dense(x) * jax.random.normal(jax.random.key(7), (len(x), 1, 1)),
        "draws (1, 1, 1): its key is not derived from the key that the model gets",
    ),
    "numbers folded in": (fold_in_numbers, "splits a key into (2): keys are made from numbers of rows"),
    "numbers as seeds": (seeded_numbers, "splits a key into (2): keys are made from numbers of rows"),
    "a loop over rows": (by_python, " does not do the same for 2 rows as for 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_draws_that_depend_on_the_split_are_named_by_their_line(name):
    call, text = REFUSED[name]
    problems = find_draws(model_of(call), loss, {"x": X}).problems
    assert text in problems[0]
    assert problems[0].startswith(f"{__file__}:")


def test_a_loss_that_cannot_take_two_rows_draws_nothing_or_is_refused():
    def of_groups(apply, batch):
        return loss(lambda x: apply(x).reshape(-1, 4, SEQ, WIDTH), batch)

    assert find_draws(model_of(lambda m, x: m.dense(x)), of_groups, {"x": X}) == find_draws(
        model_of(lambda m, x: m.dense(x)), loss, {"x": X}
    )
    (problem,) = find_draws(model_of(lambda m, x: m.drop(m.dense(x))), of_groups, {"x": X}).problems
    assert problem.startswith("the loss or the model cannot take 2 rows, so its draws cannot be followed")
    with pytest.raises(TypeError, match="of shape \\(6, 6, 8\\)"):
        find_draws(model_of(lambda m, x: m.dense(x)), of_groups, {"x": X[:6]})


def test_two_draws_of_one_shape_that_count_rows_otherwise():
    draws = (Draw(BITS, (1, 8), 0, 1, "a.py:3"), Draw(BITS, (4, 8), line="a.py:7"), Draw(SPLIT, (1,), 0))
    assert row_key(jax.random.key(0), 0, 5, draws).shape == ()
    with pytest.raises(ValueError) as error:
        row_key(jax.random.key(0), 0, 4, draws)
    assert str(error.value) == (
        "with 4 rows in a microbatch of a replica, a.py:3 and a.py:7 both have a draw of shape (4, 8), and"
        " rows are counted otherwise in each, so their numbers would depend on the layout; use another number"
        " of rows (batch, accumulate, data), or another shape for one of them"
    )


def test_a_draw_that_was_not_found_is_refused():
    key = row_key(jax.random.key(0), 0, 4, ())
    with pytest.raises(ValueError, match=r"a draw of shape \(4, 8\) for 4 rows is none of"):
        jax.random.normal(key, (4, 8))


def test_a_model_without_draws_is_traced_once():
    model = model_of(lambda m, x: m.dense(x))
    traced = []
    counted = replace(model, apply=lambda *given: (traced.append(1), model.apply(*given))[1])
    assert find_draws(counted, loss, {"x": X}).draws == ()
    assert len(traced) == 1
