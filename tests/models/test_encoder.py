"""The encoder: shapes, dims, padding that nobody sees, options that must not change its numbers."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_models import list_parameters

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


def test_parameter_tree():
    dims = {"/".join(map(str, path)): v.get_metadata()["out_sharding"] for path, v in list_parameters(BERT)}
    attention = {
        f"blocks/attention/{which}": ("embed", heads, "head_dim")
        for which, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
    }
    linear = {
        **attention,
        "blocks/attention/o": ("heads", "head_dim", "embed"),
        "blocks/mlp/up": ("embed", "mlp"),
        "blocks/mlp/down": ("mlp", "embed"),
        "transform": ("embed", "mlp"),
    }
    expected = {
        "embedding": ("vocab", "embed"),
        "positions": ("seq", "embed"),
        "segments": ("segments", "embed"),
        "head_bias": ("vocab",),
    }
    for path, own in linear.items():
        out = own[1:] if own[0] == "embed" else own[-1:]
        expected |= {f"{path}/kernel": own, f"{path}/bias": out}
    for path in ("embedding_norm", "blocks/attention_norm", "blocks/mlp_norm", "transform_norm"):
        expected |= {f"{path}/scale": ("embed",), f"{path}/bias": ("embed",)}
    assert dims == {path: ("layers",) * path.startswith("blocks") + own for path, own in expected.items()}


def test_without_mask_and_segments_all_are_seen_and_of_the_first(logits_of):
    expected = logits_of(BERT, TOKENS, np.ones_like(MASK), np.zeros_like(SEGMENTS))
    assert_close(logits_of(BERT, TOKENS), expected)
    assert np.abs(logits_of(BERT, TOKENS, None, SEGMENTS) - expected).max() > 1e-3


def test_options_change_the_numbers(plain, logits_of):
    for change in ({"eps": 0.1}, {"activation": "gelu"}):
        assert np.abs(logits_of(replace(BERT, **change), TOKENS, MASK, SEGMENTS) - plain).max() > 1e-4


def test_tokens_longer_than_seq_are_refused(pure):
    with pytest.raises(ValueError, match="seq=8 positions"):
        jax.eval_shape(pure(BERT).apply, pure(BERT).params, jnp.zeros((1, 9), jnp.int32))
