"""How tokens are drawn: the temperature, and which are likely enough, against sums by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.models.sampling import Sampling, mask_unlikely, sample

LOGITS = np.random.default_rng(0).normal(size=(5, 11)).astype(np.float32)


def test_temperature_divides_the_logits():
    """Odds of 1 : 3, and 1 : 9 at half the temperature."""
    logits = jnp.broadcast_to(jnp.log(jnp.array([1.0, 3.0])), (4000, 2))
    keys = jax.random.split(jax.random.key(0), 4000)
    ones = [sample(logits, keys, Sampling(temperature=t)).mean() for t in (1.0, 0.5)]
    assert ones == pytest.approx([0.75, 0.9], abs=0.02)


def test_temperature_zero_takes_the_likeliest():
    found = sample(jnp.asarray(LOGITS), jax.random.split(jax.random.key(0), 5), Sampling(temperature=0.0))
    assert found.tolist() == LOGITS.argmax(-1).tolist()
    assert found.dtype == jnp.int32


@pytest.mark.parametrize("top_k", [None, 1, 4, 11, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.05])
def test_the_tokens_that_are_likely_enough(top_k, top_p):
    """The fewest of the k likeliest whose probabilities, among those k, add up to p."""
    found = np.isfinite(mask_unlikely(jnp.asarray(LOGITS), top_k, top_p))
    for logits, kept in zip(LOGITS, found, strict=True):
        order = np.argsort(-logits)[: top_k or len(logits)]
        probabilities = np.exp(logits[order]) / np.exp(logits[order]).sum()
        number = len(order) if top_p == 1 else 1 + int((np.cumsum(probabilities) < top_p).sum())
        assert sorted(np.flatnonzero(kept)) == sorted(order[:number])


def test_only_likely_tokens_are_drawn():
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[0]), (300, 11))
    found = sample(logits, jax.random.split(jax.random.key(1), 300), Sampling(temperature=3.0, top_k=3))
    assert set(found.tolist()) == set(np.argsort(-LOGITS[0])[:3].tolist())


def test_refuses_what_is_out_of_range():
    with pytest.raises(ValueError, match="Sampling") as error:
        Sampling(temperature=-1.0, top_k=0, top_p=1.5)
    assert str(error.value) == (
        "Sampling:\n"
        "  - temperature is -1.0; it must be 0 or above. Use temperature=0.0 for the likeliest token.\n"
        "  - top_k is 0; it must be at least 1. Use top_k=None for all tokens.\n"
        "  - top_p is 1.5; it must be above 0 and at most 1. Use top_p=1.0 for all tokens."
    )
