"""The encoder: shapes, dims, padding that nobody sees, options that must not change its numbers."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from shardtrain.models.encoder import EncoderConfig

BERT = EncoderConfig(vocab=32, seq=8, embed=16, num_layers=2, num_heads=4, mlp=24, segments=3, remat="none")
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 32, (2, 8), dtype=np.int32)
MASK = np.array([[1] * 8, [1] * 5 + [0] * 3], np.int32)
SEGMENTS = RANDOM.integers(0, 3, (2, 8), dtype=np.int32)
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def logits_of(pure, quick_jit):
    """(config, *inputs) -> logits at the parameters of BERT."""

    def compute(config, *inputs):
        return np.asarray(quick_jit(pure(config).apply)(pure(BERT).params, *inputs))

    return compute


@pytest.fixture(scope="module")
def plain(logits_of):
    return logits_of(BERT, TOKENS, MASK, SEGMENTS)


def test_names_of_parameters(pure):
    assert set(pure(BERT).params) == {
        *("embedding", "positions", "segments", "embedding_norm", "blocks"),
        *("transform", "transform_norm", "head_bias"),
    }


def test_without_mask_and_segments_all_are_seen_and_of_the_first(logits_of):
    expected = logits_of(BERT, TOKENS, np.ones_like(MASK), np.zeros_like(SEGMENTS))
    assert_close(logits_of(BERT, TOKENS), expected)
    assert np.abs(logits_of(BERT, TOKENS, None, SEGMENTS) - expected).max() > 1e-3


def test_options_change_the_numbers(plain, logits_of):
    for change in ({"eps": 0.1}, {"activation": "gelu"}):
        assert np.abs(logits_of(replace(BERT, **change), TOKENS, MASK, SEGMENTS) - plain).max() > 1e-4
