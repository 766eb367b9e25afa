"""Sampling: the window, the key, the temperature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.generate import generate

CONFIG = DecoderConfig(vocab=16, seq=6, embed=8, num_layers=1, num_heads=2)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def model(pure):
    return jax.tree_util.Partial(pure(CONFIG).apply, pure(CONFIG).params)


@pytest.fixture(scope="module")
def naive(model, quick_jit):
    """The most likely tokens, with the last `seq` tokens as input and no padding."""
    compiled = quick_jit(lambda tokens: model(tokens)[:, -1].argmax(-1))

    def follow(tokens, num_tokens):
        tokens = np.asarray(tokens)
        for _ in range(num_tokens):
            added = np.asarray(compiled(tokens[:, -CONFIG.seq :]))
            tokens = np.concatenate([tokens, added[:, None]], axis=1)
        return tokens

    return follow


@pytest.mark.parametrize(
    "prompt", [[[1, 4, 1, 4], [2, 7, 1, 8]], [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]], ids=[4, 8]
)
def test_temperature_zero_takes_the_most_likely_also_past_the_window(model, naive, prompt):
    tokens = generate(model, prompt, 9, KEY, seq=CONFIG.seq, temperature=0.0)
    np.testing.assert_array_equal(tokens, naive(prompt, 9))
    assert tokens.dtype == np.int32


def test_a_full_window_moves_on_by_one():
    """The next token is the last plus the first that the model sees."""
    tokens = generate(
        lambda tokens: jax.nn.one_hot((tokens + tokens[:, :1]) % 10, 10),
        [[1, 2]],
        8,
        KEY,
        seq=3,
        temperature=0.0,
    )
    expected = [1, 2]
    for _ in range(8):
        expected.append((expected[-1] + expected[-3:][0]) % 10)
    assert tokens.tolist() == [expected]


def test_the_key_decides(model):
    same, again, other = (
        generate(model, [[1, 2]], 12, key, seq=CONFIG.seq, temperature=2.0)
        for key in (KEY, KEY, jax.random.key(1))
    )
    np.testing.assert_array_equal(same, again)
    assert not np.array_equal(same, other)
    assert len(set(same[0, 2:].tolist())) > 1


def test_temperature_divides_the_logits():
    """A window of one and two tokens, with odds 1 : 3, and 1 : 9 at half the temperature."""
    logits = jnp.log(jnp.array([1.0, 3.0]))
    apply = jax.tree_util.Partial(lambda logits, tokens: jnp.broadcast_to(logits, (*tokens.shape, 2)), logits)
    prompts = np.zeros((4000, 1), np.int32)
    ones = [generate(apply, prompts, 1, KEY, seq=1, temperature=t)[:, 1].mean() for t in (1.0, 0.5)]
    assert ones == pytest.approx([0.75, 0.9], abs=0.02)


def test_one_compiled_step_for_all_tokens():
    traces = []

    def apply(tokens):
        traces.append(tokens.shape)
        return jax.nn.one_hot((tokens + 1) % 10, 10)

    tokens = generate(apply, [[7]], 8, KEY, seq=4, temperature=0.0)
    assert tokens.tolist() == [[7, 8, 9, 0, 1, 2, 3, 4, 5]]
    assert traces == [(1, 4)]


def test_an_nnx_model_is_an_apply(pure, model):
    graph, state = nnx.split(nnx.eval_shape(lambda: CONFIG(nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, pure(CONFIG).params)
    options = {"num_tokens": 2, "key": KEY, "seq": CONFIG.seq}
    tokens = generate(nnx.merge(graph, state), [[1], [2]], **options)
    np.testing.assert_array_equal(tokens, generate(model, [[1], [2]], **options))


def test_nothing_to_add_gives_the_prompt_back(model):
    assert generate(model, [[1, 2]], 0, KEY, seq=CONFIG.seq).tolist() == [[1, 2]]


@pytest.mark.parametrize("prompt", [[1, 2], [[]]])
def test_refuses_a_prompt_that_is_no_matrix(prompt):
    with pytest.raises(ValueError, match="has shape") as error:
        generate(jnp.sin, prompt, 1, KEY, seq=4)
    assert str(error.value) == (
        f"prompt_tokens has shape {np.shape(prompt)}; it must be (batch, length), both at least 1. "
        "Use [[first_token]] for one prompt of one token."
    )


def test_refuses_negative_temperature():
    with pytest.raises(ValueError, match="temperature") as error:
        generate(jnp.sin, [[1]], 1, KEY, seq=4, temperature=-1.0)
    assert str(error.value) == (
        "num_tokens is 1 and temperature is -1.0; neither may be below 0. "
        "Use temperature=0.0 for the most likely token."
    )
